"""What ranks do in tests of runs: whole experiments, and a policy that kills a rank."""

import os
import signal
from pathlib import Path
from typing import Any

from adaptsfl.config import Recipe
from adaptsfl.errors import AdaptSFLError
from adaptsfl.policies.fixed import Fixed
from adaptsfl.policies.policy import Decision, Observation
from adaptsfl.simulation.experiment import Experiment
from adaptsfl.simulation.jobs import Watcher
from adaptsfl.training.ranks import ALONE, Ranks
from simulation.tiny import recipe

POLICIES = ["adaptsfl", "dama+rms", "centralized", "vanilla-sl"]


def small() -> Recipe:
    """Batch-norm with pooled statistics, devices that come and go, drift measured, plans that change."""
    return recipe(
        model={"options": {"width": 0.25, "norm": "batch"}},
        training={"optimizer": "momentum", "learning_rate": 0.02},
        faults={"participation": 0.5},
        data={"partition": {"kind": "iid"}},
        run={"rounds": 6, "evaluate_every": 3},
    )


def executed(ranks: Ranks, folder: Path) -> dict[str, str]:
    """Execute all runs and return what failed, and why."""
    failed: dict[str, str] = {}

    def fails(job: Any, error: Exception) -> None:
        assert isinstance(error, AdaptSFLError), error
        failed[job.policy] = str(error)

    Experiment(small(), folder, policies=POLICIES, ranks=ranks).execute(Watcher(fails=fails))
    return failed


def alone(folder: Path) -> dict[str, str]:
    return executed(ALONE, folder)


class Killer(Fixed):
    """Kills the rank that KILL_RANK names, wherever it runs, in the fourth block: once in the folder KILL."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if "KILL" in os.environ:  # every rank makes the policies, the first asks them
            (Path(os.environ["KILL"]) / f"rank{os.environ['RANK']}").write_text(str(os.getpid()))

    def decide(self, seen: Observation) -> Decision:
        if seen.block == 3 and "KILL" in os.environ:
            done = Path(os.environ["KILL"]) / "done"
            if not done.exists():
                done.touch()
                os.kill(int((done.parent / f"rank{os.environ['KILL_RANK']}").read_text()), signal.SIGKILL)
        return super().decide(seen)
