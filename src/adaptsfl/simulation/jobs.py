"""Jobs, each of which is one run of an experiment, and callbacks that report their progress."""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from adaptsfl.runs.folder import Run
from adaptsfl.runs.record import Block


@dataclass(frozen=True)
class Job:
    """One run: the name of its policy, its seed, and the name of its fleet if there are several.

    `experiment` is the number of its experiment, from 0 on, where several are executed side by side.
    """

    policy: str
    seed: int
    fleet: str = ""
    experiment: int = 0

    @property
    def folder_name(self) -> str:
        """The name of its folder."""
        name = "-".join(part for part in (self.policy, self.fleet, f"seed{self.seed}") if part)
        return re.sub(r"[^\w.+@-]", "-", name.replace(":", ".")).lstrip(".")


def _raise(_job: Job, error: Exception) -> None:
    raise error


def _warn(job: Job, remark: str) -> None:
    warnings.warn(f"{job.folder_name}: {remark}", stacklevel=2)


@dataclass(frozen=True)
class Watcher:
    """Callbacks that report the progress of jobs.

    Attributes:
        begins: before a run; with the largest number of its rounds, None if it is not limited.
        on_round: while a run trains; with its last round, and the rounds trained since the last call. After every
            round, but only a few times per second if another process trains.
        on_block: after every block that this process trains.
        ends: after a run, also if it was already finished before.
        fails: when a run fails. If it returns, the other runs go on; by default it raises the error.
        remarks: with notes for the user: which run is repeated, and why; which model would learn faster.
    """

    begins: Callable[[Job, int | None], None] = lambda _job, _rounds: None
    on_round: Callable[[Job, int, int], None] = lambda _job, _round, _trained: None
    on_block: Callable[[Job, Block], None] = lambda _job, _block: None
    ends: Callable[[Job, Run], None] = lambda _job, _run: None
    fails: Callable[[Job, Exception], None] = _raise
    remarks: Callable[[Job, str], None] = _warn
