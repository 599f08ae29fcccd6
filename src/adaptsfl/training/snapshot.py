"""Snapshots: all that training changes, as one value, to resume from later."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput
from adaptsfl.training.settings import present_devices
from adaptsfl.training.stack import LayerStack


@dataclass(frozen=True)
class EngineState:
    """All that a trainer needs to resume exactly, except model, settings and data.

    Attributes:
        round: rounds done.
        planned_at: the round after which the plan began.
        ages: rounds since the copies of each client-specific layer were last equal.
        steps: each layer's optimiser steps since its state was zero; one per device, or one while all are equal.
        tensors: each layer's parameters, buffers and optimiser state; one row per device, or one while all are equal.
        present: the devices that took part in the last round.
        shard: on one of several ranks, the devices whose copies the rows are, in order; at least two rows, as a
            single row means that all copies are equal. None: the copies of all devices.
    """

    plan: Decision
    round: int
    planned_at: int
    ages: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]
    tensors: tuple[Mapping[str, Tensor], ...]
    present: tuple[int, ...]
    shard: tuple[int, ...] | None = None


def restore_layers(layers: Sequence[LayerStack], state: EngineState, devices: int) -> None:
    """Restore every layer from a snapshot."""
    shard, rows = layers[0].sharding.shard, layers[0].sharding.rows
    if state.shard != shard:
        problem = f"holds the copies of {_named(state.shard)}, this rank those of {_named(shard)}"
        remedy = "Load it whole" if shard is None else "Load the checkpoint with devices=trainer.sharding.shard"
        raise InvalidInput("state", problem, remedy)
    if not len(state.tensors) == len(state.steps) == len(layers):
        problem = f"holds {len(state.tensors)} layers, the model has {len(layers)}"
        raise InvalidInput("state", problem, "Give a snapshot of the same model")
    for number, steps in enumerate(state.steps, start=1):
        if len(steps) not in (1, rows):
            raise InvalidInput(f"layer {number}.steps", f"has {len(steps)} entries", f"Give 1 or {rows}")
    present_devices(state.present, devices)
    for number, (layer, steps, tensors) in enumerate(zip(layers, state.steps, state.tensors, strict=True), start=1):
        try:
            layer.load(tensors)
        except InvalidInput as error:
            raise error.inside(f"layer {number}") from None
        layer.steps = list(steps)


def _named(devices: Sequence[int] | None) -> str:
    return "all devices" if devices is None else f"devices {list(devices)}"
