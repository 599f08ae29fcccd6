"""Objects replicated on every rank: a method call on the first rank is dispatched to all ranks."""

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from adaptsfl.errors import NotWritten, RankFailed, TrainingDiverged, message_of
from adaptsfl.training.ranks import Ranks

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Self = TypeVar("Self", bound="Replicated")

RAISED_BY_ALL = (TrainingDiverged, NotWritten)  # errors that all ranks raise together


class Replicated:
    """An object that is replicated on every rank.

    The caller calls methods marked `on_all_ranks` on the first rank only. The other ranks wait in `follow`, which runs
    each dispatched call with the same arguments until the first rank calls `end`.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def follow(self) -> None:
        """Run the calls that the first rank dispatches, until it calls `end`."""
        assert not self.ranks.first
        while True:
            name, arguments = self.ranks.broadcast(("", ()))
            if not name:
                return
            with suppress(*RAISED_BY_ALL):  # the first rank reports the error
                getattr(self, name)(*arguments)

    def end(self) -> None:
        """Let the other ranks return from `follow`."""
        if self.ranks.first:
            self.ranks.broadcast(("", ()))


def on_all_ranks(
    method: Callable[Concatenate[Self, Arguments], Result],
) -> Callable[Concatenate[Self, Arguments], Result]:
    """Dispatch a method to all ranks, with positional arguments only; an error on one rank raises RankFailed."""

    @wraps(method)
    def run(self: Self, /, *arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        ranks: Ranks = self.ranks
        if ranks.size == 1:
            return method(self, *arguments, **named)
        if ranks.first:
            command: tuple[str, tuple[Any, ...]] = (method.__name__, arguments)
            ranks.broadcast(command)
        try:
            return method(self, *arguments, **named)
        except (*RAISED_BY_ALL, RankFailed):
            raise
        except Exception as error:
            raise RankFailed(f"rank {ranks.rank}: {message_of(error)}") from error

    return run
