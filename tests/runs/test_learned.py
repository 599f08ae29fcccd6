"""What runs learned, as the [convergence] of a recipe."""

import dataclasses
import tomllib
from pathlib import Path

import numpy as np
import pytest

from adaptsfl.config import ConvergenceConfig, parse
from adaptsfl.convergence import model_from
from adaptsfl.errors import InvalidInput
from adaptsfl.runs.folder import Run, find_runs
from adaptsfl.runs.learned import as_section, learned_growth
from simulated_runs import write_simulated_run


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    for policy in ("adaptsfl", "rma+rms"):
        write_simulated_run(tmp_path / f"{policy}-seed0", policy, policy, 0, devices=3, blocks=4)
    return find_runs([tmp_path])


def believing(run: Run, kappa: float, averagings: int = 5, layers: int = 16, power: float = 0.8) -> Run:
    factors = [kappa * (cut + 1) / layers for cut in range(layers)]
    estimates = {"growth": {"factors": factors, "power": power}, "averagings": averagings}
    last = dataclasses.replace(run.blocks[-1], estimates=estimates)
    return dataclasses.replace(run, blocks=(*run.blocks[:-1], last))


def test_a_recipe_takes_what_runs_learned(runs: list[Run]) -> None:
    """The median of what was believed last; it is read back as the same. A prior is nothing that was learned."""
    ours = [believing(runs[0], kappa) for kappa in (0.2, 0.4, 5.0)]
    growth = learned_growth([*ours, runs[1], believing(runs[0], 9.0, averagings=0)])
    assert growth.factors == pytest.approx(0.4 * np.arange(1, 17) / 16)
    section = tomllib.loads(as_section(growth))["convergence"]
    model = model_from(parse(ConvergenceConfig, section), 0.1, 3, 16)
    assert model.rounds(16, 16) == pytest.approx(1 + 0.4 * (16**0.8 - 1), rel=1e-3)


def test_runs_that_learned_nothing_are_refused(runs: list[Run]) -> None:
    for nothing in (runs[1], believing(runs[0], 0.5, averagings=0)):
        with pytest.raises(InvalidInput, match=r"runs: no run among them has learned what longer intervals.*adaptsfl"):
            learned_growth([nothing])


def test_runs_of_several_models_are_refused(runs: list[Run]) -> None:
    with pytest.raises(InvalidInput, match=r"models with 2 and 16 layers"):
        learned_growth([believing(runs[0], 0.4), believing(runs[0], 0.4, layers=2)])


def test_runs_with_several_forms_of_growth_are_refused(runs: list[Run]) -> None:
    with pytest.raises(InvalidInput, match=r"runs: grow with I\^0\.7 and I\^0\.8"):
        learned_growth([believing(runs[0], 0.4), believing(runs[0], 0.4, power=0.7)])
