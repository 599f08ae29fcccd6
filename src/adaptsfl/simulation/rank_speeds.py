"""The speed of every rank, so that fast ranks train more devices: timed once per experiment, stored beside its runs."""

import json
import math
import os
import socket
from pathlib import Path

from adaptsfl.config import Recipe
from adaptsfl.errors import InvalidInput
from adaptsfl.files import replace_file
from adaptsfl.loading import split_model
from adaptsfl.training.ranks import Ranks
from adaptsfl.training.timing import time_layers

VARIABLE, EQUAL = "ADAPTSFL_RANK_SPEEDS", "equal"
SPEEDS = "ranks.json"
ALIKE = 0.8  # of the fastest rank's speed; smaller differences may be noise
REPEATS = 5


class RankSpeeds:
    """The speeds of the ranks of an experiment.

    The order of floating-point additions depends on which rank trains which devices. So ranks on the same machines
    keep the speeds measured when the experiment began: after any restart the weights are the same bit for bit.

    Attributes:
        speeds: of every rank; the fastest has 1.
    """

    def __init__(self, recipe: Recipe, folder: Path, ranks: Ranks) -> None:
        self._place, self._timed = folder / SPEEDS, False
        self._hosts = ranks.all_gather(socket.gethostname())
        given = ranks.broadcast(os.environ.get(VARIABLE, ""))
        if ranks.size == 1:
            self.speeds: tuple[float, ...] = (1.0,)
        elif given:
            self.speeds = _given(given, ranks.size)
        elif (kept := ranks.broadcast(self._kept())) is not None:
            self.speeds = kept
        else:
            self._timed = True
            self.speeds = speeds_of(ranks.all_gather(_seconds(recipe)))

    def keep(self) -> None:
        """Store speeds that were timed now; the first rank calls this once it holds the lock of the folder."""
        if self._timed:
            text = json.dumps({"hosts": self._hosts, "speeds": self.speeds}, indent=1)
            replace_file(self._place, lambda path: path.write_text(text + "\n"))

    def _kept(self) -> tuple[float, ...] | None:
        """Return the stored speeds if they were measured on these machines, else None."""
        try:
            found = json.loads(self._place.read_text())
            if found["hosts"] == self._hosts:
                return _positive(found["speeds"], len(self._hosts))
        except (OSError, ValueError, KeyError, TypeError):
            pass  # missing or damaged: the ranks are timed again
        return None


def speeds_of(seconds: list[float]) -> tuple[float, ...]:
    """Return every rank's speed relative to the fastest: 1 if nearly as fast, and 1 for all if one is not known."""
    least = min(seconds)
    if least <= 0:
        return (1.0,) * len(seconds)
    return tuple(1.0 if least / one > ALIKE else round(least / one, 3) for one in seconds)


def _seconds(recipe: Recipe) -> float:
    """Return the seconds of one mini-batch while the other ranks compute too; 0 if it cannot be measured."""
    try:
        model, example = split_model(recipe.model, to_train=True)
        for piece in model.pieces:
            piece.to(recipe.training.device)
        times = time_layers(model, example.to(recipe.training.device), recipe.training.batch_size, REPEATS)
    except Exception:  # the same error is raised where the model is built for training
        return 0.0
    return sum(times.forward_s) + sum(times.backward_s)


def _given(text: str, ranks: int) -> tuple[float, ...]:
    if text == EQUAL:
        return (1.0,) * ranks
    try:
        return _positive([float(part) for part in text.split(",")], ranks)
    except ValueError:
        remedy = f"Give a positive number for each of the {ranks} ranks, such as 1,0.5, or {EQUAL}"
        raise InvalidInput(VARIABLE, f"is {text!r}", remedy) from None


def _positive(numbers: list[float], count: int) -> tuple[float, ...]:
    """Return the numbers if there are `count` of them, all positive; else raise ValueError."""
    if len(numbers) != count or not all(0 < number < math.inf for number in numbers):
        raise ValueError(f"{numbers} for {count} ranks")
    return tuple(numbers)
