"""Settings shared by all tests.

Property tests draw the same examples every time; HYPOTHESIS_PROFILE=explore draws new ones, and more of them.
"""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

slow_is_fine = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeatable", derandomize=True, **slow_is_fine)
settings.register_profile("explore", max_examples=5000, **slow_is_fine)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# Where tests run in the background of a script, Ctrl-C is ignored, and by every process that they start; tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Begun first, longest first, so that no core is left with one of them while the others have nothing to do.
LONGEST = (
    "simulation/test_simulate_command.py",
    "deploy/test_faults.py",
    "simulation/test_ranks.py",
    "test_docs.py",
    "simulation/test_side_by_side.py",
    "training/test_ranks.py",
    "deploy/test_hostile.py",
    "deploy/test_links.py",
    "deploy/test_up_links.py",
    "reproduce/test_runner.py",
    "models/test_third_party.py",
    "deploy/test_same_as_simulated.py",
    "deploy/test_bad_luck.py",
    "training/test_engine.py",
    "simulation/test_run.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    files = {Path(__file__).parent / name: k for k, name in enumerate(LONGEST)}
    items.sort(key=lambda item: files.get(item.path, len(files)))
