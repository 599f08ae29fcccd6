"""What overlaps: parties fetch, deliver and evaluate at the same time; one is held until the other has come so far."""

import asyncio
import threading
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from adaptsfl.config import load_recipe
from adaptsfl.deploy.layers_file import Template
from adaptsfl.deploy.parties.device.calls import EdgeStream
from adaptsfl.deploy.parties.device.evaluation import DeviceEvaluation
from adaptsfl.deploy.parties.device.held import Held
from adaptsfl.deploy.parties.device.party import DeviceParty
from adaptsfl.deploy.parties.edge import conductor as conducting
from adaptsfl.deploy.parties.edge.computing import ComputingThread
from adaptsfl.deploy.parties.edge.model import EdgeModel
from adaptsfl.deploy.terms import Terms
from adaptsfl.errors import NotWritten
from adaptsfl.runs.folder import read_run
from deploy.in_process import PATIENCE_S, RECIPE, Deployment, deployed
from deploy.test_bad_luck import BATCH_NORM, THREE, made, planned, played, started


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


def test_moments_that_the_fed_server_lost_before_the_edge_server_had_its_layers_are_nobodys_fault(
    tmp_path: Path,
) -> None:
    """It is restarted once, after devices have delivered their moments, and is told of the block by the edge server."""
    changes = (THREE, "run.rounds=4", "run.evaluate_every=1", BATCH_NORM)

    async def scenario() -> None:
        async with deployed(tmp_path, None, *changes, recipe=planned(2123)) as here:
            fed, protocol = here.conductor.fed, here.conductor.protocol
            fetch = fed.fetch_of

            async def restarted(*arguments: Any) -> Any:
                if protocol.block is not None and protocol.block.number == 2:
                    await here.until(lambda: all(protocol.keeps(connection) for connection in protocol.connections))
                    here.fed.block = None
                return await fetch(*arguments)

            fed.fetch_of = restarted  # type: ignore[method-assign]
            await here.finish(started(here, *[DeviceParty] * 3))
            assert [device.violations for device in protocol.devices] == [0, 0, 0]

    played(scenario())
    assert [block.rounds for block in read_run(tmp_path / "edge").blocks] == [2, 2]


# --- evaluation ---

EVALUATED = (THREE, "run.evaluate_every=1")


class Ordered(DeviceParty):
    """A device that notes what it sends, and in which order."""

    sent: list[str]

    async def _send(self, stream: Any, round_: int) -> None:
        if 1 <= round_ <= self._holding().last_round:
            self.sent.append(f"round {round_}")
        await super()._send(stream, round_)

    async def _test(self, held: Held, evaluation: DeviceEvaluation, number: int, stream: EdgeStream) -> None:
        self.sent.append(f"tests of block {held.block}")
        await super()._test(held, evaluation, number, stream)

    async def _deliver(self, *arguments: Any) -> None:
        await super()._deliver(*arguments)
        self.sent.append(f"layers of block {self._holding().block}")


def ordered(here: Deployment) -> list[Ordered]:
    """Return a fleet of such devices."""
    devices = [made(here, number, Ordered) for number in (1, 2, 3)]
    for device in devices:
        device.sent = []
    return devices


@pytest.mark.parametrize("changes", [(), (BATCH_NORM,)], ids=["group-norm", "re-estimated"])
def test_activations_of_the_first_round_come_before_test_samples(tmp_path: Path, changes: tuple[str, ...]) -> None:
    async def scenario() -> None:
        async with deployed(tmp_path, None, *EVALUATED, *changes, "run.rounds=4", recipe=planned(2123)) as here:
            devices = ordered(here)
            await here.finish([asyncio.create_task(device.run()) for device in devices])
            for device in devices:
                tests = "tests of block 2"
                assert device.sent.count(tests) == len(device.data.test_batches())
                assert device.sent.index("round 3") < device.sent.index(tests)

    played(scenario())
    assert [row[0] for block in read_run(tmp_path / "edge").blocks for row in block.evaluations] == [2, 4]


