"""Whole deployments in this process: real servers and devices over loopback, quick to start and open to inspection."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from safetensors.torch import load_file
from torch import Tensor

from adaptsfl.config import Recipe, load_recipe
from adaptsfl.deploy.parties.device.party import DeviceParty
from adaptsfl.deploy.parties.edge.conductor import Conductor
from adaptsfl.deploy.parties.edge.service import EdgeService
from adaptsfl.deploy.parties.fed.server import FedServer
from adaptsfl.deploy.parties.processes import CONNECTIONS
from adaptsfl.deploy.security.identity import SERVER_OPTIONS, Credentials, Party, listen, load_credentials, open_channel
from adaptsfl.deploy.service import OPTIONS, Calls, Service
from adaptsfl.deploy.terms import Terms
from deploy.deployed import PATIENCE_S
from deploy.deployed import RECIPE as BY_PROCESSES

# As processes have it, but shorter, and with a policy that this process can import.
RECIPE = BY_PROCESSES.replace("scripted_policy:", "deploy.scripted_policy:").replace("rounds = 20", "rounds = 10")


class Deployment:
    """The two servers of one run, whose insides a test can look at.

    Attributes:
        lines: what they said.
        run: ends when the edge server's run does.
    """

    def __init__(self, recipe: Recipe, folder: Path, certs: Path | None) -> None:
        self.folder, self.certs = folder, certs
        self.lines: list[str] = []
        self.fed = FedServer(Terms.of(recipe), folder / "fed", self.lines.append)
        self.recipe = recipe

    async def start(self) -> None:
        self._servers = [grpc.aio.server(options=(*SERVER_OPTIONS, *OPTIONS, *CONNECTIONS)) for _ in range(2)]
        self.fed_address = await self._serve(self._servers[0], self.fed, "fed")
        self._to_fed = self.channel("edge", "fed")
        to_fed, say = Calls(self._to_fed, "Fed"), self.lines.append
        self.conductor = Conductor(self.recipe, self.folder / "edge", to_fed, say=say)
        self.edge = EdgeService(self.conductor)
        self.edge_address = await self._serve(self._servers[1], self.edge, "edge")
        self.run = asyncio.create_task(self.conductor.run())

    async def _serve(self, server: grpc.aio.Server, service: Service, name: str) -> str:
        server.add_generic_rpc_handlers((service.handlers(),))
        port = await listen(server, "127.0.0.1:0", self.credentials(name))
        await server.start()
        return f"127.0.0.1:{port}"

    async def stop(self) -> None:
        self.run.cancel()
        for server in self._servers:
            await server.stop(0.5)
        await self._to_fed.close()
        self.conductor.shut_down()

    def credentials(self, name: str) -> Credentials | None:
        return None if self.certs is None else load_credentials(self.certs, name)

    def channel(self, name: str, server: str) -> grpc.aio.Channel:
        """Return a channel of some party to a server."""
        party = Party(name if name in ("edge", "fed") else "device", name)  # type: ignore[arg-type]
        address = self.fed_address if server == "fed" else self.edge_address
        return open_channel(address, server, self.credentials(name), party, OPTIONS)  # type: ignore[arg-type]

    def device(self, name: str, **options: Any) -> DeviceParty:
        return DeviceParty(
            Party("device", name), self.edge_address, self.fed_address, self.credentials(name), **options
        )

    def status(self, name: str) -> Any:
        return next(device for device in self.conductor.board.status.devices if device.name == name)

    def model(self) -> dict[str, Tensor]:
        return load_file(self.folder / "fed" / "model.safetensors")

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until something is true."""
        async with asyncio.timeout(PATIENCE_S):
            while not true():
                if self.run.done() and not self.run.cancelled() and self.run.exception():
                    raise AssertionError("the edge server failed") from self.run.exception()
                await asyncio.sleep(0.02)

    async def finish(self, devices: Sequence["asyncio.Task[str]"]) -> None:
        """Wait until the run is over, and these devices know."""
        async with asyncio.timeout(PATIENCE_S):
            await self.run
            await asyncio.gather(*devices)


@asynccontextmanager
async def deployed(folder: Path, certs: Path | None, *changes: str, recipe: str = RECIPE) -> AsyncIterator[Deployment]:
    """Start both servers of a recipe, changed as `--set` does."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "recipe.toml"
    file.write_text(recipe)
    deployment = Deployment(load_recipe(file, changes), folder, certs)
    await deployment.start()
    try:
        yield deployment
    finally:
        await deployment.stop()
