"""What must not happen at the same time, made to happen: all parties in one process, held where the race is."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from adaptsfl.config import load_recipe
from adaptsfl.deploy.layers_file import Template
from adaptsfl.deploy.parties.device.party import DeviceParty
from adaptsfl.deploy.parties.edge.conductor import Conductor
from adaptsfl.deploy.parties.edge.model import EdgeModel, RejectedActivations
from adaptsfl.deploy.parties.edge.service import EdgeService
from adaptsfl.deploy.parties.edge.sessions import Arrival, Session
from adaptsfl.deploy.parties.fed.server import FedServer
from adaptsfl.deploy.parties.local_fleet import free_port
from adaptsfl.deploy.protocol import evaluation
from adaptsfl.deploy.protocol.block import BlockState
from adaptsfl.deploy.protocol.state import State
from adaptsfl.deploy.security.identity import SERVER_OPTIONS, Party, listen, open_channel
from adaptsfl.deploy.service import Calls, NotNow, Service
from adaptsfl.deploy.terms import Terms
from adaptsfl.errors import InvalidInput
from adaptsfl.files import held
from deploy.deployed import HERE, PATIENCE_S, RECIPE

TWO = RECIPE.replace("[31234, 22222, 53142]", "[412]").replace("rounds = 20", "rounds = 8")
ALL_NEEDED = "deploy.quorum=1.0"
NO_DEADLINE = "deploy.round_deadline_s=100000.0"


@pytest.fixture(autouse=True)
def _scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


class Slow(DeviceParty):
    """A device that waits before it does something, once, for as long as a test likes."""

    async def _send(self, stream: Any, round_: int) -> None:
        await self.passing(f"round {round_}")
        await super()._send(stream, round_)

    async def _prepare(self, *arguments: Any) -> None:
        await self.passing("preparing")
        await super()._prepare(*arguments)

    async def passing(self, point: str) -> None:
        reached, gate = self.gates.setdefault(point, (asyncio.Event(), _set()))
        reached.set()
        await gate.wait()

    def stop_at(self, point: str) -> tuple[asyncio.Event, asyncio.Event]:
        """Return what is set when it gets there, and what to set for it to go on."""
        self.gates[point] = asyncio.Event(), asyncio.Event()
        return self.gates[point]

    gates: dict[str, tuple[asyncio.Event, asyncio.Event]]


def _set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass
class House:
    """All parties of a run."""

    edge: EdgeService
    addresses: tuple[str, str]
    said: list[str]
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    @property
    def conductor(self) -> Conductor:
        return self.edge.conductor

    def device(self, number: int, kind: type[Slow] = Slow) -> Slow:
        party = Party("device", f"device-{number}")
        made = kind(party, *self.addresses, None, say=lambda text: self.said.append(f"device-{number}: {text}"))
        made.gates = {}
        return made

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        self.tasks.append(asyncio.create_task(work))
        return self.tasks[-1]

    async def until(self, what: Callable[[], bool]) -> None:
        while not what():
            await asyncio.sleep(0.01)

    def deadline(self, seconds: float) -> None:
        self.conductor.protocol.rules = replace(self.conductor.protocol.rules, round_deadline_s=seconds)


@asynccontextmanager
async def house(folder: Path, *changes: str) -> AsyncIterator[House]:
    """Serve a run without TLS; its devices are the test's to start."""
    (folder / "recipe.toml").write_text(TWO)
    recipe = load_recipe(folder / "recipe.toml", ["fleet.devices=2", *changes])
    said: list[str] = []
    to_edge, to_fed = (f"127.0.0.1:{free_port()}" for _ in range(2))
    fed = FedServer(Terms.of(recipe), folder / "fed", said.append)
    async with open_channel(to_fed, "fed", None, Party("edge", "edge")) as channel:
        edge = EdgeService(Conductor(recipe, folder / "edge", Calls(channel, "Fed"), say=said.append))
        servers = [await _served(fed, to_fed), await _served(edge, to_edge)]
        built = House(edge, (to_edge, to_fed), said)
        try:
            yield built
        finally:
            for task in built.tasks:
                task.cancel()
            await asyncio.gather(*built.tasks, return_exceptions=True)
            for server in servers:
                await server.stop(0)
            edge.conductor.shut_down()


