"""ResNet-18 with the CIFAR stem: one 3×3 convolution, eight residual blocks, one fully connected layer."""

from collections import OrderedDict

from torch import Tensor, nn

from adaptsfl import checks
from adaptsfl.models.zoo.parts import Norm, convolution, scaled

STAGES = (64, 128, 256, 512)


class Residual(nn.Module):
    """Two 3×3 convolutions around a shortcut.

    Two tensors cross its inside, the branch and the shortcut, so a cut can only lie at its end.
    """

    def __init__(self, channels: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        first = convolution(channels, outputs, norm, stride=stride)
        second = convolution(outputs, outputs, norm)
        if norm == "none":
            nn.init.zeros_(
                second[0].get_parameter("weight")
            )  # blocks start as identities: else the sums grow with depth
        self.branch = nn.Sequential(*first, nn.ReLU(), *second)
        changes = stride != 1 or channels != outputs
        shortcut = convolution(channels, outputs, norm, kernel=1, stride=stride) if changes else []
        self.shortcut = nn.Sequential(*shortcut)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Add the branch to the shortcut."""
        total: Tensor = self.relu(self.branch(x) + self.shortcut(x))
        return total


def resnet18(*, classes: int = 10, width: float = 1.0, norm: Norm = "batch") -> nn.Sequential:
    """ResNet-18 for 32×32 images: 17 convolutions and 1 fully connected layer.

    Residual blocks stay whole, so it has L = 10 layers: the stem, eight blocks (the last one with the average pooling
    after it) and the fully connected layer.
    """
    checks.whole_number("classes", classes)
    channels = scaled(STAGES[0], width)
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    parts["stem"] = nn.Sequential(*convolution(3, channels, norm), nn.ReLU())
    for stage, full in enumerate(STAGES, start=1):
        outputs = scaled(full, width)
        for k in (1, 2):
            stride = 2 if stage > 1 and k == 1 else 1
            parts[f"block{stage}_{k}"] = Residual(channels, outputs, stride, norm)
            channels = outputs
    parts["pool"] = nn.AdaptiveAvgPool2d(1)
    parts["flatten"] = nn.Flatten()
    parts["fc"] = nn.Linear(channels, classes)
    return nn.Sequential(parts)
