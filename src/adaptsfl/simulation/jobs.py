"""One run of an experiment as a job, and the callbacks that hear how jobs go."""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from adaptsfl.runs.folder import Run
from adaptsfl.runs.record import Block


@dataclass(frozen=True)
class Job:
    """One run: its policy by name, its seed, its fleet by name where there are several.

    `experiment` is the number of its experiment, from 0 on, where several are executed side by side.
    """

    policy: str
    seed: int
    fleet: str = ""
    experiment: int = 0

    @property
    def folder_name(self) -> str:
        """What its folder is called."""
        name = "-".join(part for part in (self.policy, self.fleet, f"seed{self.seed}") if part)
        return re.sub(r"[^\w.+@-]", "-", name.replace(":", ".")).lstrip(".")


def _raise(_job: Job, error: Exception) -> None:
    raise error


def _warn(job: Job, remark: str) -> None:
    warnings.warn(f"{job.folder_name}: {remark}", stacklevel=2)


@dataclass(frozen=True)
class Watcher:
    """Callbacks that hear how jobs go.

    Attributes:
        begins: before a run; with the rounds after which it ends at the latest, None if rounds do not end it.
        on_round: while a run trains; with its last round, and how many were trained since the last call. After every
            round, but only a few times per second if another process trains.
        on_block: after every block that this process trains.
        ends: after a run, also one that was done before.
        fails: when a run fails. If it returns, the other runs go on; by default it raises the error.
        remarks: what people should know: which run is done again, and why; what would learn faster.
    """

    begins: Callable[[Job, int | None], None] = lambda _job, _rounds: None
    on_round: Callable[[Job, int, int], None] = lambda _job, _round, _trained: None
    on_block: Callable[[Job, Block], None] = lambda _job, _block: None
    ends: Callable[[Job, Run], None] = lambda _job, _run: None
    fails: Callable[[Job, Exception], None] = _raise
    remarks: Callable[[Job, str], None] = _warn
