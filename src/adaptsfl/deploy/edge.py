"""The edge server: it plans, trains the common layers for all devices, and waits for nobody for ever.

The life of a block: decide, open the block at the fed server, tell devices their cuts, train I rounds, have all layers
delivered, let them be averaged, note where we are. Whatever stops the server, it goes on from the last such note.
"""

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np
import torch
from torch import Tensor

from adaptsfl.checks import printable
from adaptsfl.config import Recipe
from adaptsfl.deploy import wire_pb2 as wire
from adaptsfl.deploy.block import OpenBlock, Round, Tests
from adaptsfl.deploy.clock import ALL, BlockClock
from adaptsfl.deploy.decisions import Decisions
from adaptsfl.deploy.edge_model import EdgeModel, Spoilt
from adaptsfl.deploy.fed_client import FedClient
from adaptsfl.deploy.identity import Party, require
from adaptsfl.deploy.journal import Journal, Progress
from adaptsfl.deploy.layers_file import LayerStates, Template
from adaptsfl.deploy.probe import measure_link
from adaptsfl.deploy.resources import MeasuredFleet
from adaptsfl.deploy.service import Calls, NotNow, Service, TooMuch
from adaptsfl.deploy.sessions import HELLO_S, MOST_SAMPLES, Arrival, Member, Session, Shapes
from adaptsfl.deploy.status import Board, Status
from adaptsfl.deploy.tensors import pack, size_of
from adaptsfl.deploy.terms import PROTOCOL, Terms
from adaptsfl.deploy.transfer import Chunk
from adaptsfl.errors import BadMessage, InvalidInput, TrainingDiverged, first_line
from adaptsfl.latency import EDGE_SERVER, FED_SERVER
from adaptsfl.loading import costs_of
from adaptsfl.models import SplitModel
from adaptsfl.simulation.record import Block
from adaptsfl.simulation.run import rates_seen, rounds_planned
from adaptsfl.simulation.world import check_run
from adaptsfl.training.timing import time_layers

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 5.0  # between two attempts to reach the fed server
FAREWELL_S = 30.0  # for devices that are away when the run ends to come and hear of it
PREPARING_S = 90.0  # and for those who are connected, but do not listen while they measure their links
# What ends by itself once the fed server is reached, restarted or given space.
PASSING = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,  # what gRPC makes of a connection that breaks while it writes
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)
T = TypeVar("T")