async def _served(service: Service, address: str) -> grpc.aio.Server:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((service.handlers(),))
    await listen(server, address, None)
    await server.start()
    return server


def played(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, PATIENCE_S))


def on_arrival(monkeypatch: pytest.MonkeyPatch, number: int, round_: int, act: Callable[[], object]) -> None:
    """Do something once activations of a device have been read, before they are used."""
    original, done = Session.receive, []

    async def receive(self: Session, *arguments: Any) -> Arrival:
        arrival = await original(self, *arguments)
        if (
            self.member.number == number
            and arrival.header.round == round_
            and not arrival.header.evaluation
            and not done
        ):
            done.append(True)
            act()
        return arrival

    monkeypatch.setattr(Session, "receive", receive)


def test_activations_that_come_while_their_round_is_trained_are_too_late_and_the_device_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with house(tmp_path, NO_DEADLINE) as here:
            loop, arrived = asyncio.get_running_loop(), threading.Event()
            slow = here.device(2)
            _, go_on = slow.stop_at("round 2")
            on_arrival(monkeypatch, 1, 2, arrived.set)
            original = here.conductor.edge_model.train

            def train(*arguments: Any) -> Any:
                if here.conductor.progress.rounds == 0:
                    here.deadline(0.1)  # the second round is closed without the slow one
                if here.conductor.progress.rounds == 1:
                    here.deadline(1e6)
                    loop.call_soon_threadsafe(go_on.set)
                    assert arrived.wait(PATIENCE_S)
                return original(*arguments)

            monkeypatch.setattr(here.conductor.edge_model, "train", train)
            for device in (here.device(1), slow):
                here.start(device.run())
            await here.conductor.run()
        first, *_ = _presents(here)
        assert first == [[0, 1], [0], [0, 1], [0, 1]]

    played(scenario())


def _presents(here: House) -> list[Any]:
    from adaptsfl.runs.folder import read_run  # noqa: PLC0415

    return [
        [list(present) for present in block.present or [(0, 1)] * block.rounds]
        for block in read_run(here.conductor.journal.folder).blocks
    ]


def test_activations_whose_device_is_lost_before_they_are_used_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with house(tmp_path, ALL_NEEDED) as here:
            busy, read = threading.Event(), asyncio.Event()

            def act() -> None:
                here.conductor.executor.computing.submit(busy.wait, PATIENCE_S)  # so that what was read has to wait
                read.set()

            on_arrival(monkeypatch, 1, 2, act)
            run = here.start(here.conductor.run())
            here.start(here.device(1).run())
            lost = here.start(here.device(2).run())
            await read.wait()
            lost.cancel()
            await here.until(lambda: here.conductor.protocol.devices[1].connection is None)
            busy.set()
            again = here.start(here.device(2).run())
            assert await run == "rounds"
            assert "the run is over" in await again

    played(scenario())


def test_a_device_that_comes_back_is_sent_nothing_before_its_plan(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path, ALL_NEEDED, NO_DEADLINE) as here:
            first, second = here.device(1), here.device(2)
            _, go_on = first.stop_at("round 2")
            run = here.start(here.conductor.run())
            here.start(first.run())
            lost = here.start(second.run())
            await here.until(lambda: here.conductor.progress.rounds == 1)
            await here.until(lambda: list(here.conductor.executor.training.arrivals) == [1])
            lost.cancel()
            again = here.device(2)
            preparing, prepare = again.stop_at("preparing")
            over = here.start(again.run())
            await preparing.wait()
            go_on.set()
            await here.until(lambda: here.conductor.progress.rounds == 2)  # with what device-2 sent in its first life
            prepare.set()
            assert await run == "rounds"
            assert "the run is over" in await over
        assert [len(presents) for presents in _presents(here)] == [4, 4]

    played(scenario())


