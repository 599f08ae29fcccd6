"""What runs learned about convergence, as the [convergence] of a recipe that another run, or a plan, begins with."""

from collections.abc import Sequence

import numpy as np

from adaptsfl.errors import InvalidInput
from adaptsfl.runs.folder import Run

DIGITS = 4  # of a power; estimates are not better than that


def learned_powers(runs: Sequence[Run]) -> list[float]:
    """Return p of every L_c, the median of what the runs believed last; those that saw no averaging do not count."""
    known = [last for run in runs if run.blocks and (last := run.blocks[-1].estimates).get("averagings")]
    if not known:
        remedy = "Give a run of adaptsfl in mode 'calibrated' that had some blocks of 4 rounds or more"
        raise InvalidInput("runs", "no run among them has learned what longer intervals cost", remedy)
    layers = {len(estimates["powers"]) for estimates in known}  # type: ignore[arg-type]
    if len(layers) > 1:
        several = " and ".join(str(count) for count in sorted(layers))
        raise InvalidInput("runs", f"are of models with {several} layers", "Give runs of one model")
    powers: list[float] = np.median([estimates["powers"] for estimates in known], axis=0).tolist()
    return [round(power, DIGITS) for power in powers]


def as_section(powers: Sequence[float]) -> str:
    """Return the powers as a section of a recipe (TOML)."""
    listed = ", ".join(f"{power:g}" for power in powers)
    return f"[convergence] # R(I, L_c) = I^p, one p per L_c, as estimated from training losses\npowers = [{listed}]\n"
