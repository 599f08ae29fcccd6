"""What bad luck, or a bad device, must not cost the others: small runs in this process, with one thing gone wrong."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from adaptsfl.config import load_recipe
from adaptsfl.costs import CutCosts
from adaptsfl.deploy import wire_pb2 as wire
from adaptsfl.deploy.layers_file import LayerStates, Template
from adaptsfl.deploy.parties.device.party import DeviceParty
from adaptsfl.deploy.parties.edge import conductor as conducting
from adaptsfl.deploy.parties.edge.model import EdgeModel, RejectedActivations
from adaptsfl.deploy.parties.edge.resources import MeasuredFleet
from adaptsfl.deploy.parties.edge.sessions import WHOLE
from adaptsfl.deploy.protocol import EdgeProtocol, events
from adaptsfl.deploy.protocol.actions import EvaluateBatch, SendEvaluated
from adaptsfl.deploy.protocol.state import Rules
from adaptsfl.deploy.security.identity import Party
from adaptsfl.deploy.terms import Terms
from adaptsfl.errors import Refused, TrainingDiverged
from adaptsfl.runs.folder import read_run
from adaptsfl.training import OptimizerSettings
from deploy.in_process import PATIENCE_S, RECIPE, Deployment, deployed

BATCH_NORM = 'model.options={ width = 0.25, norm = "batch" }'
THREE, SHORT = "fleet.devices=3", "run.rounds=1"
ALL_NEEDED = "deploy.quorum=1.0"
NAN = float("nan")
Device = TypeVar("Device", bound=DeviceParty)


@pytest.fixture(autouse=True)
def _short_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is gone for good is not waited for at the end."""
    monkeypatch.setattr(conducting, "SHUTDOWN_S", 0.0)


def planned(*plans: int) -> str:
    """One plan after another, the last for all blocks that are left: its interval, then everybody's cut."""
    return RECIPE.replace("[31234, 22222, 53142]", str(list(plans)))


def played(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, PATIENCE_S))


def made(here: Deployment, number: int, kind: type[Device]) -> Device:
    return kind(Party("device", f"device-{number}"), here.edge_address, here.fed_address, None, probe_links=False)


def started(here: Deployment, *kinds: type[DeviceParty]) -> list["asyncio.Task[str]"]:
    """Start the devices of a fleet, one of each of these kinds."""
    return [asyncio.create_task(made(here, number, kind).run()) for number, kind in enumerate(kinds, start=1)]


async def ended(tasks: list["asyncio.Task[str]"]) -> list[Any]:
    """Return what came of devices: why they went home, or their errors."""
    return await asyncio.gather(*tasks, return_exceptions=True)


def times(factor: float) -> type[DeviceParty]:
    """A kind of device whose activations are so many times what they should be."""

    class Spoiling(DeviceParty):
        def _packed(self, activations: torch.Tensor, *rest: Any) -> tuple[wire.Activations, list[memoryview]]:
            return super()._packed(activations * factor, *rest)

    return Spoiling


def before_sending(wait: Callable[[int], Awaitable[None]]) -> type[DeviceParty]:
    """A kind of device that waits for something before it sends what it has for a round."""

    class Waiting(DeviceParty):
        async def _send(self, stream: Any, round_: int) -> None:
            if round_ <= self._holding().last_round:
                await wait(round_)
            await super()._send(stream, round_)

    return Waiting


def before_delivering(act: Callable[[DeviceParty], Awaitable[None]]) -> type[DeviceParty]:
    """A kind of device to which something happens before it takes its layers to the fed server."""

    class Delivering(DeviceParty):
        async def _deliver(self, *arguments: Any) -> None:
            await act(self)
            await super()._deliver(*arguments)

    return Delivering


# --- devices that send absurd numbers ---


