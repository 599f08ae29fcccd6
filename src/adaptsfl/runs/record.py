"""The record of a run: one line of JSON per block of rounds, the input of all plots and of retiming."""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import pydantic
from pydantic import BeforeValidator, Strict

from adaptsfl.checks import short
from adaptsfl.errors import InvalidInput
from adaptsfl.latency import PHASES

# Numbers as in JSON: whole numbers without a point, and null where a number is not finite.
Whole = Annotated[int, Strict()]
Real = Annotated[float, Strict(), BeforeValidator(lambda value: math.nan if value is None else value)]

Evaluation = tuple[Whole, Real, Real, Real]  # round, seconds, test accuracy, test loss


@dataclass(frozen=True)
class Block:
    """The rounds under one decision; in a deployment, those up to the next averaging, with real seconds.

    Attributes:
        block: its number, from 1 on.
        first_round, rounds: rounds `first_round` to `first_round + rounds - 1`, counted from 1.
        time_s: virtual seconds since the run began, at the end of the block.
        interval: I; None never averages.
        cuts: the cut of every device of the whole fleet; 0 for an absent device.
        deepest: L_c, the layers of which every device has its own copy.
        layer_intervals: layers with an interval of their own, as text keys.
        seconds: virtual seconds of the block by phase (a1 … b3, see `latency`), which add up to its length.
        bottleneck: of the longest phase, the slowest device or server, and that phase: ("device 3", "a2").
        bits: sent over all links in the block.
        loss: training loss, the mean over devices and rounds.
        evaluations: [round, virtual seconds, test accuracy, test loss] where the model was evaluated in the block; a
            deployment evaluates the model with which a block begins, whose round is the one before.
        estimates: of convergence, when the plan was made; empty for policies that do not use them.
        resources: rates and fixed seconds of the fleet (`fleet.RATES`, and those of `fleet.FIXED` that are not 0 for
            all), as measured when the plan was made, one per device.
        predicted_s: the predicted time of the block.
        measuring: the exchanges that measuring added to the last round, in rounds.
        reestimated: whether batch-norm's statistics were re-estimated for every evaluation; its time is in `seconds`.
        present: the devices that took part, round by round; None if all did.
        losses: training loss of every round, the mean over devices; empty in older records.
        micro_batches: in how many parts mini-batches went through a round.
        wire_dtype: the type in which activations and gradients were sent; None in older records, for the recipe's.
        wires: by type of numbers, the factor by which it multiplies the rounds, as measured in the first round; that
            round was then sent as float32, in whole mini-batches.
        restart: in a deployment, what a restarted edge server needs to ask its policy again; else empty.
    """

    block: Whole
    first_round: Whole
    rounds: Whole
    time_s: Real
    interval: Whole | None
    cuts: tuple[Whole, ...]
    deepest: Whole
    layer_intervals: dict[str, Whole]
    seconds: dict[str, Real]
    bottleneck: tuple[str, str]
    bits: Real
    loss: Real
    evaluations: tuple[Evaluation, ...]
    estimates: dict[str, object]
    resources: dict[str, tuple[Real, ...]]
    predicted_s: Real
    measuring: Whole = 0
    micro_batches: Whole = 1
    wire_dtype: str | None = None
    wires: dict[str, Real] = field(default_factory=dict)
    present: tuple[tuple[Whole, ...], ...] | None = None
    losses: tuple[Real, ...] = ()
    restart: dict[str, Any] = field(default_factory=dict)
    reestimated: Annotated[bool, Strict()] = False

    @property
    def last_round(self) -> int:
        """The number of the last round."""
        return self.first_round + self.rounds - 1

    @property
    def length_s(self) -> float:
        """Virtual seconds of the block."""
        return sum(self.seconds[phase] for phase in PHASES)


_READER = pydantic.TypeAdapter(Block)


def plain(value: Any) -> Any:
    """Return a value in JSON's types: dataclasses as objects, arrays as lists, NaN and infinity as null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def block_line(block: Block) -> str:
    """Return the block as one line of JSON, without the newline."""
    return json.dumps(plain(block), allow_nan=False, separators=(",", ":"))


def block_of(data: Any) -> Block:
    """Return the block that a line of a record holds; null in place of a number becomes NaN."""
    if not isinstance(data, dict):
        raise InvalidInput("", f"is not a block: {short(data)}", "Give one JSON object per line")
    try:
        block: Block = _READER.validate_python(data)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        if first["type"] == "missing" and len(first["loc"]) == 1:
            raise InvalidInput(name, "is missing", "Give every field of a block") from None
        raise InvalidInput(name, f"is {short(data[name])}", "Give what a run writes there") from None
    absent = [phase for phase in PHASES if phase not in block.seconds]
    if absent:
        raise InvalidInput("seconds", f"lacks {absent[0]}", "Give the seconds of every phase")
    _check(block)
    return block


def _check(block: Block) -> None:
    """Refuse values that no run writes, before anything is computed from them."""
    sound = {
        "rounds": block.rounds >= 1,
        "time_s": math.isfinite(block.time_s),
        "interval": block.interval is None or block.interval >= 1,
        "cuts": any(block.cuts),
        "deepest": block.deepest >= 1,
        "layer_intervals": all(layer.isdecimal() for layer in block.layer_intervals),
        "evaluations": all(block.first_round - 1 <= row[0] <= block.last_round for row in block.evaluations),
        "measuring": block.measuring >= 0,
        "losses": len(block.losses) in (0, block.rounds),
        "present": block.present is None or (len(block.present) == block.rounds and all(block.present)),
    }
    for name, good in sound.items():
        if not good:
            raise InvalidInput(name, f"is {short(getattr(block, name))}", "Give what a run writes there")
