"""Objects of which every rank has one, and whose methods all ranks run together."""

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
    """An object of which every rank has one.

    A method that is marked `on_all_ranks` is called on the first rank only: the others `follow`, and run it with the
    same arguments. `end` lets them return.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def follow(self) -> None:
        """Run what the first rank is asked to run, until it calls `end`."""
        assert not self.ranks.first
        while True:
            name, arguments = self.ranks.broadcast(("", ()))
            if not name:
                return
            with suppress(*RAISED_BY_ALL):  # the first rank reports it
                getattr(self, name)(*arguments)

    def end(self) -> None:
        """Let the other ranks return from `follow`."""
        if self.ranks.first:
            self.ranks.broadcast(("", ()))


def on_all_ranks(
    method: Callable[Concatenate[Self, Arguments], Result],
) -> Callable[Concatenate[Self, Arguments], Result]:
    """Let all ranks run a method, whose arguments are positional; where one of them fails, none can go on."""

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
