"""The standard augmentation of CIFAR images: a random crop out of a padded image, and a random mirror image."""

import torch
from torch import Tensor
from torch.nn import functional

PADDING = 4


def draw_shifts(count: int, generator: torch.Generator) -> Tensor:
    """Draw for each image how far down and right its crop begins (0 … 8) and whether it is mirrored: (count, 3)."""
    corner = torch.randint(0, 2 * PADDING + 1, (count, 2), generator=generator)
    mirrored = torch.randint(0, 2, (count, 1), generator=generator)
    return torch.cat([corner, mirrored], dim=1)


def crop_and_flip(images: Tensor, shifts: Tensor) -> Tensor:
    """Pad images (b, C, H, W) with 4 black pixels, crop each to its size at its shift, and mirror some."""
    height, width = images.shape[2:]
    padded = functional.pad(images, (PADDING,) * 4)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # (b, C, 9, 9, H, W): every crop, as a view
    each = torch.arange(len(images), device=images.device)
    cropped = windows[each, :, shifts[:, 0], shifts[:, 1]]
    return torch.where(shifts[:, 2, None, None, None].bool(), cropped.flip(3), cropped)


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return images (b, C, H, W) cropped and mirrored at random; the same generator state gives the same result."""
    return crop_and_flip(images, draw_shifts(len(images), generator).to(images.device))
