"""CIFAR-10 and CIFAR-100: from parquet files on this machine, else from the Hugging Face hub."""

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaptsfl.data.cache import Decoded, cached, cached_part
from adaptsfl.data.parquet import decode_table, read_parquet, read_parquet_part
from adaptsfl.data.samples import Choice, Dataset, Normalisation
from adaptsfl.errors import InvalidInput, first_line

SPLITS = ("train", "test")


@dataclass(frozen=True)
class HubDataset:
    """A dataset of the hub: its repository, the column of the labels, and its normalisation, measured on `train`."""

    repository: str
    label: str
    normalisation: Normalisation


HUB: dict[str, HubDataset] = {
    "cifar10": HubDataset(
        "uoft-cs/cifar10",
        "label",
        Normalisation((0.49139968, 0.48215841, 0.44653091), (0.24703223, 0.24348513, 0.26158784)),
    ),
    "cifar100": HubDataset(
        "uoft-cs/cifar100",
        "fine_label",
        Normalisation((0.50707516, 0.48654887, 0.44091784), (0.26733429, 0.25643846, 0.27615047)),
    ),
}


def load_hub_dataset(name: str, path: str | None, cache: Path, chosen: Mapping[str, Choice] | None = None) -> Dataset:
    """Load a dataset of `HUB` from `path`, else from the folder in ADAPTSFL_DATA, else from the hub.

    `chosen` selects the samples of each split; by default all are loaded.
    """
    known, choices = HUB[name], chosen or {}
    folder = _folder(name, path)
    if folder is None:
        splits = _from_hub(name, known, cache, choices)
    else:
        splits = {}
        for split in SPLITS:
            files = _parquet_files(folder, split)
            if split in choices:
                splits[split] = _part_of_parquet(files, known.label, cache, choices[split])
            else:
                splits[split] = read_cached_parquet(files, known.label, cache)
    train, classes = splits["train"]
    return Dataset(train, splits["test"][0], classes, known.normalisation)


def read_cached_parquet(files: list[Path], label: str, cache: Path) -> Decoded:
    """Decode the parquet files of one split, or read the result from the cache."""
    return cached(cache, files[0], files, lambda: read_parquet(files, label), reading=label)


def _part_of_parquet(files: list[Path], label: str, cache: Path, choose: Choice) -> Decoded:
    """Return chosen samples, from the cache if it exists; the cache is not written, since it needs all samples."""
    return cached_part(cache, files[0], files, choose, reading=label) or read_parquet_part(files, label, choose)


def _folder(name: str, path: str | None) -> Path | None:
    """Return the folder with the parquet files, or None if they must come from the hub."""
    if path is not None:
        root = Path(path)
        if not root.is_dir():
            remedy = (
                f"Give a folder that holds train.parquet and test.parquet; or leave it out and {_set_variable(name)}"
            )
            raise InvalidInput("data.path", f"{path} is not a folder", remedy)
        return root / name if (root / name).is_dir() else root
    variable = os.environ.get("ADAPTSFL_DATA")
    inside = Path(variable) / name if variable else None
    return inside if inside is not None and inside.is_dir() else None


def _parquet_files(folder: Path, split: str) -> list[Path]:
    """Return the files of one split: in this folder (train.parquet), or in parts one level deeper, as on the hub."""
    files = sorted(folder.glob(f"{split}*.parquet")) or sorted(folder.glob(f"*/{split}*.parquet"))
    if not files:
        problem = f"{folder} has no {split}.parquet"
        raise InvalidInput("data.path", problem, "Put the hub's parquet files there: train*.parquet and test*.parquet")
    return files


def _from_hub(name: str, known: HubDataset, cache: Path, choices: Mapping[str, Choice]) -> dict[str, Decoded]:
    """Download with the hub's own client; the cache of decoded images refers to the client's local copy."""
    try:
        client: Any = importlib.import_module("datasets")
    except ModuleNotFoundError:
        variable = os.environ.get("ADAPTSFL_DATA")
        where = f"not in ADAPTSFL_DATA ({variable})" if variable else "ADAPTSFL_DATA is not set"
        remedy = f"Give data.path, or {_set_variable(name)}, or download it with: pip install 'adaptsfl[hub]'"
        raise InvalidInput("data.name", f"{name} is not on this machine ({where})", remedy) from None
    try:
        found = client.load_dataset(known.repository)
    except Exception as error:
        problem = f"{name} cannot be had from the hub ({known.repository}): {type(error).__name__}: {first_line(error)}"
        raise InvalidInput("data.name", problem, f"Check the network, or {_set_variable(name)}") from error
    return {split: _decoded(found[split], split, known, cache, choices.get(split)) for split in SPLITS}


def _decoded(rows: Any, split: str, known: HubDataset, cache: Path, choose: Choice | None) -> Decoded:
    files = [Path(entry["filename"]) for entry in rows.cache_files]
    source = f"{known.repository} ({split})"

    def decode() -> Decoded:
        samples, _ = decode_table(rows.with_format("arrow")[:], known.label, source)
        return samples, tuple(rows.features[known.label].names)

    if choose is not None and files:
        part = cached_part(cache, files[0], files, choose, reading=known.label)
        if part is not None:
            return part
    samples, names = cached(cache, files[0], files, decode, reading=known.label) if files else decode()
    return samples if choose is None else samples.only([choose(samples.labels)]), names


def _set_variable(name: str) -> str:
    return f"set ADAPTSFL_DATA to the folder that holds {name}/train.parquet and {name}/test.parquet"