@pytest.mark.parametrize("plan", [1442, 1222], ids=["its own layers", "common layers"])
def test_activations_that_swell_batch_norm_cost_their_device_only(tmp_path: Path, plan: int) -> None:
    async def scenario() -> None:
        async with deployed(tmp_path, None, THREE, "run.rounds=4", BATCH_NORM, recipe=planned(plan)) as here:
            bad = here.conductor.protocol.devices[2]

            def bad_one_has_sent() -> bool:
                return 2 in here.conductor.executor.training.arrivals

            async def for_the_bad_one(_round: int) -> None:
                await here.until(lambda: bad.quarantined or bad_one_has_sent())

            async def again_and_again() -> None:
                while not bad.quarantined:
                    with contextlib.suppress(Refused):
                        await made(here, 3, times(1e12)).run()

            stubborn = asyncio.create_task(again_and_again())
            waiting = before_sending(for_the_bad_one)
            await here.finish(started(here, waiting, waiting))
            await stubborn
            assert here.conductor.ended_by == "rounds"
            assert bad.quarantined
            assert "lead to NaN or infinity" in bad.last_error
            assert [member.violations for member in here.conductor.protocol.devices[:2]] == [0, 0]
            blocks = read_run(tmp_path / "edge").blocks
            assert [block.present for block in blocks] == [((0, 1),)] * 4
            assert all(bool(tensor.abs().max() < 1e6) for tensor in here.model().values())

    played(scenario())


@pytest.mark.parametrize("deepest", [4, 2], ids=["its own layers", "common layers"])
def test_running_statistics_are_as_before_once_a_device_is_found_to_have_spoilt_them(
    tmp_path: Path, deepest: int
) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    terms = Terms.of(load_recipe(tmp_path / "recipe.toml", [THREE, BATCH_NORM]))
    model, example = terms.model()
    template = Template(model, terms.optimizer)
    edge = EdgeModel(model, template, "pooled", 3, deepest)
    edge.place(deepest, {number: template.layer(number).state() for number in range(3, deepest + 1)})
    with torch.no_grad():
        shape = model.pieces[1](model.pieces[0](example)).shape[1:]
    generator = torch.Generator().manual_seed(0)

    def states() -> list[LayerStates]:
        return [edge.common_states(), *(edge.own_states(device, 2) for device in range(3))]

    for device in range(3):
        edge.admit(device, 2)
    before = [
        {number: {name: tensor.clone() for name, tensor in layer.items()} for number, layer in state.items()}
        for state in states()
    ]
    for device in range(3):
        edge.receive(device, torch.randn(8, *shape, generator=generator) * (1e12 if device == 2 else 1.0))
    labels = {device: torch.arange(8) for device in range(3)}
    with pytest.raises(RejectedActivations) as spoilt:
        edge.train(1, (0, 1, 2), labels, [1 / 3] * 3)
    assert spoilt.value.devices == (2,)
    torch.testing.assert_close(edge.common_states(), before[0])
    torch.testing.assert_close(edge.own_states(2, 2), before[3])
    edge.train(1, (0, 1), labels, [0.5, 0.5])
    for state in states():
        template.check(state)  # as the fed server does


