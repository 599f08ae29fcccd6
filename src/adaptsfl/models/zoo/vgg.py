"""VGG: plain stacks of 3×3 convolutions, pooling at the end of each stage, then fully connected layers."""

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from adaptsfl import checks
from adaptsfl.models.zoo.parts import Norm, convolution, linear, scaled, share

VGG11_STAGES = ((64, 1), (128, 1), (256, 2), (512, 2), (512, 2))
VGG16_STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
DIGITS_STAGES = ((32, 2), (64, 2))


def vgg11(*, classes: int = 10, width: float = 1.0, norm: Norm = "none", dropout: float = 0.0) -> nn.Sequential:
    """VGG-11 for 32×32 images: 8 convolutions and 3 fully connected layers of width 512, so L = 11."""
    hidden = scaled(512, width)
    return _vgg(3, 32, VGG11_STAGES, (hidden, hidden), classes=classes, width=width, norm=norm, dropout=dropout)


def vgg16(*, classes: int = 10, width: float = 1.0, norm: Norm = "none", dropout: float = 0.0) -> nn.Sequential:
    """VGG-16 for 32×32 images: 13 convolutions and 3 fully connected layers of width 512, so L = 16."""
    hidden = scaled(512, width)
    return _vgg(3, 32, VGG16_STAGES, (hidden, hidden), classes=classes, width=width, norm=norm, dropout=dropout)


def vgg_digits(*, classes: int = 10, width: float = 1.0, norm: Norm = "none", dropout: float = 0.0) -> nn.Sequential:
    """VGG for the 8×8 digits: 4 convolutions and 2 fully connected layers, so L = 6."""
    hidden = (scaled(64, width),)
    return _vgg(1, 8, DIGITS_STAGES, hidden, classes=classes, width=width, norm=norm, dropout=dropout)


def _vgg(
    channels: int,
    size: int,
    stages: Sequence[tuple[int, int]],
    hidden: Sequence[int],
    *,
    classes: int,
    width: float,
    norm: Norm,
    dropout: float,
) -> nn.Sequential:
    checks.whole_number("classes", classes)
    share("dropout", dropout)
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    for stage, (full, count) in enumerate(stages, start=1):
        outputs = scaled(full, width)
        for k in range(1, count + 1):
            # Pooling before the ReLU gives the same values as after it and leaves the ReLU a quarter of the work.
            pool = [nn.MaxPool2d(2)] if k == count else []
            parts[f"conv{stage}_{k}"] = nn.Sequential(*convolution(channels, outputs, norm), *pool, nn.ReLU())
            channels = outputs
        size //= 2
    parts["flatten"] = nn.Flatten()
    inputs = channels * size * size
    for k, outputs in enumerate(hidden, start=1):
        parts[f"fc{k}"] = nn.Sequential(linear(inputs, outputs), nn.ReLU(), nn.Dropout(dropout))
        inputs = outputs
    parts[f"fc{len(hidden) + 1}"] = nn.Linear(inputs, classes)
    return nn.Sequential(parts)
