"""Images in folders, one folder per class."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from adaptsfl.data.cache import Decoded, cached
from adaptsfl.data.images import decode_images
from adaptsfl.data.samples import Samples
from adaptsfl.errors import InvalidInput, unknown

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff"}


def read_class_folders(folder: Path, cache: Path, classes: Sequence[str] | None = None) -> Decoded:
    """Decode `folder`/<class>/*; labels follow the order of `classes`, by default alphabetical."""
    names, files = _labelled_files(folder, classes)
    paths = [path for path, _ in files]

    def decode() -> Decoded:
        inputs = decode_images(paths, len(paths), lambda k: str(paths[k]))
        return Samples(inputs, torch.tensor([label for _, label in files])), names

    return cached(cache, folder, paths, decode, reading="/".join(names))  # a folder's name cannot contain a slash


def read_class_labels(folder: Path, classes: Sequence[str]) -> Tensor:
    """Return the labels that `read_class_folders` returns, without reading any image."""
    _, files = _labelled_files(folder, classes)
    return torch.tensor([label for _, label in files])


def _labelled_files(folder: Path, classes: Sequence[str] | None) -> tuple[tuple[str, ...], list[tuple[Path, int]]]:
    """Return the names of the classes, and all images with their labels."""
    if not folder.is_dir():
        raise InvalidInput("data.path", f"{folder} is not a folder", "Give a folder with one folder per class")
    present = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    names = tuple(present if classes is None else classes)
    for name in present:
        if name not in names:
            raise unknown(
                "data.path", f"{folder.name}/{name}", [f"{folder.name}/{k}" for k in names], "Rename the class"
            )
    files = [(file, names.index(name)) for name in present for file in _images_in(folder / name)]
    if not files:
        ending = ", ".join(sorted(SUFFIXES))
        raise InvalidInput("data.path", f"{folder} has no images", f"Put them in <class>/ folders, as {ending}")
    return names, files


def _images_in(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES)
    if not files:
        raise InvalidInput("data.path", f"the class folder {folder} has no images", "Add some, or remove the folder")
    return files
