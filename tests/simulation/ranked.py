"""What ranks do in tests of runs: whole experiments, and a policy that kills another rank."""

import os
import signal
from pathlib import Path
from typing import Any

from adaptsfl.config import Recipe
from adaptsfl.errors import AdaptSFLError
from adaptsfl.policies.fixed import Fixed
from adaptsfl.policies.policy import Decision, Observation
from adaptsfl.simulation.experiment import Experiment, Watcher
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
    """Kills the other ranks of this machine in its fourth block, unless torchrun has started it again."""

    def decide(self, seen: Observation) -> Decision:
        if seen.block == 3 and os.environ.get("KILL") and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            agent = os.getppid()
            for child in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
                command = Path(f"/proc/{child}/cmdline").read_bytes()
                if int(child) != os.getpid() and b"simulate" in command:
                    os.kill(int(child), signal.SIGKILL)
        return super().decide(seen)
