"""Devices with valid certificates that mean harm, beside honest ones that train: the servers hold, the others learn.

All parties are in this process, over TLS: what its memory grows by is an upper bound for any one of them.
"""

import asyncio
import contextlib
import gc
from pathlib import Path

import pytest
import torch

from adaptsfl.deploy import service, sessions
from adaptsfl.deploy.certs import make_certificates
from deploy.hostile_client import Hostile, Liar
from deploy.in_process import Deployment, deployed

HOSTILE = ("device-4", "device-5", "device-6")
HONEST = ("device-1", "device-2", "device-3")
MESSAGES = 10_000
ENDS = {"INVALID_ARGUMENT", "PERMISSION_DENIED", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "ENDED", "OK"}
GROWTH_MB = 150  # of a process that holds all parties; one message of each attack kept would be more
FLEET = ("fleet.devices=6", "deploy.quorum=0.5", "deploy.start_deadline_s=0.0")
PLANS = 'run.options={"deploy.scripted_policy:Scripted"={plans=[3123456,2222222,5314211]}}'


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("certs")
    make_certificates(place, [f"device-{k}" for k in range(1, 7)])
    return place


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is shut out, so that every message gets as deep as it can."""
    for module in (service, sessions):
        monkeypatch.setattr(module, "STRIKES", 10**9)
        monkeypatch.setattr(module, "MOST_VIOLATIONS", 10**9)
    monkeypatch.setattr(sessions, "JOINS_PER_MINUTE", 10**9)
    monkeypatch.setattr(service, "ECHOES_PER_MINUTE", 10**9)


def resident_mb() -> float:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def joined(deployment: Deployment, names: tuple[str, ...]) -> list["asyncio.Task[str]"]:
    return [asyncio.create_task(deployment.device(name).run()) for name in names]


async def undisturbed(folder: Path, certs: Path) -> dict[str, torch.Tensor]:
    async with deployed(folder, certs, *FLEET, PLANS) as deployment:
        await deployment.finish(joined(deployment, HONEST))
        return deployment.model()


@pytest.mark.usefixtures("endless")
def test_ten_thousand_hostile_messages_change_nothing(tmp_path: Path, certs: Path) -> None:
    async def main() -> None:
        expected = await undisturbed(tmp_path / "quiet", certs)
        async with deployed(tmp_path / "loud", certs, *FLEET, PLANS) as deployment:
            hostiles = [Hostile(deployment, name, seed) for seed, name in enumerate(HOSTILE)]
            early = joined(deployment, HONEST[:2])
            await asyncio.gather(*(hostile.rage(300) for hostile in hostiles))
            before = resident_mb()
            devices = [*early, *joined(deployment, HONEST[2:])]
            await asyncio.gather(*(hostile.rage(MESSAGES // len(hostiles)) for hostile in hostiles))
            await deployment.finish(devices)
            after = resident_mb()
            sent = sum(hostile.sent for hostile in hostiles)
            ended = sum((hostile.ended for hostile in hostiles), start=type(hostiles[0].ended)())
            print(f"{sent} messages, {before:.0f} MB before, {after:.0f} MB after, {dict(ended)}")
            assert sent >= MESSAGES
            assert after - before < GROWTH_MB
            # Whatever they tried, it was refused for a reason; UNKNOWN would be an error of ours.
            assert set(ended) <= {"INVALID_ARGUMENT", "PERMISSION_DENIED", "FAILED_PRECONDITION", "ENDED", "OK"}
            assert ended["INVALID_ARGUMENT"] > 1000
            assert all(deployment.status(name).violations > 100 for name in HOSTILE)
            assert all(deployment.status(name).violations == 0 for name in HONEST)
            for name, tensor in deployment.model().items():
                assert torch.equal(tensor, expected[name]), name
            for hostile in hostiles:
                await hostile.close()

    asyncio.run(main())


@pytest.mark.usefixtures("endless")
def test_a_member_that_lies_in_every_way_does_not_end_the_run(tmp_path: Path, certs: Path) -> None:
    async def main() -> None:
        changes = ("deploy.quorum=0.5", "run.rounds=60", "deploy.round_deadline_s=5.0")
        async with deployed(tmp_path, certs, *changes) as deployment:
            devices = joined(deployment, HONEST)
            liar = Liar(deployment, "device-4", 0)
            before = resident_mb()
            while not deployment.run.done():
                for lie in liar.lies:
                    with contextlib.suppress(StopAsyncIteration):
                        code = await liar.lie(lie)
                        assert code in ENDS, (lie, code)
            await deployment.finish(devices)
            after = resident_mb()
            print(f"{liar.sent} messages, {before:.0f} MB before, {after:.0f} MB after, {dict(liar.told)}")
            assert set(liar.told) == set(liar.lies)
            assert after - before < GROWTH_MB
            assert deployment.status("device-4").violations > len(liar.lies)
            assert all(deployment.status(name).violations == 0 for name in HONEST)
            assert all(bool(torch.isfinite(tensor).all()) for tensor in deployment.model().values())
            assert all(line.isprintable() for line in deployment.lines)
            await liar.close()

    asyncio.run(main())
