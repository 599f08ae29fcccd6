"""Images of noise, for tests of what reads images."""

import io

import numpy as np
from PIL import Image


def encoded(pixels: np.ndarray, format_: str = "WEBP") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format_, **({"lossless": True} if format_ == "WEBP" else {}))
    return file.getvalue()


def random_images(count: int, seed: int = 0, size: int = 8) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8)
