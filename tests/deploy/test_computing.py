"""The computing thread: everything in the order of the requests, whether it wakes the thread up or not."""

import asyncio
import threading
from typing import Any

import torch
from torch import Tensor

from adaptsfl.deploy.parties.edge.computing import WORTH_A_JOB, ComputingThread

SMALL, LARGE = torch.zeros(3), torch.zeros(WORTH_A_JOB)


class Model:
    """Writes down what is received, and in which thread."""

    def __init__(self, own: tuple[int, ...] = (), bad: tuple[int, ...] = ()) -> None:
        self.own, self.bad = own, bad
        self.done: list[Any] = []
        self.threads: set[int] = set()

    def has_own_layers(self, device: int) -> bool:
        return device in self.own

    def receive(self, device: int, _activations: Tensor, _part: int) -> None:
        if device in self.bad:
            raise ValueError(f"device {device}")
        self.done.append(device)
        self.threads.add(threading.get_ident())


def computed(model: Model, *requests: tuple[int, Tensor] | str) -> list[Exception]:
    """Receive activations, and do named work, one after the other; return the errors."""
    failed: list[Exception] = []

    async def scenario() -> None:
        thread, work = ComputingThread(model), []  # type: ignore[arg-type]
        for request in requests:
            if isinstance(request, str):
                work.append(asyncio.create_task(thread.run(model.done.append, request)))
                await asyncio.sleep(0)  # the task has made its request
            else:
                thread.receive(*request, 0, failed.append)
        await asyncio.gather(*work)
        thread.shutdown()
        await asyncio.sleep(0)

    asyncio.run(scenario())
    return failed


def test_small_activations_are_received_before_work_that_is_requested_later() -> None:
    model = Model()
    assert not computed(model, (0, SMALL), (1, SMALL), "train", (2, SMALL), "evaluate")
    assert model.done == [0, 1, "train", 2, "evaluate"]
    assert threading.get_ident() not in model.threads


def test_large_activations_and_those_for_own_layers_do_not_wait_and_none_overtakes_another() -> None:
    model = Model(own=(3,))
    assert not computed(model, (0, SMALL), (1, LARGE), (2, SMALL), (3, SMALL))
    assert model.done == [0, 1, 2, 3]


def test_an_error_is_that_of_one_device_and_the_work_goes_on() -> None:
    model = Model(bad=(1,))
    failed = computed(model, (0, SMALL), (1, SMALL), (2, SMALL), "train")
    assert model.done == [0, 2, "train"]
    assert [str(error) for error in failed] == ["device 1"]
