"""Exports what runs learned about convergence as the [convergence] of a recipe, for other runs and plans."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from adaptsfl.convergence import GrowthRounds
from adaptsfl.errors import InvalidInput
from adaptsfl.runs.folder import Run

DIGITS = 3  # significant digits of a factor; estimates are not more precise


def learned_growth(runs: Sequence[Run]) -> GrowthRounds:
    """Return the growth of rounds with the interval: the median of the runs' last estimates.

    Runs that saw no averaging do not count.
    """
    lasts: list[Any] = [run.blocks[-1].estimates for run in runs if run.blocks]
    known = [last["growth"] for last in lasts if last.get("averagings")]
    if not known:
        remedy = "Give a run of adaptsfl in mode 'calibrated' that had some blocks of 4 rounds or more"
        raise InvalidInput("runs", "no run among them has learned what longer intervals cost", remedy)
    _refuse_several("are of models with {} layers", {len(one["factors"]) for one in known})
    _refuse_several("grow with I^{}", {one["power"] for one in known}, " and I^")
    factors = np.median([one["factors"] for one in known], axis=0)
    return GrowthRounds(factors, known[0]["power"])


def _refuse_several(problem: str, found: set[Any], between: str = " and ") -> None:
    """Refuse runs whose values differ."""
    if len(found) > 1:
        several = between.join(str(one) for one in sorted(found))
        raise InvalidInput("runs", problem.format(several), "Give runs of one model, with the same [adapt.calibration]")


def as_section(growth: GrowthRounds) -> str:
    """Return the growth as a section of a recipe (TOML)."""
    listed = ", ".join(f"{factor:.{DIGITS}g}" for factor in growth.factors)
    return (
        "[convergence.growth] # R(I, L_c) = 1 + c (I^q - 1), one c per L_c, as estimated from training losses\n"
        f"factors = [{listed}]\npower = {growth.power:g}\n"
    )
