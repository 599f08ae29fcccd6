"""Compare a split model with the original model before it is used."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adaptsfl.errors import InvalidInput, first_line
from adaptsfl.models.cuts import with_batch
from adaptsfl.models.keep import untouched
from adaptsfl.models.trace import EXPLICIT, mode

IN_PLACE = f"Change buffers in place, as in self.mean.copy_(new). {EXPLICIT}"
BATCHES = (2, 5, 1)  # several: a trace may be valid for one size only, and a model may keep state between runs
SHIFT = 0.1  # added to buffers, because their initial values are often zero
ROUNDING_FLOOR = 1e-5  # of the largest gradient's norm
GRADIENT_TOLERANCE = 1e-2  # relative to the gradient's norm: rounding, also in half precision


class Differs(InvalidInput):
    """The layers give other results than the model."""


@dataclass(frozen=True)
class _Result:
    """One run: the output, the gradients of the parameters, and the buffers after it."""

    output: Tensor
    gradients: list[Tensor | None]
    buffers: dict[str, Tensor]


def verify(module: nn.Module, whole: nn.Module, names: Sequence[str], example: Tensor, field: str) -> None:
    """Compare `whole`, the piece with all layers, with the original in both modes, on copies of the buffers.

    Several batches of different sizes, with random samples, run one after the other. Outputs and buffers must agree bit
    for bit. Gradients may round differently, because some exported models run other kernels, but a missing or an
    additional gradient is detected.
    """
    if example.device.type == "meta":
        return
    parameters = [tensor for tensor in module.parameters() if tensor.requires_grad]
    for training in (True, False):
        when = "training" if training else "evaluation"
        inputs, buffers, expected = _expected(module, example, parameters, training)
        held = {name for name, _ in whole.named_buffers(remove_duplicate=False)}
        start = {name: tensor for name, tensor in buffers.items() if name in held}
        try:
            with untouched(module), mode(whole, training):
                found = _runs(whole, inputs, start, parameters)
        except Exception as error:
            problem = f"run one after the other fail in {when} mode: {first_line(error)}"
            raise Differs(field, f"the layers {', '.join(names)}, {problem}", EXPLICIT) from error
        for x, a, b in zip(inputs, expected, found, strict=True):
            what = _difference(a, b, buffers)
            if what:
                size = "" if len(x) == BATCHES[0] else f" with a batch of {len(x)}"
                problem = f"run one after the other do not have the model's {what} in {when} mode{size}"
                remedy = IN_PLACE if what.startswith("buffer") else EXPLICIT
                raise Differs(field, f"the layers {', '.join(names)}, {problem}", remedy)


def _difference(expected: _Result, found: _Result, start: Mapping[str, Tensor]) -> str:
    """Return what differs, or ""; buffers that no layer holds must have their initial values."""
    if not _same(expected.output, found.output):
        return "outputs"
    if not _near(expected.gradients, found.gradients):
        return "gradients"
    left = {**start, **found.buffers}
    changed = [name for name, tensor in expected.buffers.items() if not _same(tensor, left[name])]
    return f"buffer {changed[0]!r}" if changed else ""


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def _expected(
    module: nn.Module, example: Tensor, parameters: Sequence[Tensor], training: bool
) -> tuple[list[Tensor], dict[str, Tensor], list[_Result]]:
    """Return inputs and buffers with which the model runs in this mode, and the results.

    Not every model accepts random samples and shifted buffers, or a batch of one in training. If it fails with these,
    it gets its own buffers and the example input instead, and no batch of one.
    """
    random = [_samples(example, size) for size in BATCHES]
    given = [with_batch(example, size) for size in BATCHES]
    own = dict(module.named_buffers(remove_duplicate=False))
    shifted = _shifted(own)
    for inputs, buffers in ((random, shifted), (random, own), (given, own)):
        for some in (inputs, inputs[:-1]):
            try:
                with untouched(module), mode(module, training):
                    results = _runs(module, some, buffers, parameters)
            except Exception as error:
                last = error
                continue
            if all(torch.isfinite(result.output).all() for result in results) or inputs is given:
                return some, buffers, results
    when = "training" if training else "evaluation"
    problem = f"{type(module).__name__} itself fails in {when} mode, forward or backward: {first_line(last)}"
    raise InvalidInput("model", problem, "Make it run with batches of any size, and its loss backward") from last


def _samples(example: Tensor, size: int) -> Tensor:
    """Return different samples: random ones, or, for integer inputs, rotations of the first sample."""
    if example.is_floating_point() or example.is_complex():
        generator = torch.Generator().manual_seed(size)
        shape = (size, *example.shape[1:])
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(example)
    flat = example[0].flatten()
    return torch.stack([flat.roll(k).view_as(example[0]) for k in range(size)])


def _shifted(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return floating-point buffers a little larger, so that variances stay positive; a shared buffer changes once."""
    moved: dict[int, Tensor] = {}
    for k, tensor in enumerate(buffers.values()):
        if tensor.is_floating_point() and id(tensor) not in moved:
            generator = torch.Generator().manual_seed(k)
            noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float32).to(tensor)
            moved[id(tensor)] = tensor + SHIFT * noise
    return {name: moved.get(id(tensor), tensor) for name, tensor in buffers.items()}


def _runs(
    module: nn.Module, inputs: Sequence[Tensor], buffers: Mapping[str, Tensor], parameters: Sequence[Tensor]
) -> list[_Result]:
    """Run one batch after the other; each starts with the buffers that the previous one left."""
    copies = {id(tensor): tensor.detach().clone() for tensor in buffers.values()}
    state = {name: copies[id(tensor)] for name, tensor in buffers.items()}
    with _seeded(), torch.enable_grad():
        return [_run(module, x, state, parameters) for x in inputs]


def _run(module: nn.Module, x: Tensor, state: dict[str, Tensor], parameters: Sequence[Tensor]) -> _Result:
    output = _tensors(torch.func.functional_call(module, state, (x.clone(),)))[0]
    state.update({name: tensor.detach() for name, tensor in state.items()})
    left = {name: tensor.clone() for name, tensor in state.items()}
    if not output.requires_grad or not parameters:
        return _Result(output.detach(), [], left)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device).view_as(output)
    gradients = torch.autograd.grad((output * weights).sum(), parameters, allow_unused=True)
    return _Result(output.detach(), list(gradients), left)


@contextmanager
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def _near(expected: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> bool:
    """Whether gradients agree within rounding; one that is zero up to rounding is compared with the largest norm."""
    if [tensor is None for tensor in expected] != [tensor is None for tensor in found]:
        return False
    pairs = [(a, b) for a, b in zip(expected, found, strict=True) if a is not None and b is not None]
    norms = [float(torch.nan_to_num(a).norm()) for a, _ in pairs]
    floor = ROUNDING_FLOOR * max(norms, default=0.0)
    apart = [float(torch.nan_to_num(a - b).norm()) for a, b in pairs]
    return all(d <= GRADIENT_TOLERANCE * norm + floor for d, norm in zip(apart, norms, strict=True))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return [tensor for part in parts for tensor in _tensors(part)]