def test_what_a_lost_device_had_sent_gives_way_to_what_it_sends_with_new_layers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path, ALL_NEEDED, NO_DEADLINE) as here:
            first = here.device(1)
            waiting, go_on = first.stop_at("round 2")
            run = here.start(here.conductor.run())
            here.start(first.run())
            lost = here.start(here.device(2).run())
            await waiting.wait()
            await here.until(lambda: 1 in here.conductor.executor.training.arrivals)
            arrivals = here.conductor.executor.training.arrivals
            before = arrivals[1]
            lost.cancel()
            over = here.start(here.device(2).run())
            await here.until(lambda: 1 in arrivals and arrivals[1] is not before)
            go_on.set()
            assert await run == "rounds"
            assert "the run is over" in await over
        assert [len(presents) for presents in _presents(here)] == [4, 4]

    played(scenario())


def test_an_evaluation_that_was_broken_off_is_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here_edge: list[EdgeService] = []

    class Broken(Slow):
        breaks = 1

        async def _test(self, *arguments: Any) -> None:
            await super()._test(*arguments)
            if self.breaks:
                self.breaks -= 1
                executor = here_edge[0].executor
                session = executor._sessions[executor.protocol.devices[1].connection]
                session.close(NotNow("cut"))  # as it looks from here when the connection is lost

    async def scenario() -> None:
        async with house(tmp_path, ALL_NEEDED, NO_DEADLINE, "run.rounds=4", "run.evaluate_every=100") as here:
            here_edge.append(here.edge)
            for device in (here.device(1), here.device(2, Broken)):
                here.start(device.run())
            counted: list[int] = []
            end = evaluation.end_evaluation

            def ended(state: State, block: BlockState) -> None:
                if block.evaluation is not None:
                    counted.append(sum(row[2] for rows in block.evaluation.found.values() for row in rows.values()))
                end(state, block)

            monkeypatch.setattr(evaluation, "end_evaluation", ended)
            assert await here.conductor.run() == "rounds"
            assert counted == [40]

    played(scenario())


def test_an_answer_that_comes_twice_is_followed_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path, ALL_NEEDED, NO_DEADLINE) as here:
            answer = here.conductor.executor._send_gradients

            def answer_twice(*arguments: Any) -> None:
                answer(*arguments)
                answer(*arguments)

            here.conductor.executor._send_gradients = answer_twice  # type: ignore[method-assign]
            devices = [here.start(here.device(number).run()) for number in (1, 2)]
            assert await here.conductor.run() == "rounds"
            assert all("the run is over" in reason for reason in await asyncio.gather(*devices))
        assert [len(presents) for presents in _presents(here)] == [4, 4]

    played(scenario())


def test_a_device_whose_gradients_are_no_numbers_is_left_out_and_the_others_are_trained(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(TWO.replace('norm = "group"', 'norm = "batch"'))
    terms = Terms.of(load_recipe(tmp_path / "recipe.toml", ["fleet.devices=2"]))
    model, _ = terms.model()
    template = Template(model, terms.optimizer)
    labels = {device: torch.arange(8) for device in (0, 1)}

    def states(spoilt: bool) -> dict[int, dict[str, torch.Tensor]]:
        edge = EdgeModel(model, template, "pooled", 2, 3)
        edge.place(3, {number: template.layer(number).state() for number in (2, 3)})
        for device in (0, 1):
            edge.admit(device, 1)
        generator = torch.Generator().manual_seed(0)
        sent = [torch.randn(8, 8, 8, 8, generator=generator) for _ in range(2)]
        if spoilt:
            edge.receive(0, sent[0])
            backward = edge.server.backward
            edge.server.backward = lambda: [torch.full_like(backward()[0], torch.nan), torch.zeros(1)]
        edge.receive(1, sent[1])
        if spoilt:
            with pytest.raises(RejectedActivations, match="0"):
                edge.train(1, (0, 1), labels, [0.5, 0.5])
            edge.server.backward = backward
        edge.train(1, (1,), labels, [1.0])
        return {**edge.common_states(), **edge.own_states(1, 1)}

    torch.testing.assert_close(states(spoilt=True), states(spoilt=False))


def test_two_servers_cannot_share_a_folder(tmp_path: Path) -> None:
    with (
        held(tmp_path),
        pytest.raises(InvalidInput, match=r"is in use by another process\. Wait until"),
        held(tmp_path),
    ):
        pass
    with held(tmp_path):
        pass
