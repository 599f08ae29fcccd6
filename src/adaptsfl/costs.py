"""What every possible cut of a model costs: work, payload and memory.

Cut j puts layers 1..j on the device and the rest on the edge server. Cut L is allowed: the device then holds
the whole model and sends the logits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from adaptsfl import checks
from adaptsfl.checks import FloatArray
from adaptsfl.errors import InvalidInput

BITS_PER_BYTE = 8
# The types in which activations and gradients can be sent, and the bits of one number in each.
NUMBER_BITS: Mapping[str, int] = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4}
WIRE_DTYPES = tuple(NUMBER_BITS)
# By how much each type is assumed to multiply the rounds before that is measured; docs/calibration.md has measurements.
ASSUMED_FACTORS: Mapping[str, float] = {"float32": 1.0, "float16": 1.0, "bfloat16": 1.0, "int8": 1.01, "int4": 1.1}
SCALED_BLOCK, SCALE_BITS = 64, 16  # int8 and int4 send one scale with every 64 numbers of a sample


def wire_bits(numbers: FloatArray | float, dtype: str) -> FloatArray:
    """Return the bits of n numbers of one sample: w n, and for int8 and int4 whole bytes and 16 ⌈n/64⌉ for scales."""
    if dtype not in NUMBER_BITS:
        raise InvalidInput("wire_dtype", f"is {dtype!r}", f"Give one of {', '.join(NUMBER_BITS)}")
    n = np.asarray(numbers, dtype=np.float64)
    bits = NUMBER_BITS[dtype] * n
    if not dtype.startswith("int"):
        return bits
    return np.ceil(bits / BITS_PER_BYTE) * BITS_PER_BYTE + SCALE_BITS * np.ceil(n / SCALED_BLOCK)


def numbers_on_wire(bits: FloatArray, dtype: str) -> FloatArray:
    """Return how many numbers a payload has, the inverse of `wire_bits`; half a byte that int4 fills counts as one."""
    width = NUMBER_BITS[dtype]
    if not dtype.startswith("int"):
        return bits / width
    block = width * SCALED_BLOCK + SCALE_BITS
    full = np.floor(bits / block)
    return full * SCALED_BLOCK + np.maximum(bits - full * block - SCALE_BITS, 0.0) / width


@dataclass(frozen=True)
class CutCosts:
    """Costs indexed by cut: entry j-1 belongs to cut j. FLOPs and payloads are per data sample.

    Attributes:
        forward_flops: ρ_j, forward work of layers 1..j (one multiply-add is 2 FLOPs).
        backward_flops: ϖ_j, backward work of layers 1..j.
        activation_bits: ψ_j, size of the activations that leave layer j.
        gradient_bits: χ_j, size of the gradients that come back to layer j.
        client_model_bits: δ_j, size of layers 1..j as the fed server averages them.
        memory_bytes: memory that a device needs to train layers 1..j with one mini-batch: parameters, their gradients,
            optimiser state and the batch's saved activations. None if unknown.
        statistics_bits: size of batch-norm's running statistics in layers 1..j; zero if not given.
        names: one readable name per layer; empty if unnamed.
        wire_dtype: the type of numbers in which activations and gradients are sent, one of `WIRE_DTYPES`.
    """

    forward_flops: FloatArray
    backward_flops: FloatArray
    activation_bits: FloatArray
    gradient_bits: FloatArray
    client_model_bits: FloatArray
    memory_bytes: FloatArray | None = None
    names: tuple[str, ...] = ()
    statistics_bits: FloatArray | None = None
    wire_dtype: str = "float32"

    def __post_init__(self) -> None:
        layers: int | None = None
        for field in (
            "forward_flops",
            "backward_flops",
            "activation_bits",
            "gradient_bits",
            "client_model_bits",
        ):
            values = checks.vector(field, getattr(self, field), length=layers, of="one per cut")
            layers = values.size
            object.__setattr__(self, field, values)
        for field in ("forward_flops", "backward_flops", "client_model_bits"):
            checks.rising(field, getattr(self, field))
        if self.memory_bytes is not None:
            memory = checks.vector("memory_bytes", self.memory_bytes, length=layers, of="one per cut")
            object.__setattr__(self, "memory_bytes", memory)
        if self.statistics_bits is not None:
            bits = checks.vector("statistics_bits", self.statistics_bits, length=layers, of="one per cut")
            checks.rising("statistics_bits", bits)
            object.__setattr__(self, "statistics_bits", bits)
        if self.wire_dtype not in WIRE_DTYPES:
            raise InvalidInput("wire_dtype", f"is {self.wire_dtype!r}", f"Choose one of: {', '.join(WIRE_DTYPES)}")
        object.__setattr__(self, "names", checks.names("names", self.names, self.layers, "one per layer"))

    @property
    def layers(self) -> int:
        """L, the number of layers and of cuts."""
        return self.forward_flops.size

    def name(self, cut: int) -> str:
        """Return the name of the layer after which cut `cut` lies."""
        return self.names[cut - 1] if self.names else f"layer {cut}"

    def sent_as(self, dtype: str) -> "CutCosts":
        """Return the costs with activations and gradients sent in another type of numbers."""
        if dtype == self.wire_dtype:
            return self
        return replace(
            self,
            activation_bits=wire_bits(numbers_on_wire(self.activation_bits, self.wire_dtype), dtype),
            gradient_bits=wire_bits(numbers_on_wire(self.gradient_bits, self.wire_dtype), dtype),
            wire_dtype=dtype,
        )


@dataclass(frozen=True)
class LayerCost:
    """One layer on its own, per data sample: the building block of `cut_costs`."""

    name: str
    forward_flops: float
    backward_flops: float
    output_values: int
    parameters: int
    saved_values: int


def cut_costs(
    layers: Sequence[LayerCost], batch_size: int, *, bits_per_value: int = 32, optimizer_values: int = 0
) -> CutCosts:
    """Sum the costs of layers into the costs of every cut.

    `optimizer_values` is how many numbers the optimiser keeps per parameter: 0 for SGD, 1 with momentum, 2 for Adam.
    """
    parameters = np.cumsum([float(layer.parameters) for layer in layers])
    saved = np.cumsum([float(layer.saved_values) for layer in layers])
    payload_bits = np.array([float(layer.output_values * bits_per_value) for layer in layers])
    model_values = parameters * (2 + optimizer_values)  # the parameter, its gradient, the optimiser's state
    return CutCosts(
        forward_flops=np.cumsum([layer.forward_flops for layer in layers]),
        backward_flops=np.cumsum([layer.backward_flops for layer in layers]),
        activation_bits=payload_bits,
        gradient_bits=payload_bits,
        client_model_bits=parameters * bits_per_value,
        memory_bytes=(model_values + batch_size * saved) * bits_per_value / BITS_PER_BYTE,
        names=tuple(layer.name for layer in layers),
    )
