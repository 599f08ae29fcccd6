"""A small vision transformer: patches as tokens, pre-norm blocks, a classifier on the mean token."""

import torch
from torch import Tensor, nn

from adaptsfl import checks
from adaptsfl.errors import InvalidInput
from adaptsfl.models.zoo.parts import TransformerBlock, scaled, share


class VisionTransformer(nn.Module):
    """Tokens from `patch`×`patch` patches, `depth` blocks, a classifier on their mean."""

    def __init__(self, *, classes: int, dim: int, depth: int, image_size: int, patch: int, dropout: float) -> None:
        super().__init__()
        if image_size % patch:
            raise InvalidInput("patch", f"is {patch}", f"Give a divisor of image_size, which is {image_size}")
        self.patches = nn.Conv2d(3, dim, patch, stride=patch)
        self.position = nn.Parameter(0.02 * torch.randn(1, (image_size // patch) ** 2, dim))
        self.blocks = nn.ModuleList(TransformerBlock(dim, causal=False, dropout=dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of every image."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.position  # (batch, tokens, dim)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits


def vit(
    *,
    classes: int = 10,
    width: float = 1.0,
    depth: int = 6,
    image_size: int = 32,
    patch: int = 4,
    dropout: float = 0.1,
) -> VisionTransformer:
    """Small vision transformer: 128 wide, 6 blocks, 4×4 patches. L = 2 + 2 per block: a cut can lie inside a block."""
    return VisionTransformer(
        classes=checks.whole_number("classes", classes),
        dim=scaled(128, width),
        depth=checks.whole_number("depth", depth),
        image_size=checks.whole_number("image_size", image_size),
        patch=checks.whole_number("patch", patch),
        dropout=share("dropout", dropout),
    )
