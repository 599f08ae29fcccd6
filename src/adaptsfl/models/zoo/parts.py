"""Shared parts of the zoo's networks: widths, normalisation, attention blocks."""

from typing import Literal, get_args

from torch import Tensor, nn
from torch.nn import functional

from adaptsfl import checks
from adaptsfl.errors import InvalidInput

Norm = Literal["none", "batch", "group"]
CHANNEL_STEP = 8  # channels are multiples of 8, so that group-norm's groups and the heads divide them
HEADS = 4


def scaled(channels: int, width: float) -> int:
    """Return `channels` times the width multiplier, as a multiple of 8 and at least 8."""
    steps = round(channels * checks.number("width", width, positive=True) / CHANNEL_STEP)
    return CHANNEL_STEP * max(1, steps)


def share(field: str, value: float) -> float:
    """Return `value` as a dropout probability: from 0 to below 1."""
    number = checks.number(field, value)
    if number >= 1:
        raise InvalidInput(field, f"is {number:g}", "Give a number from 0 to below 1")
    return number


def flag(field: str, value: bool) -> bool:
    """Return `value` if it is True or False."""
    if not isinstance(value, bool):
        raise InvalidInput(field, f"is {checks.short(value)}", "Give true or false")
    return value


def normalisation(norm: Norm, channels: int) -> list[nn.Module]:
    """Return the normalisation of a convolution with `channels` outputs: nothing, batch-norm or group-norm."""
    if norm not in get_args(Norm):
        raise InvalidInput("norm", f"is {norm!r}", "Give 'none', 'batch' or 'group'")
    if norm == "none":
        return []
    return [nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(CHANNEL_STEP, channels)]


def convolution(channels: int, outputs: int, norm: Norm, *, kernel: int = 3, stride: int = 1) -> list[nn.Module]:
    """Return a convolution that keeps the map's size (divided by the stride), and its normalisation.

    He initialisation keeps the signal's variance through many layers; without it plain VGG-16 does not train. With
    normalisation there is no bias, because the normalisation would subtract it.
    """
    conv = nn.Conv2d(channels, outputs, kernel, stride, padding=kernel // 2, bias=norm == "none")
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
    return [conv, *normalisation(norm, outputs)]


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a fully connected layer with He initialisation and no initial bias."""
    layer = nn.Linear(inputs, outputs)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    nn.init.zeros_(layer.bias)
    return layer


class SelfAttention(nn.Module):
    """Multi-head self-attention over (batch, tokens, dim)."""

    def __init__(self, dim: int, *, causal: bool, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.causal = causal
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Mix the tokens."""
        batch, tokens, dim = x.shape
        heads = self.qkv(x).view(batch, tokens, 3, HEADS, dim // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, heads, tokens, dim per head)
        chance = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=chance, is_causal=self.causal)
        mixed = self.out(mixed.transpose(1, 2).reshape(batch, tokens, dim))
        return functional.dropout(mixed, self.dropout, self.training)


class TransformerBlock(nn.Module):
    """A pre-norm transformer block: attention, then a two-layer perceptron, each around a residual connection."""

    def __init__(self, dim: int, *, causal: bool, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = SelfAttention(dim, causal=causal, dropout=dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        """Refine the tokens."""
        x = x + self.attention(self.norm1(x))
        refined: Tensor = x + self.mlp(self.norm2(x))
        return refined
