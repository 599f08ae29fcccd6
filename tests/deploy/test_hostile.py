"""Devices with valid certificates that mean harm, beside honest ones that train: the servers hold, the others learn.

All parties are in this process, over TLS: what its memory grows by is an upper bound for any one of them.
"""

import asyncio
import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from adaptsfl.costs import CutCosts
from adaptsfl.deploy import service
from adaptsfl.deploy import wire_pb2 as wire
from adaptsfl.deploy.parties.edge import conductor as conducting
from adaptsfl.deploy.parties.edge import sessions
from adaptsfl.deploy.parties.edge.resources import MeasuredFleet
from adaptsfl.deploy.parties.edge.sessions import Member, Session
from adaptsfl.deploy.protocol import state as protocol_state
from adaptsfl.deploy.security import limits
from adaptsfl.deploy.security.certs import make_certificates
from adaptsfl.deploy.service import STRIKES
from adaptsfl.deploy.terms import PROTOCOL
from adaptsfl.errors import BadMessage, Refused, TrainingDiverged
from adaptsfl.latency import phase_times
from adaptsfl.training import OptimizerSettings
from deploy.hostile_client import ABSURD, Hostile, Liar, hold_open, refusal
from deploy.in_process import PATIENCE_S, Deployment, deployed

HOSTILE = ("device-4", "device-5", "device-6")
HONEST = ("device-1", "device-2", "device-3")
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
    for module in (service, protocol_state):
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
@pytest.mark.parametrize("messages", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_thousands_of_hostile_messages_change_nothing(tmp_path: Path, certs: Path, messages: int) -> None:
    async def main() -> None:
        expected = await undisturbed(tmp_path / "quiet", certs)
        async with deployed(tmp_path / "loud", certs, *FLEET, PLANS) as deployment:
            hostiles = [Hostile(deployment, name, seed) for seed, name in enumerate(HOSTILE)]
            early = joined(deployment, HONEST[:2])
            await asyncio.gather(*(hostile.rage(300) for hostile in hostiles))
            before = resident_mb()
            devices = [*early, *joined(deployment, HONEST[2:])]
            await asyncio.gather(*(hostile.rage(messages // len(hostiles) + 1) for hostile in hostiles))
            await deployment.finish(devices)
            after = resident_mb()
            sent = sum(hostile.sent for hostile in hostiles)
            ended = sum((hostile.ended for hostile in hostiles), start=type(hostiles[0].ended)())
            print(f"{sent} messages, {before:.0f} MB before, {after:.0f} MB after, {dict(ended)}")
            assert sent >= messages
            assert after - before < GROWTH_MB
            # Whatever they tried, it was refused for a reason; UNKNOWN would be an error of ours.
            assert set(ended) <= {"INVALID_ARGUMENT", "PERMISSION_DENIED", "FAILED_PRECONDITION", "ENDED", "OK"}
            assert ended["INVALID_ARGUMENT"] > messages // 10
            assert all(deployment.status(name).violations > messages // 100 for name in HOSTILE)
            assert all(deployment.status(name).violations == 0 for name in HONEST)
            for name, tensor in deployment.model().items():
                assert torch.equal(tensor, expected[name]), name
            for hostile in hostiles:
                await hostile.close()

    asyncio.run(main())


def end_soon(deployment: Deployment) -> None:
    """Let a run without an end of its own end with the block that is being trained."""
    deployment.conductor.loop.ending.after = lambda _block: "rounds"  # type: ignore[method-assign]


IN_PARTS = 'run.options={"deploy.scripted_policy:Scripted"={plans=[31234,22222,53142],sent=[40]}}'


@pytest.mark.usefixtures("endless")
@pytest.mark.parametrize("how", [(), (IN_PARTS,)], ids=["whole", "in parts"])
def test_a_member_that_lies_in_every_way_does_not_end_the_run(
    how: tuple[str, ...], tmp_path: Path, certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conducting, "SHUTDOWN_S", 0.0)  # the liar will be gone

    async def main() -> None:
        changes = ("deploy.quorum=0.5", "run.rounds=1000000", "deploy.round_deadline_s=1.0", *how)
        async with deployed(tmp_path, certs, *changes) as deployment:
            devices = joined(deployment, HONEST)
            liar = Liar(deployment, "device-4", 0)
            for lie in liar.lies:  # everything once, and everybody at work, before memory counts
                await liar.lie(lie)
            before = resident_mb()
            while deployment.status("device-4").violations <= len(liar.lies):
                for lie in liar.lies:
                    code = await liar.lie(lie)
                    assert code in ENDS, (lie, code)
            end_soon(deployment)
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

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_three_violations_shut_a_device_out_of_everything(tmp_path: Path, certs: Path) -> None:
    async def main() -> None:
        async with deployed(tmp_path, certs) as deployment:
            hostile = Hostile(deployment, "device-4", 0)
            assert await hostile.call("Edge", "train", [b"\xff"]) in refusal("INVALID_ARGUMENT")
            nasty = wire.FromDevice(hello=wire.Hello(device="\x1b[2J\x07", version=PROTOCOL))
            assert await hostile.call("Edge", "train", [nasty.SerializeToString()]) in refusal("INVALID_ARGUMENT")
            assert deployment.status("device-4").state == "away"
            assert await hostile.call("Edge", "echo", [b"", b""]) in refusal("INVALID_ARGUMENT")
            for method in ("train", "echo"):
                assert await hostile.call("Edge", method, []) in refusal("PERMISSION_DENIED")
            board = deployment.status("device-4")
            assert (board.state, board.violations) == ("quarantined", 3)
            assert board.last_error.isprintable()
            # The other server sees for itself.
            for _ in range(3):
                assert await hostile.call("Fed", "deliver", [b"\xff"]) in refusal("INVALID_ARGUMENT")
            for method in ("deliver", "fetch", "echo"):
                assert await hostile.call("Fed", method, []) in refusal("PERMISSION_DENIED")
            said = len(deployment.lines)
            for _ in range(500):
                assert await hostile.call("Edge", "train", [b"\xff"]) in refusal("PERMISSION_DENIED")
            assert len(deployment.lines) == said  # nobody is told five hundred times
            assert deployment.status("device-4").violations == 3
            await hostile.close()

    asyncio.run(main())


def test_a_device_may_not_do_anything_too_often(tmp_path: Path, certs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All within one minute, however long it takes here."""
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: 0.0))

    async def main() -> None:
        async with deployed(tmp_path, certs) as deployment:
            hostile = Hostile(deployment, "device-4", 0)
            hello = [hostile.hello().SerializeToString()]
            codes = [await hostile.call("Edge", "train", hello) for _ in range(sessions.JOINS_PER_MINUTE + 20)]
            assert codes[: sessions.JOINS_PER_MINUTE] == ["OK"] * sessions.JOINS_PER_MINUTE
            assert set(codes[sessions.JOINS_PER_MINUTE :]) <= set(refusal("RESOURCE_EXHAUSTED"))
            for server in ("Edge", "Fed"):
                codes = [await hostile.call(server, "echo", []) for _ in range(service.ECHOES_PER_MINUTE + 5)]
                assert codes[: service.ECHOES_PER_MINUTE] == ["OK"] * service.ECHOES_PER_MINUTE
                assert set(codes[service.ECHOES_PER_MINUTE :]) <= set(refusal("RESOURCE_EXHAUSTED"))
            # Calls that are left open: so many, and what they announce is not taken from memory.
            await deployment.until(lambda: not deployment.fed._calls)
            before = resident_mb()
            calls = [await hold_open(hostile, "Fed", "deliver", []) for _ in range(service.MOST_CALLS)]
            await deployment.until(lambda: sum(deployment.fed._calls.values()) == service.MOST_CALLS)
            assert await hostile.call("Fed", "deliver", []) in refusal("RESOURCE_EXHAUSTED")
            assert await Hostile(deployment, "device-5", 0).call("Fed", "deliver", []) in refusal("INVALID_ARGUMENT")
            assert resident_mb() - before < 20
            for call in calls:
                call.cancel()
            await deployment.until(lambda: not deployment.fed._calls)
            assert await hostile.call("Fed", "deliver", []) in refusal("INVALID_ARGUMENT")
            await hostile.close()

    asyncio.run(main())


def test_devices_that_say_nothing_hold_nobody_up_for_long(
    tmp_path: Path, certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One says hello, one is ready and then silent, one sends a header and no bytes: one deadline is lost, not ten.

    No honest device is ever left behind, however slow this machine is: without all of them there is no quorum.
    """
    monkeypatch.setattr(conducting, "SHUTDOWN_S", 0.0)  # they would not listen
    monkeypatch.setattr(conducting, "PREPARING_S", 0.0)

    async def main() -> None:
        changes = (*FLEET, PLANS, "deploy.round_deadline_s=1.0", "run.evaluate_every=100")
        async with deployed(tmp_path, certs, *changes) as deployment:
            silent = [Liar(deployment, name, 0) for name in HOSTILE]
            hello = silent[0].hello()
            calls = [await hold_open(silent[0], "Edge", "train", [hello])]
            for liar in silent[1:]:
                calls.append(
                    await hold_open(liar, "Edge", "train", [liar.hello(), wire.FromDevice(ready=liar.ready())])
                )
            protocol = deployment.conductor.protocol
            members = [device for device in protocol.devices if device.name in HOSTILE]
            await deployment.until(lambda: all(m.connection is not None for m in members[1:]))
            devices = joined(deployment, HONEST)
            await deployment.until(lambda: protocol.block is not None and members[2].attempt != 0)
            silent[2].plan = wire.Plan(attempt=members[2].attempt, cut=members[2].cut, next_round=1)
            await calls[2].write(wire.FromDevice(activations=silent[2].batch()[0]).SerializeToString())
            await deployment.finish(devices)
            late = [line for line in deployment.lines if "goes on without" in line]
            assert len(late) == 1, deployment.lines
            assert "device-5, device-6" in late[0]
            assert deployment.conductor.progress.rounds == 10
            assert all(m.rounds == 0 for m in members)
            for call, liar in zip(calls, silent, strict=True):
                call.cancel()
                await liar.close()

    asyncio.run(main())


def test_whoever_claims_deliveries_that_never_came_is_shut_out(tmp_path: Path, certs: Path) -> None:
    """It trains as it should, says that its layers are at the fed server, and brings none."""

    async def main() -> None:
        async with deployed(tmp_path, certs, "deploy.round_deadline_s=20.0", "run.rounds=1000000") as deployment:
            devices = joined(deployment, HONEST)
            cheat = deployment.device("device-4")

            async def claim(attempt: int, stream: Any, _fed: Any) -> None:
                await stream.write(wire.FromDevice(delivered=wire.Delivered(attempt=attempt)))

            cheat._deliver = claim  # type: ignore[method-assign]
            why = []
            while "is shut out" not in "".join(why):
                with pytest.raises(Refused) as caught:
                    await cheat.run()
                why.append(str(caught.value))
            assert "its layers are at the fed server, and none are" in why[0]
            end_soon(deployment)
            await deployment.finish(devices)
            assert deployment.status("device-4").state == "quarantined"
            assert deployment.conductor.protocol.devices[3].undelivered == STRIKES

    asyncio.run(main())


def test_a_model_that_diverged_is_nobodys_fault(tmp_path: Path, certs: Path) -> None:
    """Where most losses are no numbers, the learning rate is to blame, and no device is shut out for it."""

    async def main() -> None:
        changes = ("training.common_learning_rate=1e30",)
        async with deployed(tmp_path, certs, *changes) as deployment:
            devices = joined(deployment, ("device-1", "device-2", "device-3", "device-4"))
            with pytest.raises(TrainingDiverged, match=r"Lower training\.learning_rate"):
                await asyncio.wait_for(deployment.run, PATIENCE_S)
            assert all(
                not device.quarantined for device in deployment.conductor.protocol.devices if device.name in HONEST
            )
            for task in devices:
                task.cancel()
            await asyncio.gather(*devices, return_exceptions=True)

    asyncio.run(main())


def test_a_device_that_does_not_read_is_let_go() -> None:
    async def main() -> None:
        session = Session(Member(0, "device-1"))
        for _ in range(sessions.MOST_UNREAD_TENSORS):
            session.send(wire.ToDevice(), memoryview(bytes(10)))
        session.send(wire.ToDevice())
        session.send(wire.ToDevice(), memoryview(bytes(10)))
        with pytest.raises(BadMessage, match="does not read"):
            _ = [message async for message in session.messages()]
        session = Session(Member(0, "device-1"))
        for _ in range(10 * sessions.MOST_UNREAD):
            session.send(wire.ToDevice())
        session.close()
        with pytest.raises(BadMessage, match="does not read"):
            _ = [message async for message in session.messages()]

    asyncio.run(main())


@pytest.mark.parametrize("value", ABSURD)
def test_whatever_a_device_measured_leaves_numbers_to_plan_with(tmp_path: Path, value: float) -> None:
    costs = CutCosts(*([1e6, 2e6],) * 2, *([1e5, 1e4],) * 2, [1e5, 2e5])
    fleet = MeasuredFleet(costs, ["device-1", "device-2"], 8, OptimizerSettings())
    good = wire.Ready(samples=8, forward_s=[1e-3, 1e-3], backward_s=[1e-3, 1e-3])
    fleet.ready(0, good)
    rates = wire.Rates(uplink=value, downlink=value, fed_uplink=value, fed_downlink=value)
    fleet.ready(1, wire.Ready(samples=8, forward_s=[0, 5e-324], backward_s=[1e6, 1e6], rates=rates))
    for _ in range(50):
        fleet.device(1, 2**21, uplink_bps=value, downlink_bps=value)
        fleet.computed(1, 1, value, value)
    planned = fleet.fleet((0, 1))
    times = phase_times(fleet.costs, planned, np.array([1, 2]), 8)
    assert all(0 <= time.seconds < 1e30 for time in times)
