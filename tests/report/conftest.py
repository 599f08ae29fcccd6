"""Runs that the tests of reports share."""

from pathlib import Path

import pytest

from adaptsfl.runs.folder import Run, find_runs
from simulated_runs import write_experiment


@pytest.fixture(scope="session")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_experiment(tmp_path_factory.mktemp("experiment"), devices=6, blocks=12)


@pytest.fixture(scope="session")
def runs(experiment: Path) -> list[Run]:
    return find_runs([experiment])
