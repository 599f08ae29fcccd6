"""The exception tree. Every error that a user can cause is one of these, and says what to do about it.

AdaptSFLError
├── InvalidInput      a value, field or file that cannot be used
├── InfeasiblePlan    the problem is well-formed, but no plan reaches its target
├── SolverError       a solver cannot take this problem, or failed on it
├── TrainingDiverged  the loss is NaN or infinity, or far above where it began
├── NotWritten        a file that could not be written: a full disk, no permission
├── RunFailed         a run failed in a process of its own; says what went wrong there
├── RankFailed        one of the processes that train together has failed or ended
├── BadMessage        another party sent what the protocol does not allow
├── Refused           another party refuses us
└── Stopped           a person has ended it: Ctrl-C, or SIGTERM
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
    """A value that cannot be used: names the field, what is wrong with its value, and the remedy."""

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
        """Return the same error with the file that held the value."""
        return InvalidInput(self.field, self.problem, self.remedy, source=source)


class InfeasiblePlan(AdaptSFLError):
    """No interval and cuts satisfy the problem; the message says which limit to move and how far."""


class SolverError(AdaptSFLError):
    """A solver cannot take this problem (for example, exhaustive search of a large one) or failed on it."""


class TrainingDiverged(AdaptSFLError):
    """The loss of a round is not finite, or exploded; the message names the round and the device."""


class NotWritten(AdaptSFLError):
    """A file could not be written; the message says why, and that an older one is still there."""


class BadMessage(AdaptSFLError):
    """Another party sent what the protocol does not allow, by mistake or not; nothing of it was used."""


class Refused(AdaptSFLError):
    """Another party refuses us, and a retry would not help."""


class Stopped(AdaptSFLError):
    """A person has stopped the command; the message says how to go on."""


class RunFailed(AdaptSFLError):
    """A run failed in another process: the message is that of the error there, `kind` the name of its class."""

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        super().__init__(message)


class RankFailed(AdaptSFLError):
    """One of the processes that train one model together has failed or ended: all of them end."""


@contextmanager
def naming(source: str) -> Iterator[None]:
    """Say of an `InvalidInput` which file, or which part of it, it is about, unless it says so itself."""
    try:
        yield
    except InvalidInput as error:
        raise (error if error.source else error.from_file(source)) from None


@contextmanager
def inside(section: str) -> Iterator[None]:
    """Name the section of the file in which an `InvalidInput` arises."""
    try:
        yield
    except InvalidInput as error:
        raise (error if error.source else error.inside(section)) from None


def unknown(field: str, name: str, known: Collection[str], remedy: str) -> InvalidInput:
    """Return the error for a name that is not among the known ones, with the nearest of them."""
    near = difflib.get_close_matches(name, known, n=1)
    question = f"Did you mean {near[0]!r}? " if near else ""
    return InvalidInput(field, f"{name!r} is unknown", question + remedy)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def message_of(error: Exception) -> str:
    """Return the message for people: that of our own errors; for anything else, that it is a bug, and where."""
    if isinstance(error, AdaptSFLError):
        return str(error)
    where = traceback.extract_tb(error.__traceback__)[-1]
    line = f"{Path(where.filename).name}, line {where.lineno}"
    return f"internal error in {line}: {type(error).__name__}: {error}. This is a bug; please report it with the file"


def kind_of(error: Exception) -> str:
    """Return the name of an error's class, in whichever process it was raised."""
    return error.kind if isinstance(error, RunFailed) else type(error).__name__
