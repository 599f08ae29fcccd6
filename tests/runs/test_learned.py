"""What runs learned, as the [convergence] of a recipe."""

import dataclasses
import tomllib
from pathlib import Path

import numpy as np
import pytest

from adaptsfl.config import ConvergenceConfig, parse
from adaptsfl.convergence import model_from, powers_of
from adaptsfl.errors import InvalidInput
from adaptsfl.runs.folder import Run, find_runs
from adaptsfl.runs.learned import as_section, learned_powers
from simulated_runs import write_simulated_run


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    for policy in ("adaptsfl", "rma+rms"):
        write_simulated_run(tmp_path / f"{policy}-seed0", policy, policy, 0, devices=3, blocks=4)
    return find_runs([tmp_path])


def with_kappa(run: Run, kappa: float) -> Run:
    last = dataclasses.replace(run.blocks[-1], estimates={**run.blocks[-1].estimates, "kappa": kappa})
    return dataclasses.replace(run, blocks=(*run.blocks[:-1], last))


def test_a_recipe_takes_what_runs_learned(runs: list[Run]) -> None:
    """The last κ of every run that has one, of which the median counts; it is read back as the same powers."""
    ours = [with_kappa(runs[0], kappa) for kappa in (0.2, 0.4, 5.0)]
    powers = learned_powers([*ours, runs[1]])
    layers = len(ours[0].blocks[-1].estimates["powers"])  # type: ignore[arg-type]
    assert powers == pytest.approx(powers_of(np.array([0.4]), layers)[0].tolist(), abs=1e-4)
    section = tomllib.loads(as_section(powers))["convergence"]
    model = model_from(parse(ConvergenceConfig, section), 0.1, 3, layers)
    assert model.rounds(16, layers) == pytest.approx(16 ** powers[-1])


def test_runs_that_learned_nothing_are_refused(runs: list[Run]) -> None:
    with pytest.raises(InvalidInput, match=r"runs: no run among them has estimated anything.*adaptsfl"):
        learned_powers([runs[1]])


def test_runs_of_several_models_are_refused(runs: list[Run]) -> None:
    other = with_kappa(runs[0], 0.4)
    other.blocks[-1].estimates["powers"] = [0.1, 0.2]
    with pytest.raises(InvalidInput, match=r"models with 2 and \d+ layers"):
        learned_powers([runs[0], other])
