"""Devices that may not take part are told so, and end; they do not knock for ever."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import warm
from adaptsfl.deploy.parties.device.party import DeviceParty
from adaptsfl.deploy.security import certs as making
from adaptsfl.deploy.security.certs import make_certificates
from adaptsfl.deploy.security.identity import Credentials, Party
from adaptsfl.errors import Refused
from deploy.in_process import PATIENCE_S, Deployment, deployed


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("certs")
    make_certificates(place, ["device-1", "device-2", "device-99"])
    return place


def unchecked(folder: Path, name: str, ca: Path | None = None) -> Credentials:
    """Credentials of somebody who does not look at them before they are shown."""
    pem, key = ((folder / file).read_bytes() for file in (f"{name}.pem", f"{name}.key"))
    role = name if name in ("edge", "fed") else "device"
    return Credentials(((ca or folder) / "ca.pem").read_bytes(), pem, key, Party(role, name))


def device(deployment: Deployment, name: str, credentials: Credentials) -> DeviceParty:
    servers = deployment.edge_address, deployment.fed_address
    return DeviceParty(Party("device", name), *servers, credentials, retry_s=0)


async def refusal(party: DeviceParty) -> str:
    with pytest.raises(Refused) as caught:
        await asyncio.wait_for(party.run(), PATIENCE_S)
    return str(caught.value)


def test_who_may_not_take_part_is_told_why_and_ends(
    tmp_path: Path, certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others, old = tmp_path / "others", tmp_path / "old"
    make_certificates(others, ["device-1"])
    make_certificates(old, ["device-2"])
    for file in ("ca.pem", "ca.key"):
        (old / file).write_bytes((certs / file).read_bytes())
    with monkeypatch.context() as patch:
        patch.setattr(making, "_now", lambda: datetime.now(UTC) - timedelta(days=9))
        making.renew_certificate(old, "device-2", days=1)

    async def main() -> None:
        async with deployed(tmp_path / "run", certs) as deployment:
            # Of another authority, which the device believes too: it is the server that will not have it.
            said = await refusal(device(deployment, "device-1", unchecked(others, "device-1", ca=certs)))
            assert "Check certificates" in said
            # Of another authority, and believing no other: it is the device that will not have the server.
            said = await refusal(device(deployment, "device-1", unchecked(others, "device-1")))
            assert "Check certificates" in said
            said = await refusal(device(deployment, "device-2", unchecked(old, "device-2")))
            assert "Check certificates" in said
            # A certificate of the right authority, of nobody in this fleet.
            said = await refusal(device(deployment, "device-99", unchecked(certs, "device-99")))
            assert "permission denied: device-99 is no device of this run" in said
            # A server's certificate is no device's.
            said = await refusal(device(deployment, "edge", unchecked(certs, "edge")))
            assert "this is for device only, and the caller is edge/edge" in said
            # A device in the name of another.
            said = await refusal(device(deployment, "device-1", unchecked(certs, "device-2")))
            assert "device-2 calls itself 'device-1'" in said
            assert deployment.status("device-2").violations == 1
            assert deployment.status("device-1").violations == 0
            assert not deployment.conductor.protocol.here()

    asyncio.run(main())


def test_the_command_ends_with_code_1_and_one_line(tmp_path: Path, certs: Path) -> None:
    others = tmp_path / "others"
    make_certificates(others, ["device-1"])

    async def join(deployment: Deployment, name: str, folder: Path) -> tuple[int, str]:
        servers = ("--edge", deployment.edge_address, "--fed", deployment.fed_address)
        device = ("--name", name, "--certs", str(folder), "--patience", "0")
        return await asyncio.to_thread(warm.run, ["join", *servers, *device], timeout=PATIENCE_S)

    async def main() -> None:
        async with deployed(tmp_path / "run", certs) as deployment:
            both = (join(deployment, "device-1", others), join(deployment, "device-99", certs))
            (code, wrong), (code_99, unenrolled) = await asyncio.gather(*both)
            assert (code, code_99) == (1, 1), wrong + unenrolled
            assert "Check certificates" in wrong
            assert "device-99 is no device of this run" in unenrolled
            assert "Traceback" not in wrong + unenrolled

    asyncio.run(main())
