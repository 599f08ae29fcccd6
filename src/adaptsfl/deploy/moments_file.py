"""Moments of batch-norm's inputs on the wire: one safetensors file, validated against the model's batch-norms."""

from collections.abc import Iterable, Mapping
from math import inf

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from adaptsfl.checks import printable
from adaptsfl.deploy.layers_file import HEADER_BYTES, LARGEST
from adaptsfl.errors import BadMessage
from adaptsfl.models import SplitModel
from adaptsfl.models.pieces import tracked_norms
from adaptsfl.training.statistics import Moments, Norm

NormMoments = Mapping[Norm, Moments]


def to_bytes(moments: NormMoments) -> bytes:
    """Return moments as the bytes of a file: means and variances in single precision, weight and count in double."""
    tensors: dict[str, Tensor] = {}
    for (layer, norm), found in moments.items():
        name = f"{layer}.{norm}"
        tensors[f"{name}.mean"], tensors[f"{name}.variance"] = found.mean.float().cpu(), found.variance.float().cpu()
        tensors[f"{name}.sizes"] = torch.tensor([found.weight, found.count], dtype=torch.float64)
    return save(tensors)


def plausible(found: Moments, most: float = LARGEST) -> bool:
    """Whether moments can be the result of a forward pass. Then merged ones are plausible too, but for rounding."""
    if not (0 < found.weight < inf and 1 <= found.count <= LARGEST and bool((found.variance >= 0).all())):
        return False
    second = found.variance + found.mean.square()
    return bool((second <= most).all())  # False for NaN


class MomentsTemplate:
    """The batch-norms of a model; moments of other parties are validated against them."""

    def __init__(self, model: SplitModel) -> None:
        self._channels: dict[Norm, int] = {}
        for number, piece in enumerate(model.pieces, start=1):
            for norm, (mean, _) in tracked_norms(piece).items():
                self._channels[number, norm] = piece.get_buffer(mean).numel()

    def norms(self, layers: Iterable[int]) -> list[Norm]:
        """Return the batch-norms in some layers."""
        wanted = set(layers)
        return [norm for norm in self._channels if norm[0] in wanted]

    def largest_bytes(self, layers: Iterable[int]) -> int:
        """Return the maximum size in bytes of a file with the moments of these layers."""
        return HEADER_BYTES + sum(8 * self._channels[norm] + 400 + 3 * len(norm[1]) for norm in self.norms(layers))

    def from_bytes(self, data: bytes | bytearray, layers: Iterable[int], most: float = LARGEST) -> dict[Norm, Moments]:
        """Return the moments of exactly the batch-norms in these layers, or reject the file.

        Args:
            most: the limit of mean² + variance.
        """
        try:
            tensors = load(bytes(data))
        except (SafetensorError, ValueError, KeyError, RuntimeError, OverflowError) as error:
            raise BadMessage(f"moments came in a file that cannot be read ({printable(str(error), 200)})") from None
        norms = self.norms(layers)
        if len(tensors) != 3 * len(norms):
            raise BadMessage(f"moments came as {len(tensors)} tensors, {3 * len(norms)} were expected")
        return {norm: self._moments(norm, tensors, most) for norm in norms}

    def _moments(self, norm: Norm, tensors: Mapping[str, Tensor], most: float) -> Moments:
        name, channels = f"{norm[0]}.{norm[1]}", self._channels[norm]
        expected = {
            "mean": (channels, torch.float32),
            "variance": (channels, torch.float32),
            "sizes": (2, torch.float64),
        }
        found = {}
        for kind, (size, dtype) in expected.items():
            tensor = tensors.get(f"{name}.{kind}")
            if tensor is None or (tuple(tensor.shape), tensor.dtype) != ((size,), dtype):
                raise BadMessage(
                    f"moments of layer {norm[0]} came without {norm[1][:60]!r}, or in another shape or type"
                )
            found[kind] = tensor.double()
        weight, count = found["sizes"].tolist()
        moments = Moments(weight, count, found["mean"], found["variance"])
        if not plausible(moments, most):
            raise BadMessage(f"moments of layer {norm[0]} came with numbers in {norm[1][:60]!r} that cannot be")
        return moments