class EdgeServer(Service):
    """Answers the calls of service Edge, and conducts the run.

    Args:
        fed: the fed server.
        folder: for the record and the checkpoint.
        board: what people see while it runs.
        say: called with what people may want to know.
    """

    service = "Edge"

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        fed: Calls,
        *,
        board: Board | None = None,
        say: Callable[[str], None] = lambda _text: None,
    ) -> None:
        super().__init__(say)
        self.terms = Terms.of(recipe)
        self.recipe = recipe = self.terms.recipe
        check_run(self.terms.run)
        self.model, example = self.terms.model()
        self.template = Template(self.model, self.terms.optimizer)
        self.fed = FedClient(fed, self.template)
        names = self.terms.names
        self.members = {name: Member(k, name) for k, name in enumerate(names)}
        self.by_number = list(self.members.values())
        self.shapes = self._shapes(self.model, example)
        self.edge_model = EdgeModel(
            self.model, self.template, recipe.training.statistics, self.terms.devices, self.terms.floor
        )
        nominal = costs_of(self.model, example, recipe.model, self.terms.batch_size, recipe.training.optimizer)
        self.measured = MeasuredFleet(nominal, names, self.terms.batch_size, self.terms.optimizer)
        self._time_server(example)
        self.decisions = Decisions(self.terms, self.model.layers, self.measured)
        self.journal = Journal(folder, self.terms)
        self.progress = Progress(deepest=self.terms.floor)
        self.quorum = max(1, math.ceil(recipe.deploy.quorum * self.terms.devices))
        planned = rounds_planned(self.terms.run, self.terms.batch_size)
        self.board = board or Board(Status(recipe.name, time.time(), rounds_planned=planned))
        for name in names:
            self.board.update_device(name)
        self.block: OpenBlock | None = None
        self.round: Round | None = None
        self.tests: Tests | None = None
        self.ended_by = ""
        self.over = ""  # what devices are told once the run is over
        self._before_s = self._began = self._noted = self._round_s = 0.0
        self._common_at_close: LayerStates = {}
        self._changed = asyncio.Event()
        self._admitting = asyncio.Lock()  # devices are let in one by one, and not between two blocks
        self._thread = ThreadPoolExecutor(1, "compute")  # all computing, one call at a time

    # --- being called ---

    async def train(
        self, requests: AsyncIterator[wire.FromDevice], context: Any
    ) -> AsyncIterator[wire.ToDevice | Chunk]:
        """Talk with one device for as long as its connection lasts."""
        party = await require(context, "device")
        member = self.members.get(party.name)
        if member is None:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"{party.name} is no device of this run")
            return
        if not member.joins.allows():
            raise TooMuch(f"{party.name} connects too often")
        session = Session(member)
        listening = asyncio.create_task(self._listen(session, aiter(requests), party.name))
        try:
            async for message in session.messages():
                yield message
            member.told = session.stopped and not context.done()
        except BadMessage:
            if member.newest is session:
                member.attempt = 0
            raise
        finally:
            listening.cancel()
            if member.session is session:
                member.session = None
                self._tell_of(member)
            if member.newest is session:
                member.newest = None
            self._wake()

    def violated(self, party: Party, reason: str) -> None:
        """Take note that a device broke the protocol, in whichever call."""
        member = self.members.get(party.name)
        if member is not None:
            member.violated(reason)
            self.say(f"{member.name}: {member.last_error}" + (" (shut out)" if member.quarantined else ""))
            self._send_away(member)

    def behaved(self, party: Party) -> None:
        """Strikes end when activations come that are as they should be, not with any call."""

    def shut_out(self, party: Party) -> str:
        """Return why a device may not call any more; empty if it may."""
        member = self.members.get(party.name)
        return member.last_error if member is not None and member.quarantined else ""

    def _send_away(self, member: Member) -> None:
        """End the connection of a device that is shut out, whichever of its calls was the last straw."""
        if member.quarantined and member.session is not None:
            member.session.close(NotNow(f"{member.name} is shut out: {member.last_error}"))
        self._tell_of(member)

    async def _listen(self, session: Session, requests: AsyncIterator[wire.FromDevice], name: str) -> None:
        """Take in what a device sends, until it or we end the connection."""
        try:
            async with asyncio.timeout(HELLO_S):
                attempt = await self._greet(session, requests, name)
            answer = await anext(requests)
            if answer.WhichOneof("kind") == "failure":
                self._take_failure(session, answer.failure)
                return
            await self._let_in(session, _of_kind(answer, "ready").ready, attempt)
            while True:
                await self._heed(session, await anext(requests), requests)
        except StopAsyncIteration:
            session.close()
        except TimeoutError:
            session.close(NotNow(f"{name} did not say hello"))
        except Exception as error:
            session.close(error)

    async def _greet(self, session: Session, requests: AsyncIterator[wire.FromDevice], name: str) -> int:
        """Hear who a device is, and tell it the terms; return the attempt whose layers it holds."""
        hello = _of_kind(await anext(requests), "hello").hello
        if hello.device != name:
            raise BadMessage(f"{name} calls itself {hello.device[:64]!r}")
        if hello.version != PROTOCOL:
            raise NotNow(f"{name} speaks version {hello.version} of the protocol, this server {PROTOCOL}")
        member = session.member
        if member.session is not None:
            member.session.close(NotNow(f"{name} has connected anew"))
        # Nothing is sent to a device, and nobody waits for it, before it is ready.
        member.newest, member.session, member.gave_up = session, None, False
        if self.over:
            self._send_home(session)
        welcome = wire.Welcome(number=member.number, settings=self.terms.to_json())
        session.send(wire.ToDevice(welcome=welcome))
        return int(hello.attempt)

    async def _let_in(self, session: Session, ready: wire.Ready, attempt: int) -> None:
        """Count a device among those who are here, and tell it what the others are doing."""
        member = session.member
        if member.newest is not session:
            raise NotNow(f"{member.name} has connected anew")
        if not self.terms.batch_size <= ready.samples <= MOST_SAMPLES:
            raise BadMessage(f"{member.name} has {ready.samples} samples, a mini-batch has {self.terms.batch_size}")
        self.measured.ready(member.number, ready)
        member.samples, member.session = int(ready.samples), session
        if attempt != member.attempt:
            member.attempt = 0
        self._tell_of(member)
        self._wake()
        if self.over:
            self._send_home(session)
        elif self.block is not None:
            if member.attempt != self.block.attempt:  # it will ask the fed server for layers
                await self._open_again(self.block)
            await self._admit(session)

    async def _heed(self, session: Session, message: wire.FromDevice, requests: AsyncIterator[wire.FromDevice]) -> None:
        match message.WhichOneof("kind"):
            case "activations":
                await self._take(session, message.activations, requests)
            case "delivered":
                self._take_delivered(session, message.delivered)
            case "failure":
                self._take_failure(session, message.failure)
            case kind:
                raise BadMessage(f"{kind or 'nothing'} came where it had no place")

    async def _take(self, session: Session, told: wire.Activations, requests: AsyncIterator[wire.FromDevice]) -> None:
        """Receive activations, and see what becomes of them."""
        member, block = session.member, self.block
        if block is None or told.attempt != member.attempt or member.attempt != block.attempt:
            await session.discard(told, self.shapes, requests)  # of a block that was closed without it
            member.late = False  # it is slow, but there
            return
        self.shapes.check(told, member.cut)
        arrival = await session.receive(told, self.shapes, requests)
        if self.block is not block or member.session is not session or member.attempt != block.attempt:
            return  # the block was closed meanwhile, or the device has connected anew and sends it again
        bits = 8 * size_of(told.tensor.shape, told.tensor.dtype)
        self.measured.device(member.number, bits, uplink_bps=arrival.bps, downlink_bps=told.downlink)
        if told.evaluation:
            await self._test(session, arrival)
            return
        if not block.first_round <= told.round <= block.last_round:
            raise BadMessage(
                f"activations of round {told.round} came in rounds {block.first_round} to {block.last_round}"
            )
        member.late = False
        self.measured.computed(member.number, member.cut, told.forward_s, told.backward_s)
        if member.answered is not None and member.answered[0] == told.round:
            header, data = member.answered[1]  # it was trained, and the answer was lost on the way
            session.idle()
            session.send(wire.ToDevice(gradients=header), data)
            return
        current = self.round
        if current is not None and told.round == current.number and member.number in current.arrivals:
            session.idle()
            return  # sent again over a new connection, before it was answered
        if current is None or current.closed or told.round != current.number:
            following = self.progress.rounds + (2 if current is not None and current.closed else 1)
            if told.round > following:
                raise BadMessage(f"activations of round {told.round} came, before round {following} was trained")
            session.idle()
            session.send(wire.ToDevice(skip=wire.Skip(next_round=following)))
            return
        current.arrivals[member.number] = arrival
        member.strikes = 0
        session.useful()
        await self._compute(self.edge_model.receive, member.number, arrival.activations)
        self._wake()

    def _take_delivered(self, session: Session, delivered: wire.Delivered) -> None:
        member, block = session.member, self.block
        session.idle()
        if block is not None and block.closing and delivered.attempt == block.attempt == member.attempt:
            block.delivered.add(member.number)
            block.delivered_last = member.number, time.perf_counter(), delivered.fed_uplink
            self.measured.device(
                member.number,
                self._layer_bits(member.cut),
                fed_uplink_bps=delivered.fed_uplink,
                fed_downlink_bps=delivered.fed_downlink,
            )
            self._wake()

    async def _test(self, session: Session, arrival: Arrival) -> None:
        """Evaluate a mini-batch of a device's test samples, unless training has gone on meanwhile."""
        member, tests, told = session.member, self.tests, arrival.told
        if tests is None:
            session.idle()
            return
        batches = tests.batches.setdefault(member.number, told.evaluation_batches)
        if told.round >= batches:
            raise BadMessage(f"test samples {told.round} came of {batches} that were announced")
        found = await self._compute(self.edge_model.evaluate, member.number, arrival.activations, arrival.labels)
        if self.tests is tests:
            tests.add(member.number, told.round, found)
            self._wake()

    def _take_failure(self, session: Session, failure: wire.Failure) -> None:
        member = session.member
        member.last_error, member.gave_up = printable(failure.reason), True
        self.say(f"{member.name} gave up: {member.last_error}")
        session.close()

    async def _admit(self, session: Session) -> None:
        """Tell a device that has come, or come back, what the others are doing; once per connection and block."""
        member = session.member
        async with self._admitting:
            block = self.block
            if block is None or member.session is not session or session.planned == block.attempt:
                return
            if member.attempt != block.attempt:
                await self._give_layers(member, block)
            session.planned = block.attempt
            self._send_plan(session, block)
            if block.closing:
                session.send(wire.ToDevice(deliver=wire.Deliver(attempt=block.attempt)))

    async def _give_layers(self, member: Member, block: OpenBlock) -> None:
        """Let a device begin with the block's layers; what it did in the block before it was lost counts no more."""
        if self.round is not None and not self.round.closed:
            self.round.arrivals.pop(member.number, None)
        member.cut = block.cuts[member.number]
        await self._compute(self.edge_model.admit, member.number, member.cut)
        for lost in (block.trained, block.delivered, block.delivered_for):
            lost.discard(member.number)
        member.answered, member.attempt = None, block.attempt

    def _send_plan(self, session: Session, block: OpenBlock) -> None:
        plan = wire.Plan(
            attempt=block.attempt,
            block=block.number,
            next_round=self.progress.rounds + 1,
            last_round=block.last_round,
            cut=session.member.cut,
            evaluate=self.tests is not None,
        )
        session.send(wire.ToDevice(plan=plan))

    # --- conducting ---

    async def run(self) -> str:
        """Train until the recipe's end; return what ended it."""
        if self._resume():
            self.say("this run is over already")
            await self._say_goodbye(self.by_number)
            return self.ended_by
        self._write_run("running")
        self._began = time.monotonic()
        await self._wait_for_start()
        to_fed = await self._with_fed(lambda: measure_link(self.fed.calls))
        self.measured.server_link(ALL, to_fed_bps=to_fed.uplink, from_fed_bps=to_fed.downlink)
        self._noted = time.perf_counter()
        while not self.ended_by:
            await self._block()
        await self._finish()
        return self.ended_by

    async def _wait_for_start(self) -> None:
        """Wait for all devices but those that cannot; after a while for as many as are needed."""
        deadline = time.monotonic() + self.recipe.deploy.start_deadline_s
        while True:
            here = len(self._here())
            able = sum(not (member.gave_up or member.quarantined) for member in self.by_number)
            if here >= self.quorum and (here >= able or time.monotonic() >= deadline):
                return
            self._wait_for(f"devices: {here} of {self.terms.devices} are here")
            await self._change(deadline - time.monotonic() if here >= self.quorum else None)

    async def _block(self) -> None:
        """One block of rounds under one plan, and the averaging at its end."""
        await self._enough()
        since = self.progress.rounds - self.progress.evaluated_at
        block = await self._open(self._rounds_left(), evaluate=since >= self.terms.run.evaluate_every)
        while self.progress.rounds < block.last_round:
            await self._train_round(block)
        await self._close(block)

    async def _open(self, most: int | None, *, evaluate: bool) -> OpenBlock:
        """Open a block of at most so many rounds at the fed server, place layers, tell devices; they begin at once."""
        members = self._here()
        numbers = tuple(member.number for member in members)
        epoch_rounds = max(1, max(member.samples for member in members) // self.terms.batch_size)
        decision, observed = self.decisions.next(self.progress.rounds, self.progress.blocks, numbers, epoch_rounds)
        interval = decision.plan.interval
        assert interval is not None
        rounds = interval if most is None else min(interval, most)
        planned = dict(zip(numbers, decision.plan.cuts, strict=True))
        least = min(planned.values())  # for those who come while it runs
        cuts = tuple(planned.get(number, least) for number in range(self.terms.devices))
        deepest, before = max(cuts), self.edge_model.deepest
        attempt = secrets.randbits(63)
        named_cuts = {member.name: cuts[member.number] for member in self.by_number}
        opening = wire.Opening(attempt=attempt, version=self.progress.version, deepest=deepest, cuts=named_cuts)
        brought = self.edge_model.becoming_specific(deepest) if deepest > before else {}
        await self._tell_fed(opening, brought)
        first, last = min(cuts) + 1, max(deepest, before)
        fetched: LayerStates = {}
        clock = BlockClock(self._noted)
        clock.passed(time.perf_counter())
        if first <= last:
            fetched = await self._fetch(opening, brought, first, last)
            clock.passed(time.perf_counter(), EDGE_SERVER, b3=ALL)
        block = OpenBlock(
            attempt=attempt,
            number=self.progress.blocks + 1,
            first_round=self.progress.rounds + 1,
            rounds=rounds,
            interval=interval,
            cuts=cuts,
            opening=opening,
            brought=brought,
            members=numbers,
            observed=observed,
            predicted=self.decisions.predicted(observed, [planned[number] for number in numbers]),
            clock=clock,
        )
        async with self._admitting:
            await self._compute(self.edge_model.place, deepest, fetched)
            self.tests = Tests(self.progress.rounds) if evaluate else None
            self.block, self.round = block, Round(self.progress.rounds + 1) if rounds else None
            if rounds:
                clock.told(time.perf_counter())
            for member in self.by_number:
                member.attempt = 0
        self._tell_of_plan(block)
        for member in self._here():
            if member.session is not None:
                await self._admit(member.session)
        return block

    async def _fetch(self, opening: wire.Opening, brought: LayerStates, first: int, last: int) -> LayerStates:
        """Fetch averaged layers; a fed server that was restarted meanwhile is told of the block again."""
        while True:
            try:
                moved = await self._with_fed(lambda: self.fed.fetch(opening.attempt, first, last))
                self.measured.server_link(8 * moved.size, from_fed_bps=moved.bps)
                return moved.states
            except NotNow:
                await self._tell_fed(opening, brought)

    async def _train_round(self, block: OpenBlock) -> None:
        """Wait for activations, train, answer."""
        number = self.progress.rounds + 1
        if self.round is None or self.round.number != number:
            self.round = Round(number)
        current = self.round
        while True:
            everybody = await self._arrivals(block, current)
            current.closed = True
            present = tuple(sorted(current.arrivals))
            began = time.perf_counter()
            weights = self._shares(present)
            labels = {device: current.arrivals[device].labels for device in present}
            try:
                losses, gradients = await self._compute(self.edge_model.train, present, labels, weights)
                break
            except Spoilt as error:
                current.closed = False
                if 2 * len(error.devices) > len(present) > 1:
                    raise TrainingDiverged(
                        f"round {number}: the loss of {len(error.devices)} of {len(present)} devices is no number, so "
                        "it is the model. Lower training.learning_rate, and begin anew in an empty folder"
                    ) from None
                for device in error.devices:
                    del current.arrivals[device]
                    session = self.by_number[device].session
                    if session is not None:
                        session.close(BadMessage("activations came that lead to no numbers"))
        self.progress.rounds = number
        self.round = Round(number + 1) if number < block.last_round else None
        block.trained = set(present)
        for device, gradient in zip(present, gradients, strict=True):
            self._answer(block, self.by_number[device], number, gradient)
        took = time.perf_counter() - began
        loss = float((losses * losses.new_tensor(weights)).sum())
        self._end_tests()
        self._note_round(block, current, present, loss, began + took, ALL if everybody else took)

    def _answer(self, block: OpenBlock, member: Member, number: int, gradient: Tensor) -> None:
        member.last_round, member.rounds = number, member.rounds + 1
        if member.attempt != block.attempt:
            return  # it has lost the layers that this is for
        tensor, data = pack(gradient, self.shapes.wire_dtype)
        header = wire.Gradients(round=number, tensor=tensor)
        member.answered = number, (header, data)
        if member.session is not None and member.session.planned == block.attempt:  # else it asks once it has its plan
            member.session.send(wire.ToDevice(gradients=header), data)

    async def _arrivals(self, block: OpenBlock, current: Round) -> bool:
        """Wait until all who are there have sent (return True), or the deadline has passed and enough have."""
        deadline = time.monotonic() + self.recipe.deploy.round_deadline_s
        while True:
            missing = [m for m in self._here() if m.attempt == block.attempt and m.number not in current.arrivals]
            waiting = [m for m in missing if not m.late]
            enough = len(current.arrivals) >= self.quorum
            if enough and (not waiting or time.monotonic() >= deadline):
                if waiting:
                    self.say(f"round {current.number} goes on without {', '.join(m.name for m in waiting)}")
                for member in waiting:
                    member.late = True
                return not waiting
            if not missing:
                self._wait_for(f"devices: {len(current.arrivals)} of {self.quorum} that are needed")
            await self._change(max(0.0, deadline - time.monotonic()) if enough else None)

    async def _close(self, block: OpenBlock) -> None:
        """Have all copies delivered and averaged; note where we are."""
        block.closing = True
        self._ask_to_deliver(block)
        while True:
            await self._deliveries(block)
            self._note_deliveries(block)
            devices = set(block.delivered)
            try:
                await self._deliver_all_own(block, devices)
                if not devices <= block.delivered:
                    continue  # one of them has lost its layers meanwhile, or the fed server has
                block.clock.passed(time.perf_counter(), EDGE_SERVER, b1=ALL)
                closed = await self._average(block, devices)
                block.clock.passed(time.perf_counter(), FED_SERVER, b2=ALL)
            except NotNow:  # the fed server was restarted: it knows nothing of this block any more
                await self._open_again(block)
                continue
            if not closed.missing:
                break
            for member in [self.members[name] for name in closed.missing if name in self.members]:
                block.delivered.discard(member.number)
                member.failed_to_deliver()
                if member.session is not None:
                    member.session.close(BadMessage("it said that its layers are at the fed server, and none are"))
            self._ask_to_deliver(block)
        self._judge_deliveries(block, devices)
        self.block = None  # whoever comes now is let in with the next one
        self.progress.version, self.progress.deepest = closed.version, block.deepest
        self._note_block(block)
        self._common_at_close = self.edge_model.common_states()
        self.journal.save(self.progress, self._common_at_close)

    def _judge_deliveries(self, block: OpenBlock, averaged: set[int]) -> None:
        """Remember who held up the others: whoever does so again and again is shut out."""
        for member in [self.by_number[device] for device in block.present[-1]]:
            if member.number in averaged:
                member.undelivered = 0
            elif member.session is not None and member.attempt == block.attempt:
                member.failed_to_deliver()
                self._send_away(member)

    def _ask_to_deliver(self, block: OpenBlock) -> None:
        for member in self._here():
            session = member.session
            if session is not None and session.planned == block.attempt and member.number not in block.delivered:
                session.send(wire.ToDevice(deliver=wire.Deliver(attempt=block.attempt)))

    async def _average(self, block: OpenBlock, devices: Collection[int]) -> wire.Closed:
        weights = {self.by_number[k].name: self._weight(k) for k in sorted(devices)}
        return await self._with_fed(lambda: self.fed.close(block.attempt, weights))

    async def _open_again(self, block: OpenBlock) -> None:
        """Make sure that the fed server knows the block; if it had forgotten, everybody delivers once more."""
        if await self._tell_fed(block.opening, block.brought, lambda: self.block is block):
            block.delivered.clear()
            block.delivered_for.clear()
            if block.closing:
                self._ask_to_deliver(block)

    async def _tell_fed(
        self, opening: wire.Opening, brought: LayerStates, still: Callable[[], bool] = lambda: True
    ) -> bool:
        """Open a block at the fed server, if that is `still` wanted; return whether it did not know it."""

        async def call() -> bool:
            return still() and await self.fed.open(opening, brought)

        try:
            return await self._with_fed(call)
        except NotNow as error:
            remedy = "Give both servers the folders that they had, or begin anew with two empty ones"
            raise InvalidInput("fed server", str(error), remedy) from None

    async def _deliveries(self, block: OpenBlock) -> None:
        """Wait until those who are there have delivered; after the deadline until enough have."""
        deadline = time.monotonic() + self.recipe.deploy.round_deadline_s
        patience = FIRST_WAIT_S
        while True:
            here = {m.number for m in self._here() if m.attempt == block.attempt}
            last = block.trained
            # Those who took part in the last round count; if too few of them are left, whoever is here.
            counted = here & last if len(here & last) >= self.quorum else here
            done = block.delivered & counted
            if len(done) >= self.quorum and (done == counted or time.monotonic() >= deadline):
                block.delivered = done
                return
            self._wait_for("the devices' layers")
            if not await self._change(patience):
                await self._open_again(block)  # perhaps it is the fed server that keeps them waiting
                patience = min(2 * patience, LONGEST_WAIT_S)

    async def _deliver_all_own(self, block: OpenBlock, devices: set[int]) -> None:
        """Take these devices' layers above their cuts to the fed server, all at once; wait for all, whatever fails."""
        own = sorted(devices - block.delivered_for)
        done = await asyncio.gather(*(self._deliver_own(block, device) for device in own), return_exceptions=True)
        for error in done:
            if error is not None:
                raise error

    async def _deliver_own(self, block: OpenBlock, device: int) -> None:
        """Take a device's layers above its cut to the fed server."""
        member = self.by_number[device]
        states = await self._compute(self.edge_model.own_states, device, member.cut)
        if states:
            moved = await self._with_fed(lambda: self.fed.deliver(block.attempt, member.name, states))
            self.measured.server_link(8 * moved.size, to_fed_bps=moved.bps)
        block.delivered_for.add(device)

    async def _finish(self) -> None:
        """Evaluate once more, put the model together, and send everybody home."""
        common, version = self._common_at_close, self.progress.version
        if self.progress.evaluated_at < self.progress.rounds:
            await self._enough()
            block = await self._open(0, evaluate=True)
            deadline = time.monotonic() + self.recipe.deploy.round_deadline_s
            while (left := deadline - time.monotonic()) > 0 and self._untested(block):
                await self._change(left)
            self._end_tests()
            self.block = None
        self.journal.flush()
        try:
            await self._with_fed(lambda: self.fed.finish(version, common))
        except NotNow as error:
            remedy = "Give both servers the folders that they had, or begin anew with two empty ones"
            raise InvalidInput("fed server", str(error), remedy) from None
        self._write_run("done")
        await self._say_goodbye([member for member in self.by_number if member.samples])

    async def _say_goodbye(self, members: Sequence[Member]) -> None:
        """Tell devices that the run is over, also those that are away for a moment."""
        self.over = f"the run is over ({self.ended_by}, {self.progress.rounds} rounds)"
        for member in self._here():
            if member.session is not None:
                self._send_home(member.session)
        deadline = time.monotonic() + FAREWELL_S
        patient = deadline + PREPARING_S
        while True:
            able = [m for m in self.by_number if not (m.told or m.gave_up or m.quarantined)]
            missing = [m for m in able if m in members or m.newest is not None]
            preparing = any(m.newest is not None for m in missing)
            left = (patient if preparing else deadline) - time.monotonic()
            if not missing or left <= 0:
                return
            away = [m.name for m in missing if m.session is None]
            if away:
                self._wait_for(f"{', '.join(away)} to hear that the run is over")
            await self._change(left)

    def _send_home(self, session: Session) -> None:
        """Tell a device that the run is over; it ends the connection."""
        session.stopped = True
        session.send(wire.ToDevice(stop=wire.Stop(reason=self.over, done=True)))

    def _untested(self, block: OpenBlock) -> bool:
        assert self.tests is not None
        here = self._here()
        left = any(not self.tests.complete(m.number) for m in here if m.attempt == block.attempt)
        return left or len(here) < self.quorum

    def shut_down(self) -> None:
        """Let go of the thread that computes."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    # --- remembering ---

    def _note_round(
        self, block: OpenBlock, current: Round, present: tuple[int, ...], loss: float, answered: float, turn_s: float
    ) -> None:
        """Account for one round, as it was for the device whose activations came last."""
        block.present.append(present)
        block.losses.append(loss)
        block.told |= {k: current.arrivals[k].told for k in present}
        bits = {k: 8 * self.shapes.size(self.by_number[k].cut) for k in present}
        block.bits += 2 * sum(bits.values())
        last = max(present, key=lambda k: current.arrivals[k].came)
        name, arrival, first = self.by_number[last].name, current.arrivals[last], current.number == block.first_round
        before = {"b3": self._fetch_s(last)} if first else self._back_s(block, last)
        phases = dict.fromkeys(("a1", "a2", "a3", "a4", "a5"), 0.0)
        phases |= block.clock.passed(arrival.came, name, a2=arrival.seconds, a1=arrival.told.forward_s, **before)
        phases |= block.clock.passed(answered, EDGE_SERVER, a3=turn_s)
        phases.pop("b3", None)
        self._round_s = block.clock.answered(answered, first=first)
        self.measured.server_took([block.cuts[device] for device in present], phases["a3"])
        self.board.add_loss(current.number, loss)
        self._tell_of_round(block, phases)

    def _note_deliveries(self, block: OpenBlock) -> None:
        """Account for the time since the last answer, as it was for the device that delivered last."""
        if block.delivered_last is not None:
            device, at, rate = block.delivered_last
            member, back = self.by_number[device], self._back_s(block, device)
            upload_s = self._layer_bits(member.cut) / rate if rate > 0 else 0.0
            block.clock.passed(at, member.name, b1=upload_s, **back)

    def _back_s(self, block: OpenBlock, device: int) -> dict[str, float]:
        """Return the seconds of a device's last download and backward pass, as it told them."""
        told = block.told.get(device)
        if told is None:
            return {}
        bits = 8 * self.shapes.size(self.by_number[device].cut)
        return {"a4": bits / told.downlink if told.downlink > 0 else 0.0, "a5": told.backward_s}

    def _fetch_s(self, device: int) -> float:
        """Return the seconds of a device's last fetching of layers, as far as is known."""
        return self._layer_bits(self.by_number[device].cut) / self.measured.devices[device]["fed_downlink_bps"].rate

    def _layer_bits(self, cut: int) -> float:
        return float(self.measured.nominal.client_model_bits[cut - 1])

    def _note_block(self, block: OpenBlock) -> None:
        """Put a block into the record."""
        took_part = {device for present in block.present for device in present}
        everybody = all(len(present) == self.terms.devices for present in block.present)
        self.progress.blocks = block.number
        self.progress.seconds = self._elapsed()
        self.journal.note(
            Block(
                block=block.number,
                first_round=block.first_round,
                rounds=block.rounds,
                time_s=self.progress.seconds,
                interval=block.interval,
                cuts=tuple(cut if k in took_part else 0 for k, cut in enumerate(block.cuts)),
                deepest=block.deepest,
                layer_intervals={},
                seconds=dict(block.clock.seconds),
                bottleneck=block.clock.bottleneck,
                bits=block.bits,
                loss=float(np.mean(block.losses)),
                evaluations=(),
                estimates={"predicted": block.predicted, "measured": block.clock.data()},
                resources=rates_seen(block.observed, block.members, self.terms.devices),
                predicted_s=block.predicted_s,
                present=None if everybody else tuple(block.present),
            )
        )
        self._noted = time.perf_counter()
        self.ended_by = self._end()

    def _end_tests(self) -> None:
        """Take what the evaluation came to, once training goes on."""
        tests, self.tests = self.tests, None
        result = None if tests is None else tests.result()
        if tests is None or result is None:
            return
        accuracy, loss = result
        self.progress.evaluated_at = tests.round
        self.journal.evaluated(tests.round, accuracy, loss)
        self.board.add_evaluation(tests.round, accuracy)
        self.say(f"round {tests.round}: accuracy {accuracy:.1%} on the devices' test samples")
        goal = self.terms.run.target_accuracy
        if goal is not None and accuracy >= goal:
            self.ended_by = "target"

    def _end(self) -> str:
        """Return what ends the run now; nothing if it goes on."""
        run, progress = self.terms.run, self.progress
        if run.rounds is not None and progress.rounds >= run.rounds:
            return "rounds"
        if run.samples is not None and progress.rounds * self.terms.batch_size >= run.samples:
            return "samples"
        if run.seconds is not None and progress.seconds >= run.seconds:
            return "seconds"
        return self.ended_by

    def _rounds_left(self) -> int | None:
        planned = rounds_planned(self.terms.run, self.terms.batch_size)
        return None if planned is None else planned - self.progress.rounds

    def _elapsed(self) -> float:
        return self._before_s + time.monotonic() - self._began

    def _resume(self) -> bool:
        """Go on from the checkpoint, if there is one; return whether nothing is left to be done."""
        found = self.journal.begin()
        if found is not None:
            self.progress, states = found
            self._before_s = self.progress.seconds
            self.edge_model.load_common(states, self.progress.deepest)
            self.ended_by = self._end()
            if self.journal.done:
                self.ended_by = self.ended_by or "target"
                return True
            self.say(f"going on after round {self.progress.rounds}")
        self._common_at_close = self.edge_model.common_states()
        return False

    def _write_run(self, status: str) -> None:
        facts = {
            "policy": self.decisions.name,
            "title": self.decisions.policy.title,
            "devices": list(self.members),
            "layers": list(self.model.names),
            "server": {name: moving.rate for name, moving in self.measured.server.items()},
            "trainer": "engine",
        }
        self.journal.write_run(status, self.progress, self.ended_by, facts, self.measured.nominal)

    # --- telling people ---

    def _tell_of(self, member: Member) -> None:
        state = "quarantined" if member.quarantined else "away" if member.session is None else "waiting"
        known = self.measured.devices.get(member.number)
        rates = (
            {}
            if known is None
            else {"uplink_bps": known["uplink_bps"].rate, "downlink_bps": known["downlink_bps"].rate}
        )
        self.board.update_device(
            member.name,
            state=state,
            cut=member.cut or None,
            round=member.last_round,
            rounds=member.rounds,
            violations=member.violations,
            last_error=member.last_error,
            **rates,
        )

    def _tell_of_plan(self, block: OpenBlock) -> None:
        cuts = ", ".join(str(block.cuts[k]) for k in block.members)
        if block.rounds:
            self.say(
                f"block {block.number}: rounds {block.first_round} to {block.last_round}, cuts {cuts} "
                f"(version {self.progress.version} of the layers)"
            )
        self.board.update(block=block.number, interval=block.interval, deepest=block.deepest)

    def _tell_of_round(self, block: OpenBlock, phases: dict[str, float]) -> None:
        predicted = sum(block.predicted[phase] for phase in phases)
        self.board.update(
            round=self.progress.rounds,
            round_s=self._round_s,
            predicted_round_s=predicted,
            phases=tuple((phase, block.predicted[phase], seconds) for phase, seconds in phases.items()),
            waiting_for="",
        )
        for member in self.by_number:
            self._tell_of(member)

    def _wait_for(self, what: str) -> None:
        if self.board.status.waiting_for != what:
            self.board.update(waiting_for=what)
            if what != "the devices' layers":
                self.say(f"waiting for {what}")

    # --- small things ---

    def _here(self) -> list[Member]:
        """Return the devices that are connected and ready, in the order of the fleet."""
        return [m for m in self.by_number if m.session is not None]

    async def _enough(self) -> None:
        while len(self._here()) < self.quorum:
            self._wait_for(f"devices: {len(self._here())} of {self.quorum} that are needed")
            await self._change(None)

    def _weight(self, device: int) -> float:
        data = self.recipe.data
        return float(self.by_number[device].samples) if data is not None and data.weights == "size" else 1.0

    def _shares(self, present: Sequence[int]) -> list[float]:
        weights = [self._weight(device) for device in present]
        return [weight / sum(weights) for weight in weights]

    async def _compute(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do some work in the thread that computes; it is done even if the device that it is for leaves meanwhile."""
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments))

    async def _with_fed(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call the fed server, again and again while it is away; `NotNow` if it does not know what we speak of."""
        wait = FIRST_WAIT_S
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                    raise NotNow(str(error.details())) from None
                if error.code() not in PASSING:
                    problem = f"{error.code().name}: {error.details()}"
                    raise InvalidInput("fed server", problem, "Check its log, certificates and recipe") from None
                self._wait_for(f"the fed server ({first_line(Exception(error.details()))})")
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_S)

    def _wake(self) -> None:
        self._changed.set()

    async def _change(self, timeout: float | None) -> bool:
        """Wait until something has happened; return whether it did before the time was over."""
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), timeout)
        except TimeoutError:
            return False
        return True

    def _time_server(self, example: Tensor) -> None:
        """Guess how fast this server is, until the first round tells."""
        times = time_layers(self.model, example, self.terms.batch_size)
        self.measured.server["flops"].add(
            self.terms.batch_size * self.measured.nominal.forward_flops[-1] / max(1e-9, sum(times.forward_s))
        )

    def _shapes(self, model: SplitModel, example: Tensor) -> Shapes:
        """Run the model once to see what its activations look like at every cut."""
        shapes = []
        mode = model.module.training
        model.eval()
        with torch.no_grad():
            x = example
            for piece in model.pieces:
                x = piece(x)
                shapes.append(tuple(x.shape[1:]))
        model.train(mode)
        labels = tuple(shapes[-1][:-1])  # one per output: of a sequence, one per token
        return Shapes(
            tuple(shapes),
            labels,
            self.terms.classes(model, example),
            self.terms.batch_size,
            self.recipe.model.wire_dtype,
        )


def _of_kind(message: wire.FromDevice, kind: str) -> wire.FromDevice:
    if message.WhichOneof("kind") != kind:
        raise BadMessage(f"{message.WhichOneof('kind') or 'nothing'} came, {kind} was expected")
    return message
