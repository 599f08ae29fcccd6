"""Decode images of any format into one uint8 tensor."""

import io
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from adaptsfl.errors import InvalidInput, first_line

GREY = {"1", "L", "LA"}
DEEP = {"I", "F", "I;16", "I;16B", "I;16L"}  # more than 8 bits: converting would clip them


def decode_images(encoded: Iterable[bytes | Path], count: int, where: Callable[[int], str]) -> Tensor:
    """Return `count` images of one size as uint8 (count, C, H, W): C is 1 if the first is grey, else 3.

    `where` names the k-th image for error messages. Decoding uses one core: Pillow holds the GIL while it decodes, and
    processes forked beside torch's threads may hang. The result is cached, so each file is decoded once.
    """
    result: NDArray[np.uint8] | None = None
    for k, pixels in enumerate(_pixels(encoded, where)):
        if result is None:
            result = np.empty((count, *pixels.shape), dtype=np.uint8)
        if pixels.shape != result.shape[1:]:
            problem = f"{where(k)} is {_size(pixels)} pixels, the first image is {_size(result[0])}"
            raise InvalidInput("data.path", problem, "Bring all images to one size")
        result[k] = pixels
    assert result is not None, "callers see to it that there are images"
    return torch.from_numpy(result).permute(0, 3, 1, 2).contiguous()


def _pixels(encoded: Iterable[bytes | Path], where: Callable[[int], str]) -> Iterator[NDArray[np.uint8]]:
    """Yield each image as (H, W, C), all in the colours of the first."""
    mode, last_format = "", None
    for k, content in enumerate(encoded):
        try:
            with _opened(content, last_format) as image:
                last_format = image.format
                if image.mode in DEEP:
                    problem = f"{where(k)} has more than 8 bits per channel (mode {image.mode})"
                    raise InvalidInput("data.path", problem, "Convert it to 8 bits, or write a dataset factory")
                mode = mode or ("L" if image.mode in GREY else "RGB")
                flat = image if image.mode == mode else image.convert(mode)
                pixels = np.asarray(flat, dtype=np.uint8)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            problem = f"{where(k)} cannot be decoded: {first_line(error)}"
            raise InvalidInput("data.path", problem, "Get the file again, or remove the image") from error
        yield pixels if pixels.ndim == 3 else pixels[:, :, None]


def _opened(content: bytes | Path, likely: str | None) -> Image.Image:
    """Open an image, trying the format of the previous image first: that halves the time for small images."""
    if likely is not None:
        try:
            return Image.open(io.BytesIO(content) if isinstance(content, bytes) else content, formats=[likely])
        except UnidentifiedImageError:
            pass
    return Image.open(io.BytesIO(content) if isinstance(content, bytes) else content)


def _size(pixels: NDArray[np.uint8]) -> str:
    return f"{pixels.shape[1]}×{pixels.shape[0]}"
