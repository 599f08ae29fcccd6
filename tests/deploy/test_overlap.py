"""What overlaps: parties fetch, deliver and evaluate at the same time; one is held until the other has come so far."""

from pathlib import Path
from typing import Any

import pytest

from adaptsfl.deploy.parties.device.party import DeviceParty
from adaptsfl.deploy.parties.edge import conductor as conducting
from adaptsfl.runs.folder import read_run
from deploy.in_process import deployed
from deploy.test_bad_luck import THREE, planned, played, started


@pytest.fixture(autouse=True)
def _short_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conducting, "SHUTDOWN_S", 0.0)


# --- fetching ---


def test_devices_fetch_and_send_while_the_edge_server_fetches_its_own_layers(tmp_path: Path) -> None:
    """The edge server's download ends after all activations of the first round have come; b3 is its own then."""

    async def scenario() -> None:
        async with deployed(tmp_path, None, THREE, "run.rounds=4", recipe=planned(2123)) as here:
            fed, protocol = here.conductor.fed, here.conductor.protocol
            fetch = fed.fetch_of

            async def last(*arguments: Any) -> Any:
                found = await fetch(*arguments)
                if protocol.block is not None and protocol.block.rounds:
                    await here.until(lambda: all(protocol.keeps(connection) for connection in protocol.connections))
                return found

            fed.fetch_of = last  # type: ignore[method-assign]
            await here.finish(started(here, *[DeviceParty] * 3))

    played(scenario())
    blocks = read_run(tmp_path / "edge").blocks
    assert [block.rounds for block in blocks] == [2, 2]
    assert all(block.seconds["b3"] > 0 for block in blocks)


def test_the_edge_server_has_its_layers_before_devices_have_theirs(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with deployed(tmp_path, None, THREE, "run.rounds=4", recipe=planned(2123)) as here:

            class Last(DeviceParty):
                async def _fetch(self, *arguments: Any) -> None:
                    await here.until(lambda: (block := here.conductor.protocol.block) is not None and block.placed)
                    await super()._fetch(*arguments)

            await here.finish(started(here, *[Last] * 3))

    played(scenario())
    assert [block.rounds for block in read_run(tmp_path / "edge").blocks] == [2, 2]
