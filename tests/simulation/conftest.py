"""Settings of all tests of the simulation."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Run small tensors on one thread: more would wait for each other, most of all on a busy machine."""
    torch.set_num_threads(1)
