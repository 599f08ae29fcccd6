import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small networks gain nothing from threads, and lose a lot where the cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