def test_a_round_is_trained_before_its_devices_have_sent_all_test_samples(tmp_path: Path) -> None:
    """No device sends its last test samples before the block's rounds are done: after its layers, they are sent."""

    async def scenario() -> None:
        async with deployed(tmp_path, None, *EVALUATED, "run.rounds=4", recipe=planned(2123)) as here:

            class Late(Ordered):
                async def _test(
                    self, held: Held, evaluation: DeviceEvaluation, number: int, stream: EdgeStream
                ) -> None:
                    if held.block == 2 and number == evaluation.total - 1:
                        await here.until(lambda: held.delivered)
                    await super()._test(held, evaluation, number, stream)

            devices = [made(here, number, Late) for number in (1, 2, 3)]
            for device in devices:
                device.sent = []
            await here.finish([asyncio.create_task(device.run()) for device in devices])

    played(scenario())
    blocks = read_run(tmp_path / "edge").blocks
    assert [row[0] for row in blocks[1].evaluations] == [2, 4]


def test_who_never_sends_its_test_samples_costs_one_deadline(tmp_path: Path) -> None:
    """The deadline passes in the first block that evaluates, and in the last evaluation; nobody waits in between."""
    passed: list[int] = []

    class Silent(DeviceParty):
        async def _test(self, *arguments: Any) -> None:
            """Send nothing."""

    async def scenario() -> None:
        async with deployed(tmp_path, None, *EVALUATED, "run.rounds=4", recipe=planned(1222)) as here:
            protocol, executor = here.conductor.protocol, here.conductor.executor

            def others_are_done() -> bool:
                block = protocol.block
                tests = None if block is None or block.phase != "testing" else block.evaluation
                return tests is not None and tests.complete(0) and tests.complete(1)

            async def pass_deadlines() -> None:
                while True:
                    await here.until(others_are_done)
                    assert protocol.block is not None
                    passed.append(protocol.block.number)
                    protocol.block.test_deadline = 0.0
                    executor.tick()

            passing = asyncio.create_task(pass_deadlines())
            await here.finish(started(here, DeviceParty, DeviceParty, Silent))
            passing.cancel()
            assert protocol.devices[2].untested
            assert [device.violations for device in protocol.devices] == [0, 0, 0]

    played(scenario())
    assert passed == [2, 5]
    blocks = read_run(tmp_path / "edge").blocks
    assert [row[0] for block in blocks for row in block.evaluations] == [1, 2, 3, 4]


def test_training_waits_for_one_mini_batch_of_test_samples_at_most() -> None:
    order: list[str] = []

    async def scenario() -> None:
        thread, begun, end = ComputingThread(MagicMock(EdgeModel)), threading.Event(), threading.Event()

        def held() -> None:
            begun.set()
            end.wait()
            order.append("held")

        tasks = [asyncio.create_task(thread.run_when_idle(held))]
        await asyncio.to_thread(begun.wait)
        tasks += [asyncio.create_task(thread.run_when_idle(order.append, f"test {k}")) for k in range(3)]
        tasks += [asyncio.create_task(thread.run(order.append, f"round {k}")) for k in range(3)]
        await asyncio.sleep(0)
        end.set()
        await asyncio.gather(*tasks)
        thread.shutdown()

    asyncio.run(scenario())
    assert order == ["held", "round 0", "round 1", "round 2", "test 0", "test 1", "test 2"]


def test_a_mini_batch_that_was_evaluated_over_the_connection_before_is_not_sent_again() -> None:
    """The answer comes after the device has begun to compute the same test samples for the new connection."""
    evaluation = DeviceEvaluation({1: torch.nn.Identity()}, [(torch.zeros(2, 3), torch.zeros(2))], {})
    assert evaluation.take() == 0
    evaluation.pause()
    evaluation.go_on()
    assert evaluation.take() == 0
    evaluation.done(0)
    assert evaluation.run(0) is None
    assert evaluation.take() is None