def test_a_device_whose_own_layers_the_fed_server_would_refuse_is_dropped_and_the_others_are_averaged(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        changes = (THREE, SHORT, "training.optimizer=adam")
        async with deployed(tmp_path, None, *changes, recipe=planned(1422)) as here:
            averaging = here.conductor.executor.averaging
            own_layers = averaging.own_layers

            async def ruined(device: int, cut: int) -> LayerStates:
                states = await own_layers(device, cut)
                if device == 2:
                    squares = [name for name in states[3] if name.startswith("exp_avg_sq.")]
                    states[3] |= {name: torch.full_like(states[3][name], 1e12) for name in squares}
                    assert squares
                return states

            averaging.own_layers = ruined
            *good, bad = started(here, DeviceParty, DeviceParty, DeviceParty)
            await here.finish(good)
            assert here.conductor.ended_by == "rounds"
            with pytest.raises(Refused, match=r"layer 3 came with numbers in 'exp_avg_sq.* that cannot be"):
                await bad
            assert "version 1: layers 1 to 4 of 2 devices averaged" in here.lines
            assert here.model()

    played(scenario())


# --- models that come to no numbers ---


@pytest.mark.parametrize(
    ("factors", "what"), [((NAN,), "1 of 1"), ((1.0, NAN, NAN), "2 of 3")], ids=["a fleet of one", "most of three"]
)
def test_a_model_that_comes_to_no_numbers_on_most_devices_ends_the_run(
    tmp_path: Path, factors: tuple[float, ...], what: str
) -> None:
    async def scenario() -> None:
        async with deployed(tmp_path, None, f"fleet.devices={len(factors)}", recipe=planned(1222)) as here:
            devices = started(here, *map(times, factors))
            with pytest.raises(
                TrainingDiverged,
                match=f"round 1: activations, losses or layers of {what} devices contain NaN or infinity",
            ):
                await here.run
            for factor, reason in zip(factors, await ended(devices), strict=True):
                if factor == 1.0:
                    assert "the run is over (training has failed: round 1" in reason
                else:
                    assert isinstance(reason, Refused)
            if len(factors) == 3:  # whoever comes now is sent home at once, and does not knock for ever
                assert "training has failed" in await made(here, 2, DeviceParty).run()

    played(scenario())


def test_one_device_that_comes_to_no_numbers_does_not_end_the_run_of_three(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with deployed(tmp_path, None, THREE, "run.rounds=2", recipe=planned(1222)) as here:
            *good, bad = started(here, times(1.0), times(1.0), times(NAN))
            await here.finish(good)
            assert here.conductor.ended_by == "rounds"
            with pytest.raises(Refused, match="a tensor with NaN or infinity came"):
                await bad

    played(scenario())


def test_test_samples_that_come_to_no_numbers_on_most_devices_end_the_run_and_the_others_hear_of_it(
    tmp_path: Path,
) -> None:
    class Untestable(DeviceParty):
        testing = False

        async def _test(self, *arguments: Any) -> None:
            self.testing = True
            await super()._test(*arguments)

        def _packed(self, activations: torch.Tensor, *rest: Any) -> tuple[wire.Activations, list[memoryview]]:
            return super()._packed(activations * (NAN if self.testing else 1.0), *rest)

    async def scenario() -> None:
        async with deployed(tmp_path, None, THREE, SHORT, recipe=planned(1222)) as here:
            devices = started(here, DeviceParty, Untestable, Untestable)
            with pytest.raises(TrainingDiverged, match="layers of 2 of 3 devices contain NaN or infinity"):
                await here.run
            assert "the run is over (training has failed" in await devices[0]
            await ended(devices)
            assert not (tmp_path / "fed" / "model.safetensors").exists()

    played(scenario())


async def _ruin(device: DeviceParty) -> None:
    held = device.held
    assert held is not None
    with torch.no_grad():
        held.device.layers[0].parameters[0].fill_(NAN)


def test_a_device_whose_layers_came_to_no_numbers_says_so_instead_of_delivering_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with deployed(tmp_path, None, THREE, SHORT, recipe=planned(1222)) as here:
            *good, bad = started(here, DeviceParty, DeviceParty, before_delivering(_ruin))
            await here.finish(good)
            with pytest.raises(TrainingDiverged, match="layers of this device contain NaN or infinity: layer 1 "):
                await bad
            assert any("device-3 gave up: layers of this device contain NaN" in line for line in here.lines)
            assert here.conductor.protocol.devices[2].violations == 0
            assert here.conductor.ended_by == "rounds"

    played(scenario())


def test_a_run_ends_once_the_layers_of_most_devices_came_to_no_numbers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with deployed(tmp_path, None, THREE, SHORT, recipe=planned(1222)) as here:
            ruined = before_delivering(_ruin)
            good, *bad = started(here, DeviceParty, ruined, ruined)
            with pytest.raises(TrainingDiverged, match="layers of 2 of 3 devices contain NaN or infinity"):
                await here.run
            assert "training has failed" in await good
            assert [type(error) for error in await ended(bad)] == [TrainingDiverged] * 2

    played(scenario())


# --- the end of a block, disturbed ---


def test_nobody_is_accused_when_the_fed_server_forgets_layers_that_were_delivered(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with deployed(tmp_path, None, THREE, SHORT, recipe=planned(1222)) as here:
            fed, refused, deliveries = here.conductor.fed, asyncio.Event(), [0, 0, 0]
            close, missing = fed.close, []

            async def forgotten(attempt: int, weights: Any, *, measured: int) -> wire.Closed:
                if not refused.is_set():
                    executor = here.conductor.executor
                    assert executor.ledger is not None
                    here.fed.block = None
                    executor.handle(
                        await executor.averaging.reopen(executor.ledger)
                    )  # as when a device comes meanwhile
                closed = await close(attempt, weights, measured=measured)
                missing.append(len(closed.missing))
                refused.set()
                return closed

            async def once_then_late(device: DeviceParty) -> None:
                number = int(device.party.name[-1]) - 1
                deliveries[number] += 1
                if deliveries[number] > 1:
                    await refused.wait()

            fed.close = forgotten  # type: ignore[method-assign]
            devices = started(here, *[before_delivering(once_then_late)] * 3)
            await here.finish(devices)
            assert missing == [3, 0]
            assert deliveries == [2, 2, 2]
            assert [(member.violations, member.undelivered) for member in here.conductor.protocol.devices] == [
                (0, 0)
            ] * 3
            assert "version 1: layers 1 to 2 of 3 devices averaged" in here.lines

    played(scenario())


@pytest.mark.parametrize("delivered", [False, True], ids=["before the device delivers", "after the device delivered"])
@pytest.mark.parametrize("before", [False, True], ids=["which had delivered none", "which had delivered its first"])
def test_own_layers_of_a_device_that_lost_its_layers_meanwhile_are_delivered_again(
    tmp_path: Path, before: bool, delivered: bool
) -> None:
    async def scenario() -> None:
        async with deployed(tmp_path, None, THREE, SHORT, ALL_NEEDED, recipe=planned(1442)) as here:
            fed, reached, go_on, brought = here.conductor.fed, asyncio.Event(), asyncio.Event(), asyncio.Event()
            came_back, may_deliver = asyncio.Event(), asyncio.Event()
            deliver, own = fed.deliver, []

            def weight_of(state: dict[str, torch.Tensor]) -> torch.Tensor:
                return next(tensor.clone() for name, tensor in state.items() if name.startswith("parameters."))

            async def slowly(attempt: int, name: str, states: LayerStates) -> Any:
                own.append((name, weight_of(states[3])))
                reached.set()
                await go_on.wait()
                moved = await deliver(attempt, name, states)
                brought.set()
                return moved

            async def in_time(_device: DeviceParty) -> None:
                came_back.set()
                await (may_deliver if delivered else brought).wait()

            fed.deliver = slowly  # type: ignore[method-assign]
            first_life = DeviceParty if before else before_delivering(lambda _device: asyncio.Event().wait())
            *others, lost = started(here, DeviceParty, DeviceParty, first_life)
            await here.until(reached.is_set)
            block = here.conductor.protocol.block
            assert block is not None
            if before:
                await here.until(lambda: 2 in block.deliveries.by_devices)
            lost.cancel()
            again = asyncio.create_task(made(here, 3, before_delivering(in_time)).run())
            await here.until(came_back.is_set)
            assert 2 not in block.deliveries.by_devices
            if delivered:
                may_deliver.set()
                await here.until(lambda: 2 in block.deliveries.by_devices)
            go_on.set()
            await here.finish([*others, again])
            assert [name for name, _ in own] == ["device-3", "device-3"]
            start = weight_of(here.conductor.template.layer(3).state())
            assert not torch.equal(own[0][1], start)
            torch.testing.assert_close(own[1][1], start)

    played(scenario())


# --- devices that leave ---


def test_waiting_for_a_device_that_left_is_not_the_servers_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with deployed(tmp_path, None, THREE, "run.rounds=3", recipe=planned(3222)) as here:
            accounts, stalled, rounds = here.conductor.accounts, asyncio.Event(), {}
            note_round = accounts.note_round

            def noted(block: Any, number: int, parts: Any) -> Any:
                phases, round_s = note_round(block, number, parts)
                rounds[number] = tuple(sorted(parts[0].arrivals)), parts[0].answered, phases["a3"]
                return phases, round_s

            async def stall(round_: int) -> None:
                if round_ == 2:
                    stalled.set()
                    await asyncio.Event().wait()

            accounts.note_round = noted  # type: ignore[method-assign]
            *others, leaving = started(here, DeviceParty, DeviceParty, before_sending(stall))
            await here.until(stalled.is_set)
            await here.until(lambda: len(here.conductor.executor.training.arrivals) == 2)
            left = time.perf_counter()
            leaving.cancel()
            await here.until(lambda: 2 in rounds)
            present, answered, server_s = rounds[2]
            assert present == (0, 1)
            assert server_s <= answered - left
            await here.finish(others)

    played(scenario())


def test_a_run_that_is_done_writes_its_model_also_if_nobody_is_left_to_test_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with deployed(tmp_path, None, "fleet.devices=2", "run.rounds=1", recipe=planned(122)) as here:
            conductor = here.conductor
            devices = started(here, DeviceParty, DeviceParty)
            save = conductor.journal.save

            def saved_and_left(*arguments: Any) -> None:
                save(*arguments)
                rules = conductor.recipe.deploy.model_copy(update={"start_deadline_s": 0.01})
                conductor.recipe = conductor.recipe.model_copy(update={"deploy": rules})
                for task, device in zip(devices, conductor.protocol.devices, strict=True):
                    task.cancel()
                    device.connection = None

            conductor.journal.save = saved_and_left  # type: ignore[method-assign]
            assert await here.run == "rounds"
            assert here.model()
            assert conductor.progress.evaluated_at == 0
            assert conductor.journal.done

    played(scenario())


# --- what people and planners see ---


def test_people_see_how_much_has_come_and_gone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with deployed(tmp_path, None, THREE, "run.rounds=3", recipe=planned(3222)) as here:
            await here.finish(started(here, *[DeviceParty] * 3))
            status, shapes = here.conductor.board.status, here.conductor.shapes
            labels = 8 * shapes.batch_size
            assert status.received_bytes == 3 * 3 * (shapes.size(2, WHOLE) + labels)
            assert 0 < status.sent_bytes <= 3 * 3 * shapes.size(2, WHOLE)
            assert status.received_bps > 0
            assert status.sent_bps > 0
            assert all(device.forward_s and device.backward_s for device in status.devices)

    played(scenario())


def test_a_download_counts_by_its_own_size(tmp_path: Path) -> None:
    """Devices tell how fast gradients came along with their next activations, which may be of another cut."""

    class Told(DeviceParty):
        async def _send(self, stream: Any, round_: int) -> None:
            self._training()._downlink = float(round_)
            await super()._send(stream, round_)

    async def scenario() -> None:
        async with deployed(tmp_path, None, THREE, "run.rounds=3", recipe=planned(1555, 1111)) as here:
            counted: list[tuple[float, float]] = []
            taken = here.conductor.measured.device

            def device(number: int, bits: float, **rates: float) -> None:
                if number == 0 and rates.get("downlink_bps", 0) in (1, 2, 3):
                    counted.append((rates["downlink_bps"], bits))
                taken(number, bits, **rates)

            here.conductor.measured.device = device  # type: ignore[method-assign]
            await here.finish(started(here, *[Told] * 3))
            deep, shallow = (8 * here.conductor.shapes.size(cut, WHOLE) for cut in (5, 1))
            assert deep != shallow
            assert counted == [(1, 0), (2, deep), (3, shallow)]

    played(scenario())


def test_work_is_worked_out_anew_once_another_device_has_measured_it() -> None:
    """Shares of (1/2, 1/2) alone; with (1/4, 3/4) beside them the mean is (3/8, 5/8)."""
    costs = CutCosts(*([1e6, 2e6],) * 2, *([1e5, 1e4],) * 2, [1e5, 2e5])
    fleet = MeasuredFleet(costs, ["device-1", "device-2"], 8, OptimizerSettings())
    np.testing.assert_allclose(fleet.costs.forward_flops, [1e6, 2e6])
    fleet.ready(0, wire.Ready(samples=8, forward_s=[1, 1], backward_s=[1, 1]))
    np.testing.assert_allclose(fleet.costs.forward_flops, [1e6, 2e6])
    fleet.ready(1, wire.Ready(samples=8, forward_s=[1, 3], backward_s=[1, 1]))
    np.testing.assert_allclose(fleet.costs.forward_flops, [0.75e6, 2e6])


# --- lives that begin anew ---


def test_a_device_that_announces_another_number_of_test_samples_begins_anew() -> None:
    protocol = EdgeProtocol(["device-1", "device-2"], Rules(quorum=1, round_deadline_s=60.0))
    for event in (
        events.Hello(connection=1, device=0),
        events.Ready(connection=1, samples=10),
        events.Hello(connection=2, device=1),
        events.Ready(connection=2, samples=10),
        events.BlockOpened(7, number=1, first_round=1, rounds=1, cuts=(1, 1), planned=2, evaluate=True),
        events.LayersPlaced(7),
        events.LayersGiven(7, device=0),
        events.LayersGiven(7, device=1),
    ):
        protocol.handle(event, 0.0)
    assert protocol.block is not None
    tests = protocol.block.evaluation
    assert tests is not None

    def test(number: int, announced: int) -> None:
        for action in protocol.handle(events.Activations(1, 7, number, "evaluation", announced), 0.0):
            assert action == EvaluateBatch(1, 7, 0, number)
            answer = protocol.handle(events.BatchEvaluated(7, 0, number, (1, 0.5, 8)), 0.0)
            assert answer == [SendEvaluated(1, 7, number)]

    for number in range(2):
        test(number, 2)
    assert tests.complete(0)
    for number in range(3):
        test(number, 3)  # with more samples than it had in the life before
        assert tests.complete(0) == (number == 2)
    test(0, 1)  # and with fewer
    assert tests.complete(0)
    assert tests.found[0] == {0: (1, 0.5, 8)}


def test_a_run_that_has_reached_its_target_is_not_trained_on_after_a_restart(tmp_path: Path) -> None:
    class Crash(Exception):
        pass

    changes = ("fleet.devices=2", "run.evaluate_every=1", "run.target_accuracy=0.000001")

    async def scenario() -> None:
        async with deployed(tmp_path, None, *changes, recipe=planned(122)) as here:

            async def crash() -> None:
                raise Crash

            here.conductor._finish = crash  # type: ignore[method-assign]
            devices = started(here, DeviceParty, DeviceParty)
            with pytest.raises(Crash):
                await here.run
            for device in devices:
                device.cancel()
            await ended(devices)
            rounds = here.conductor.progress.rounds
            assert here.conductor.ended_by == "target"
        async with deployed(tmp_path, None, *changes, recipe=planned(122)) as here:
            await here.finish(started(here, DeviceParty, DeviceParty))
            assert here.conductor.ended_by == "target"
            assert here.conductor.progress.rounds == rounds

    played(scenario())
