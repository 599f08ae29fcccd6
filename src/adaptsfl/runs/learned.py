"""What runs learned about convergence, as the [convergence] of a recipe that another run, or a plan, begins with."""

from collections.abc import Sequence

import numpy as np

from adaptsfl.convergence import powers_of
from adaptsfl.errors import InvalidInput
from adaptsfl.runs.folder import Run

DIGITS = 4  # of a power; estimates are not better than that


def learned_powers(runs: Sequence[Run]) -> list[float]:
    """Return p of every L_c by the median of the runs' last κ; runs whose policies estimate nothing do not count."""
    known = [last for run in runs if run.blocks and "kappa" in (last := run.blocks[-1].estimates)]
    if not known:
        remedy = "Give a run of adaptsfl with mode 'calibrated', which estimates the rounds that plans need"
        raise InvalidInput("runs", "no run among them has estimated anything", remedy)
    layers = {len(estimates["powers"]) for estimates in known}  # type: ignore[arg-type]
    if len(layers) > 1:
        several = " and ".join(str(count) for count in sorted(layers))
        raise InvalidInput("runs", f"are of models with {several} layers", "Give runs of one model")
    kappa = float(np.median([float(estimates["kappa"]) for estimates in known]))  # type: ignore[arg-type]
    powers = powers_of(np.array([kappa]), layers.pop())[0]
    return [round(float(power), DIGITS) for power in powers]


def as_section(powers: Sequence[float]) -> str:
    """Return the powers as a section of a recipe (TOML)."""
    listed = ", ".join(f"{power:g}" for power in powers)
    return f"[convergence] # R(I, L_c) = I^p, one p per L_c, as estimated from training losses\npowers = [{listed}]\n"
