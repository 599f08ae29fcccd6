"""The edge server's computing thread: all work with the model runs there, in the order of the requests."""

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
    """Computes with a model, one request after another, while the event loop goes on."""

    def __init__(self, edge_model: EdgeModel) -> None:
        super().__init__(1, "compute")
        self.edge_model = edge_model
        self._arrived: list[tuple[int, Tensor, Failed]] = []  # activations that wait for the next work

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Return the result of some work; it is completed even if the caller is cancelled meanwhile."""
        arrived, loop = self._take(), asyncio.get_running_loop()

        def job() -> T:
            self._receive_all(arrived, loop)
            return work(*arguments)

        return await asyncio.shield(loop.run_in_executor(self, job))

    def receive(self, device: int, activations: Tensor, failed: Failed) -> None:
        """Hand a device's activations to the model, before all work that is requested later.

        Args:
            failed: called on the event loop with the error, if there is one.
        """
        self._arrived.append((device, activations, failed))
        if self.edge_model.has_own_layers(device) or activations.numel() >= WORTH_A_JOB:
            self.submit(self._receive_all, self._take(), asyncio.get_running_loop())

    def _take(self) -> list[tuple[int, Tensor, Failed]]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def _receive_all(self, arrived: list[tuple[int, Tensor, Failed]], loop: asyncio.AbstractEventLoop) -> None:
        for device, activations, failed in arrived:
            try:
                self.edge_model.receive(device, activations)
            except Exception as error:
                loop.call_soon_threadsafe(failed, error)
