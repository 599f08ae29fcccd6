"""The computing thread of the edge server: all work with the model, one call at a time."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class ComputingThread:
    """Runs work in one thread: what training needs in the order of the requests, other work when there is none."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "compute")
        self._urgent = 0  # calls of `run` that have not ended
        self._idle, self._turn = asyncio.Event(), asyncio.Lock()
        self._idle.set()

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run work that training waits for; it is completed even if its device disconnects meanwhile."""
        self._urgent += 1
        self._idle.clear()
        try:
            return await self._submit(work, *arguments)
        finally:
            self._urgent -= 1
            if not self._urgent:
                self._idle.set()

    async def run_when_idle(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run work while training needs no computing; what training needs waits for one such call at most."""
        async with self._turn:
            while self._urgent:
                await self._idle.wait()
            return await self._submit(work, *arguments)

    async def _submit(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments))

    def shut_down(self) -> None:
        """Cancel what has not begun."""
        self._thread.shutdown(wait=False, cancel_futures=True)
