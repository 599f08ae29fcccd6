"""All that training changes, as one value: what is kept to go on later."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adaptsfl.errors import InvalidInput
from adaptsfl.training.ranks import Ranks
from adaptsfl.training.schedule import TrainingPlan
from adaptsfl.training.settings import present_devices
from adaptsfl.training.stack import LayerStack


@dataclass(frozen=True)
class EngineState:
    """All that a trainer needs to go on as if it had never stopped, but for model, settings and data.

    Attributes:
        round: rounds done.
        planned_at: the round after which the plan began.
        ages: rounds since the copies of each client-specific layer were last equal.
        steps: each layer's optimiser steps since its state was zero; one per device, or one while all are equal.
        tensors: each layer's parameters, buffers and optimiser state; one row per device, or one while all are equal.
        present: the devices that took part in the last round.
    """

    plan: TrainingPlan
    round: int
    planned_at: int
    ages: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]
    tensors: tuple[Mapping[str, Tensor], ...]
    present: tuple[int, ...]


Parts = Sequence[Sequence[int]]  # the devices of every rank


def gathered(
    layers: Sequence[LayerStack], ranks: Ranks, parts: Parts
) -> tuple[tuple[tuple[int, ...], ...], tuple[Mapping[str, Tensor], ...]]:
    """Return steps and tensors of a snapshot, with the rows of all devices on the first rank."""
    if ranks.size == 1:
        return tuple(tuple(layer.steps) for layer in layers), tuple(layer.tensors() for layer in layers)
    devices = sum(map(len, parts))
    steps = []
    for layer in layers:
        known = dict(zip(parts[ranks.rank], layer.steps, strict=False))
        alike = len(layer.steps) == 1
        steps.append(tuple(layer.steps if alike else ranks.largest([known.get(k, 0) for k in range(devices)])))
    tensors = [
        {name: rows if len(rows) == 1 else ranks.collect(rows, parts) for name, rows in layer.tensors().items()}
        for layer in layers
    ]
    return tuple(steps), tuple(tensors)


def dealt(
    layers: Sequence[LayerStack], state: EngineState | None, ranks: Ranks, parts: Parts, rows: int
) -> EngineState:
    """Return what a rank goes on from: the first rank's snapshot with the rows of the rank's own devices only.

    Where a rank has fewer devices than `rows`, the others are nobody's.
    """
    if ranks.size == 1:
        assert state is not None
        return state
    plan = None if state is None else (state.plan.cuts, state.plan.interval, dict(state.plan.layer_intervals))
    counts = None if state is None else [{name: len(t) for name, t in held.items()} for held in state.tensors]
    cuts_and_intervals, frame, counts = ranks.from_first(
        (plan, None if state is None else _frame(state), counts if ranks.first else None)
    )
    assert cuts_and_intervals is not None
    assert frame is not None
    assert counts is not None
    whole = state.tensors if state is not None else ({},) * len(counts)
    mine, tensors = parts[ranks.rank], []
    for layer, names, held in zip(layers, counts, whole, strict=False):
        layer.check_names(names)
        dealt_rows = {}
        for name, like in layer.rows().items():
            if names[name] == 1:
                dealt_rows[name] = ranks.deal(held.get(name), like, [[0]] * ranks.size)
            else:
                own = ranks.deal(held.get(name), like, parts)
                nobodys = like.expand(rows - len(own), *like.shape)
                dealt_rows[name] = torch.cat([own.to(like), nobodys])
        tensors.append(dealt_rows)
    steps = [
        tuple(counted) if len(counted) == 1 else (*(counted[k] for k in mine), *[0] * (rows - len(mine)))
        for counted in frame["steps"]
    ]
    return EngineState(TrainingPlan(*cuts_and_intervals), tensors=tuple(tensors), **{**frame, "steps": tuple(steps)})


def _frame(state: EngineState) -> dict[str, Any]:
    """Return all but plan and tensors."""
    return {name: getattr(state, name) for name in ("round", "planned_at", "ages", "steps", "present")}


def restore_layers(layers: Sequence[LayerStack], state: EngineState, devices: int, rows: int | None = None) -> None:
    """Give every layer what it held when the snapshot was made; `rows` is what it has of them while copies differ."""
    rows = devices if rows is None else rows
    if not len(state.tensors) == len(state.steps) == len(layers):
        problem = f"holds {len(state.tensors)} layers, the model has {len(layers)}"
        raise InvalidInput("state", problem, "Give a snapshot of the same model")
    for number, steps in enumerate(state.steps, start=1):
        if len(steps) not in (1, rows):
            raise InvalidInput(f"layer {number}.steps", f"has {len(steps)} entries", f"Give 1 or {rows}")
    present_devices(state.present, devices)
    for number, (layer, steps, tensors) in enumerate(zip(layers, state.steps, state.tensors, strict=True), start=1):
        try:
            layer.load(tensors, rows)
        except InvalidInput as error:
            raise error.inside(f"layer {number}") from None
        layer.steps = list(steps)
