"""Turn the [convergence] of a recipe or a problem file into a rounds model."""

from typing import Any

import numpy as np

from adaptsfl import checks
from adaptsfl.config import ConvergenceConfig
from adaptsfl.convergence.bound import Constants, ConvergenceModel
from adaptsfl.convergence.measured import GrowthRounds, PowerRounds, RoundsTable
from adaptsfl.convergence.rounds import RoundsModel
from adaptsfl.errors import InvalidInput

# The keys of each form. A key that only one form has selects this form; if several match, the first one in this list.
FORMS = (
    ("table",),
    ("growth",),
    ("powers",),
    ("initial_gap", "drift", "budget"),
    ("initial_gap", "smoothness", "gradient_moment", "gradient_variance", "target"),
)
EITHER = (
    "Give one of: growth; powers; table; initial_gap, drift and budget; initial_gap, target and the paper's constants"
)


def model_from(config: ConvergenceConfig, learning_rate: float, devices: int, layers: int) -> RoundsModel:
    """Return the rounds model that a [convergence] section describes, in any of its forms."""
    _check_one_form(config)
    if config.growth is not None:
        factors = checks.vector("growth.factors", config.growth.factors, length=layers, of="one per L_c")
        return GrowthRounds(factors, config.growth.power)
    if config.powers is not None:
        return PowerRounds(checks.vector("powers", config.powers, length=layers, of="one per L_c"))
    if config.table is not None:
        rows: Any = config.table.rounds
        if len(rows) != layers:
            raise InvalidInput(
                "table.rounds", f"has {len(rows)} rows, expected {layers}", f"Give {layers}, one per L_c"
            )
        return RoundsTable(np.array(config.table.intervals), rows)
    return _bound(config, learning_rate, devices, layers)


def _check_one_form(config: ConvergenceConfig) -> None:
    """Raise if a section has keys of several forms, or not all keys of one."""
    given = [name for form in FORMS[::-1] for name in form if getattr(config, name) is not None]
    if not given:
        raise InvalidInput("", "is empty", EITHER)
    # initial_gap belongs to two forms: alone, the error names the missing keys of the paper's constants.
    wanted = next((form for form in FORMS if set(given) & set(form) - {"initial_gap"}), FORMS[-1])
    beside = [name for name in given if name in wanted]
    for name in given:
        if name not in wanted:
            raise InvalidInput(name, f"is given beside {beside[-1]}", EITHER)
    for name in wanted:
        if name not in given:
            raise InvalidInput(name, "is missing", f"Give all of: {', '.join(wanted)}")


def _bound(config: ConvergenceConfig, learning_rate: float, devices: int, layers: int) -> ConvergenceModel:
    """Return the bound, from a drift and its budget or from the paper's constants."""
    if config.drift is not None:
        assert config.initial_gap is not None  # checked by _check_one_form
        assert config.budget is not None
        per_layer = checks.vector("drift.per_layer", config.drift.per_layer, length=layers, of="one per layer")
        return ConvergenceModel(learning_rate, config.initial_gap, per_layer, config.drift.power, config.budget)
    checks.vector("gradient_moment", config.gradient_moment, length=layers, of="one per layer")
    checks.vector("gradient_variance", config.gradient_variance, length=layers, of="one per layer")
    constants = Constants(**config.model_dump(include=set(FORMS[-1])))
    return ConvergenceModel.from_constants(constants, learning_rate, devices)
