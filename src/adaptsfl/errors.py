"""The exception tree. Every error that a user can cause is one of these, and says what to do about it.

AdaptSFLError
├── InvalidInput      a value, field or file that cannot be used
├── InfeasiblePlan    the problem is well-formed, but no plan reaches its target
├── SolverError       a solver cannot take this problem, or failed on it
├── TrainingDiverged  the loss is NaN or infinity, or far above where it began
├── NotWritten        a file could not be written: a full disk, no permission
├── RunFailed         a run failed in another process; carries the error of that process
├── RankFailed        one of the processes that train together has failed or ended
├── BadMessage        another party sent a message that violates the protocol
├── Refused           another party rejected our request
└── Stopped           the user stopped the command: Ctrl-C, or SIGTERM
"""

import difflib
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any


class AdaptSFLError(Exception):
    """Base of all errors raised for reasons a user can act on."""


class InvalidInput(AdaptSFLError):
    """A value that cannot be used: the message names the field, what is wrong with its value, and the remedy."""

    def __init__(self, field: str, problem: str, remedy: str, *, source: str = "") -> None:
        self.field = field
        self.problem = problem
        self.remedy = remedy
        self.source = source
        where = ": ".join(part for part in (source, field) if part)
        super().__init__(f"{where}: {problem}. {remedy}")

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(InvalidInput, source=self.source), (self.field, self.problem, self.remedy)  # for pickle

    def inside(self, section: str) -> "InvalidInput":
        """Return the same error as seen from outside `section`: `flops[3]` becomes `devices.flops[3]`."""
        field = f"{section}.{self.field}" if self.field else section
        return InvalidInput(field, self.problem, self.remedy, source=self.source)

    def from_file(self, source: str) -> "InvalidInput":
        """Return the same error, naming the file that contains the value."""
        return InvalidInput(self.field, self.problem, self.remedy, source=source)


class InfeasiblePlan(AdaptSFLError):
    """No interval and cuts satisfy the problem; the message says which limit to change and by how much."""


class SolverError(AdaptSFLError):
    """A solver cannot take this problem (for example, exhaustive search of a large one) or failed on it."""


class TrainingDiverged(AdaptSFLError):
    """The loss of a round is NaN, infinite or exploded; the message names the round and the device."""


class NotWritten(AdaptSFLError):
    """A file could not be written; the message says why, and that the previous version still exists."""


class BadMessage(AdaptSFLError):
    """Another party sent a message that violates the protocol, by mistake or on purpose; the message was discarded."""


class Refused(AdaptSFLError):
    """Another party rejected our request, and a retry would not help."""


class Stopped(AdaptSFLError):
    """The user stopped the command; the message says how to resume."""


class RunFailed(AdaptSFLError):
    """A run failed in another process; the message is that of the original error, `kind` the name of its class."""

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        super().__init__(message)


class RankFailed(AdaptSFLError):
    """One of the processes that train one model together has failed or ended, so all of them end."""


@contextmanager
def naming(source: str) -> Iterator[None]:
    """Add the file, or the part of it, to any `InvalidInput` that does not name its source yet."""
    try:
        yield
    except InvalidInput as error:
        raise (error if error.source else error.from_file(source)) from None


@contextmanager
def inside(section: str) -> Iterator[None]:
    """Add the section of the file to the field of any `InvalidInput` raised inside."""
    try:
        yield
    except InvalidInput as error:
        raise (error if error.source else error.inside(section)) from None


def unknown(field: str, name: str, known: Collection[str], remedy: str) -> InvalidInput:
    """Return the error for an unknown name; it suggests the most similar known name."""
    near = difflib.get_close_matches(name, known, n=1)
    question = f"Did you mean {near[0]!r}? " if near else ""
    return InvalidInput(field, f"{name!r} is unknown", question + remedy)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def message_of(error: Exception) -> str:
    """Return the message to show: that of our own errors; any other error is reported as a bug, with its location."""
    if isinstance(error, AdaptSFLError):
        return str(error)
    where = traceback.extract_tb(error.__traceback__)[-1]
    line = f"{Path(where.filename).name}, line {where.lineno}"
    return f"internal error in {line}: {type(error).__name__}: {error}. This is a bug; please report it with the file"


def kind_of(error: Exception) -> str:
    """Return the name of the class of the original error, also if another process raised it."""
    return error.kind if isinstance(error, RunFailed) else type(error).__name__