def test_test_samples_of_two_connections_do_not_run_through_the_layers_at_once() -> None:
    """A job is cancelled with its connection, but its thread goes on: both would swap the layers' buffers."""
    inside: list[int] = []
    most: list[int] = []
    begun, end = threading.Event(), threading.Event()

    class Slow(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.append(1)
            most.append(len(inside))
            begun.set()
            end.wait(PATIENCE_S)
            inside.pop()
            return x

    evaluation = DeviceEvaluation({1: Slow()}, [(torch.zeros(2, 3), torch.zeros(2))], {})
    threads = [threading.Thread(target=evaluation.run, args=(0,)) for _ in range(2)]
    threads[0].start()
    assert begun.wait(PATIENCE_S)
    begun.clear()
    threads[1].start()
    begun.wait(0.2)  # it must not begin
    end.set()
    for thread in threads:
        thread.join()
    assert most == [1, 1]


def test_the_model_of_the_begin_is_evaluated_whatever_training_does_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE.replace('norm = "group"', 'norm = "batch"'))
    terms = Terms.of(load_recipe(tmp_path / "recipe.toml", ["fleet.devices=2"]))
    model, _ = terms.model()
    template = Template(model, terms.optimizer)
    edge = EdgeModel(model, template, "pooled", 2, 3)
    fetched = {number: template.layer(number).state() for number in (3, 2)}  # in any order
    edge.place(3, fetched, evaluates=True)
    for device in (0, 1):
        edge.admit(device, 1)
    generator = torch.Generator().manual_seed(0)
    tests, labels = torch.randn(8, 8, 8, 8, generator=generator), torch.arange(8)
    assert edge.start is not None
    before = edge.start.evaluate(1, tests, labels)
    for device in (0, 1):
        edge.receive(device, torch.randn(8, 8, 8, 8, generator=generator))
    edge.train(1, (0, 1), {0: labels, 1: labels}, [0.5, 0.5])
    assert edge.start.evaluate(1, tests, labels) == before
    edge.place(3, edge.own_states(0, 1), evaluates=True)
    assert edge.start.evaluate(1, tests, labels) != before
    edge.place(3, fetched)
    assert edge.start is None


# --- the checkpoint ---


def test_a_block_begins_while_the_one_before_is_written_and_is_not_averaged_before(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with deployed(tmp_path, None, THREE, "run.rounds=4", recipe=planned(2123)) as here:
            journal, may_write = here.conductor.journal, threading.Event()
            add, average = journal.add, here.conductor.fed.close
            averaged: list[int] = []

            def slow(block: Any) -> None:
                may_write.wait(PATIENCE_S)
                add(block)

            async def close(*arguments: Any, **options: Any) -> Any:
                averaged.append(len(read_run(tmp_path / "edge").blocks))
                return await average(*arguments, **options)

            journal.add, here.conductor.fed.close = slow, close  # type: ignore[method-assign]
            devices = started(here, *[DeviceParty] * 3)
            await here.until(
                lambda: (block := here.conductor.protocol.block) is not None and block.phase == "averaging"
            )
            await here.until(lambda: here.conductor.progress.rounds == 4)
            assert averaged == [0]
            may_write.set()
            await here.finish(devices)
            assert averaged == [0, 1]

    played(scenario())
    assert [block.rounds for block in read_run(tmp_path / "edge").blocks] == [2, 2]


def test_a_block_that_cannot_be_written_ends_the_run_before_the_next_is_averaged(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with deployed(tmp_path, None, THREE, "run.rounds=4", recipe=planned(2123)) as here:

            def full(*_arguments: Any) -> None:
                raise NotWritten("the disk is full")

            here.conductor.journal.save = full  # type: ignore[method-assign]
            devices = started(here, *[DeviceParty] * 3)
            with pytest.raises(NotWritten, match="the disk is full"):
                await here.run
            assert max(here.fed.versions) == 1
            for device in devices:
                device.cancel()
            await asyncio.gather(*devices, return_exceptions=True)

    played(scenario())


def test_a_checkpoint_holds_the_layers_of_its_block_though_training_goes_on(tmp_path: Path) -> None:
    """The edge server is stopped in the second block; it goes on from the first, and ends as if nothing had been."""
    recipe, changes = planned(212), ("fleet.devices=2", "run.rounds=4")

    async def scenario() -> None:
        async with deployed(tmp_path / "stopped", None, *changes, recipe=recipe) as here:
            save, may_write = here.conductor.journal.save, threading.Event()

            def slow(*arguments: Any) -> None:
                may_write.wait(PATIENCE_S)
                save(*arguments)
                raise NotWritten("stopped after the checkpoint")

            here.conductor.journal.save = slow  # type: ignore[method-assign]
            devices = started(here, *[DeviceParty] * 2)
            await here.until(lambda: here.conductor.progress.rounds == 4)
            may_write.set()
            with pytest.raises(NotWritten):
                await here.run
            for device in devices:
                device.cancel()
            await asyncio.gather(*devices, return_exceptions=True)
        async with deployed(tmp_path / "stopped", None, *changes, recipe=recipe) as here:
            await here.finish(started(here, *[DeviceParty] * 2))
            found = here.model()
        async with deployed(tmp_path / "whole", None, *changes, recipe=recipe) as here:
            await here.finish(started(here, *[DeviceParty] * 2))
            torch.testing.assert_close(found, here.model())

    played(scenario())
