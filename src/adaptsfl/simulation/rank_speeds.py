"""How fast every rank is, so that quick ones train more devices: timed once per experiment, kept beside its runs."""

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
ALIKE = 0.8  # of the fastest: from there on it is as likely chance as a slower machine
REPEATS = 5


class RankSpeeds:
    """What is known of the ranks of an experiment.

    An order of additions depends on who trains which devices. So ranks of the same machines keep what they were found
    to be when the experiment began: however often they are started again, the weights are the same bit for bit.

    Attributes:
        speeds: of every rank, the fastest having 1.
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
        """Write down what was timed; the first rank does so once the folder is its own."""
        if self._timed:
            text = json.dumps({"hosts": self._hosts, "speeds": self.speeds}, indent=1)
            replace_file(self._place, lambda path: path.write_text(text + "\n"))

    def _kept(self) -> tuple[float, ...] | None:
        """Return what was found before, if that was of these machines."""
        try:
            found = json.loads(self._place.read_text())
            if found["hosts"] == self._hosts:
                return _positive(found["speeds"], len(self._hosts))
        except (OSError, ValueError, KeyError, TypeError):
            pass  # not there, or damaged: it can be timed again
        return None


def speeds_of(seconds: list[float]) -> tuple[float, ...]:
    """Return the speed of every rank beside the fastest; equal where they are nearly so, or where one is not known."""
    least = min(seconds)
    if least <= 0:
        return (1.0,) * len(seconds)
    return tuple(1.0 if least / one > ALIKE else round(least / one, 3) for one in seconds)


def _seconds(recipe: Recipe) -> float:
    """Return how long one mini-batch takes, with the other ranks at work as well; 0 if that cannot be said."""
    try:
        model, example = split_model(recipe.model, to_train=True)
        for piece in model.pieces:
            piece.to(recipe.training.device)
        times = time_layers(model, example.to(recipe.training.device), recipe.training.batch_size, REPEATS)
    except Exception:  # whatever is wrong is said where the model is built to be trained
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
    """Return numbers if there are so many and all are positive."""
    if len(numbers) != count or not all(0 < number < math.inf for number in numbers):
        raise ValueError(f"{numbers} for {count} ranks")
    return tuple(numbers)
