"""The edge server's computing thread: all work with the model runs there, one call at a time."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from torch import Tensor

from adaptsfl.deploy.parties.edge.model import EdgeModel

# Activations with fewer numbers wait for the next work, if nothing is computed with them before: to wake the thread up
# takes longer than to receive them. With hundreds of devices that was a fourth of the event loop's time.
WORTH_A_JOB = 2**16

T = TypeVar("T")
Failed = Callable[[Exception], None]


class ComputingThread(ThreadPoolExecutor):
    """Computes with a model while the event loop goes on.

    What training needs is computed in the order of the requests, other work when training needs nothing.
    """

    def __init__(self, edge_model: EdgeModel) -> None:
        super().__init__(1, "compute")
        self.edge_model = edge_model
        self._arrived: list[tuple[int, Tensor, int, Failed]] = []  # activations that wait for the next work
        self._urgent = 0  # calls of `run` that have not ended
        self._idle, self._turn = asyncio.Event(), asyncio.Lock()
        self._idle.set()

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run work that training waits for; it is completed even if the caller is cancelled meanwhile."""
        self._urgent += 1
        self._idle.clear()
        try:
            return await self._submitted(work, *arguments)
        finally:
            self._urgent -= 1
            if not self._urgent:
                self._idle.set()

    async def run_when_idle(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run work while training needs no computing; what training needs waits for one such call at most."""
        async with self._turn:
            while self._urgent:
                await self._idle.wait()
            return await self._submitted(work, *arguments)

    def receive(self, device: int, activations: Tensor, part: int, failed: Failed) -> None:
        """Hand a part of a device's activations to the model, before all work that is requested later.

        Args:
            failed: called on the event loop with the error, if there is one.
        """
        self._arrived.append((device, activations, part, failed))
        if self.edge_model.has_own_layers(device) or activations.numel() >= WORTH_A_JOB:
            self.submit(self._receive_all, self._take(), asyncio.get_running_loop())

    def drop_round(self) -> None:
        """Have the model drop what it has of a round, before all work that is requested later."""
        self._arrived.clear()
        self.submit(self.edge_model.drop_round)

    async def _submitted(self, work: Callable[..., T], *arguments: Any) -> T:
        arrived, loop = self._take(), asyncio.get_running_loop()

        def job() -> T:
            self._receive_all(arrived, loop)
            return work(*arguments)

        return await asyncio.shield(loop.run_in_executor(self, job))

    def _take(self) -> list[tuple[int, Tensor, int, Failed]]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def _receive_all(self, arrived: list[tuple[int, Tensor, int, Failed]], loop: asyncio.AbstractEventLoop) -> None:
        for device, activations, part, failed in arrived:
            try:
                self.edge_model.receive(device, activations, part)
            except Exception as error:
                loop.call_soon_threadsafe(failed, error)
