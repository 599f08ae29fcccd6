"""The edge server: it plans, trains the common layers for all devices, and waits for nobody for ever.

The life of a block: decide, open the block at the fed server, tell devices their cuts, train I rounds, have all layers
delivered, let them be averaged, note where we are. Whatever stops the server, it goes on from the last such note.
"""

import asyncio
import json
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np
import torch
from torch import Tensor

import adaptsfl
from adaptsfl import latency
from adaptsfl.config import PlannerConfig, Recipe, RunConfig
from adaptsfl.convergence import ConvergenceModel, model_from
from adaptsfl.deploy import wire_pb2 as wire
from adaptsfl.deploy.edge_model import EdgeModel, Spoilt
from adaptsfl.deploy.fed_client import FedClient
from adaptsfl.deploy.identity import require
from adaptsfl.deploy.layers_file import LayerStates, Template, by_layer, named
from adaptsfl.deploy.probe import time_layers
from adaptsfl.deploy.resources import MeasuredFleet
from adaptsfl.deploy.service import Calls, NotNow, Service
from adaptsfl.deploy.sessions import Arrival, Member, Session, Shapes
from adaptsfl.deploy.status import Board, Status
from adaptsfl.deploy.tensors import pack
from adaptsfl.deploy.terms import PROTOCOL, Terms
from adaptsfl.errors import BadMessage, InvalidInput, NotWritten, TrainingDiverged, first_line
from adaptsfl.files import about_tensors, replace_file, write_tensors
from adaptsfl.fleet import RATES, Fleet
from adaptsfl.latency import PHASES
from adaptsfl.loading import costs_of, inside
from adaptsfl.models import SplitModel
from adaptsfl.policies import Decision, Observation
from adaptsfl.policies.registry import make_policy
from adaptsfl.simulation.beliefs import beliefs_from
from adaptsfl.simulation.folder import RECORD, append_block, write_run
from adaptsfl.simulation.record import Block, block_line, block_of
from adaptsfl.simulation.run import POLICY_STREAM, decided, rates_seen, rounds_planned
from adaptsfl.simulation.world import check_run
from adaptsfl.training.settings import check_trainable

CHECKPOINT = "edge.safetensors"
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 10.0  # between two attempts to reach the fed server
LABELS_PER_SAMPLE: tuple[int, ...] = ()
T = TypeVar("T")


@dataclass
class Round:
    """A round that is open: who has sent what."""

    number: int
    arrivals: dict[int, Arrival] = field(default_factory=dict)


@dataclass
class Tests:
    """An evaluation under way: by device, (right, loss, samples) and how many mini-batches are missing."""

    round: int
    found: dict[int, list[float]] = field(default_factory=dict)
    missing: dict[int, int] = field(default_factory=dict)

    def result(self) -> tuple[float, float] | None:
        """Return accuracy and loss over all samples that came."""
        samples = sum(row[2] for row in self.found.values())
        if not samples:
            return None
        return sum(row[0] for row in self.found.values()) / samples, sum(
            row[1] for row in self.found.values()
        ) / samples


@dataclass
class OpenBlock:
    """The block that is being trained, as the edge server sees it."""

    attempt: int
    number: int
    first_round: int
    rounds: int
    interval: int
    cuts: tuple[int, ...]  # one per device of the fleet, also for those who are away
    opening: wire.Opening
    brought: LayerStates
    members: tuple[int, ...]  # who was there when it was planned
    observed: Fleet
    predicted: dict[str, float]
    evaluate: bool
    closing: bool = False
    delivered: set[int] = field(default_factory=set)
    present: list[tuple[int, ...]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    bits: float = 0.0

    @property
    def last_round(self) -> int:
        """Its last round."""
        return self.first_round + self.rounds - 1

    @property
    def deepest(self) -> int:
        """L_c."""
        return max(self.cuts)


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
        self.terms = Terms.of(recipe)
        self.recipe = recipe = self.terms.recipe
        self.run_config = recipe.run or RunConfig()
        check_run(self.run_config)
        self.folder, self.say = folder, say
        self.model, example = self.terms.model()
        check_trainable(self.model)
        self.template = Template(self.model, self.terms.optimizer)
        self.fed = FedClient(fed, self.template)
        names = [f"device-{k + 1}" for k in range(self.terms.devices)]
        self.members = {name: Member(k, name) for k, name in enumerate(names)}
        self.by_number = list(self.members.values())
        self.shapes = self._shapes(self.model, example)
        self.edge_model = EdgeModel(
            self.model, self.template, recipe.training.statistics, self.terms.devices, self.terms.floor
        )
        nominal = costs_of(self.model, example, recipe.model, self.terms.batch_size, recipe.training.optimizer)
        self.measured = MeasuredFleet(nominal, names, self.terms.batch_size, self.terms.optimizer)
        self._time_server(example)
        self._make_policy()
        self.quorum = max(1, math.ceil(recipe.deploy.quorum * self.terms.devices))
        planned = rounds_planned(self.run_config, self.terms.batch_size)
        self.board = board or Board(Status(recipe.name, time.time(), rounds_planned=planned))
        for name in names:
            self.board.update_device(name)
        self.rounds = self.blocks = self.version = 0
        self.block: OpenBlock | None = None
        self.round: Round | None = None
        self.tests: Tests | None = None
        self.unrecorded: Block | None = None  # the last block, whose evaluation is still to come
        self.evaluated_at = 0
        self.accuracies: list[float] = []
        self.seconds_before = 0.0  # of earlier lives of this server
        self.ended_by = ""
        self.reason = ""
        self._changed = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "compute")  # all computing, one call at a time
        self._plan_left: Decision | None = None
        self._intervals_left = 0
        self._decided_for: tuple[int, ...] = ()
        self._common_at_close: LayerStates = {}
        self._began = self._round_began = 0.0
        self.round_s = 0.0

    # --- being called ---

    async def train(self, requests: AsyncIterator[wire.FromDevice], context: Any) -> AsyncIterator[wire.ToDevice]:
        """Talk with one device for as long as its connection lasts."""
        party = await require(context, "device")
        member = self.members.get(party.name)
        if member is None:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"{party.name} is no device of this run")
            return
        if member.quarantined:
            why = f"{party.name} is shut out: {member.last_error}"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, why)
        if not member.may_join():
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{party.name} connects too often")
        session = Session(member)
        listening = asyncio.create_task(self._listen(session, aiter(requests), party.name))
        try:
            async for message in session.messages():
                yield message
        except BadMessage as error:
            if member.session is session:
                member.violated(str(error))
                self.say(f"{member.name}: {error}" + (" (shut out)" if member.quarantined else ""))
            raise
        finally:
            listening.cancel()
            if member.session is session:
                member.session = None
                self._tell_of(member)
            self._wake()

    async def _listen(self, session: Session, requests: AsyncIterator[wire.FromDevice], name: str) -> None:
        """Take in what a device sends, until it or we end the connection."""
        try:
            hello = _of_kind(await anext(requests), "hello").hello
            if hello.device != name:
                raise BadMessage(f"{name} calls itself {hello.device[:64]!r}")
            if hello.version != PROTOCOL:
                raise NotNow(f"{name} speaks version {hello.version} of the protocol, this server {PROTOCOL}")
            member = session.member
            if member.session is not None:
                member.session.close(NotNow(f"{name} has connected anew"))
            member.session = session
            welcome = wire.Welcome(number=member.number, settings=self.terms.to_json())
            session.send(wire.ToDevice(welcome=welcome))
            ready = _of_kind(await anext(requests), "ready").ready
            if ready.samples < self.terms.batch_size:
                raise BadMessage(f"{name} has {ready.samples} samples, a mini-batch has {self.terms.batch_size}")
            self.measured.ready(member.number, ready)
            member.samples = int(ready.samples)
            if hello.attempt != member.attempt:
                member.attempt = 0
            await self._admit(member)
            self._tell_of(member)
            self._wake()
            while True:
                await self._heed(session, await anext(requests), requests)
        except StopAsyncIteration:
            session.close()
        except Exception as error:
            session.close(error)

    async def _heed(self, session: Session, message: wire.FromDevice, requests: AsyncIterator[wire.FromDevice]) -> None:
        match message.WhichOneof("kind"):
            case "activations":
                await self._take(session, message.activations, requests)
            case "delivered":
                self._take_delivered(session.member, message.delivered)
            case "failure":
                session.member.last_error = message.failure.reason[:500]
                self.say(f"{session.member.name} gave up: {session.member.last_error}")
                session.close()
            case kind:
                raise BadMessage(f"{kind or 'nothing'} came where it had no place")

    async def _take(self, session: Session, told: wire.Activations, requests: AsyncIterator[wire.FromDevice]) -> None:
        """Receive activations, and see what becomes of them."""
        member, block = session.member, self.block
        if block is None or told.attempt != member.attempt or member.attempt != block.attempt:
            await session.discard(told, self.shapes, requests)  # of a block that was closed without it
            return
        self.shapes.check(told, member.cut)
        arrival = await session.receive(told, self.shapes, requests)
        self.measured.device(member.number, uplink_bps=arrival.bps, downlink_bps=told.downlink)
        if told.evaluation:
            await self._test(member, arrival)
            return
        if not block.first_round <= told.round <= block.last_round:
            raise BadMessage(
                f"activations of round {told.round} came in rounds {block.first_round} to {block.last_round}"
            )
        self.measured.computed(member.number, member.cut, told.forward_s, told.backward_s)
        if member.answered is not None and member.answered[0] == told.round:
            header, data = member.answered[1]  # it was trained, and the answer was lost on the way
            session.send(wire.ToDevice(gradients=header), data)
            return
        current = self.round
        if current is None or told.round != current.number:
            following = current.number if current is not None else self.rounds + 1
            if told.round > following:
                raise BadMessage(f"activations of round {told.round} came, before round {following} was trained")
            session.send(wire.ToDevice(skip=wire.Skip(next_round=following)))
            return
        if member.number in current.arrivals:
            return  # sent again over a new connection, before it was answered
        current.arrivals[member.number] = arrival
        member.strikes = 0
        await self._compute(self.edge_model.receive, member.number, arrival.activations)
        self._wake()

    def _take_delivered(self, member: Member, delivered: wire.Delivered) -> None:
        if self.block is not None and self.block.closing and delivered.attempt == self.block.attempt == member.attempt:
            self.block.delivered.add(member.number)
            self.measured.device(
                member.number, fed_uplink_bps=delivered.fed_uplink, fed_downlink_bps=delivered.fed_downlink
            )
            self._wake()

    async def _test(self, member: Member, arrival: Arrival) -> None:
        """Evaluate a mini-batch of a device's test samples, unless training has gone on meanwhile."""
        tests = self.tests
        if tests is None or not 0 < arrival.told.evaluation_batches <= 2**20:
            return
        missing = tests.missing.setdefault(member.number, arrival.told.evaluation_batches)
        if missing <= 0:
            raise BadMessage("more test samples came than were announced")
        found = await self._compute(self.edge_model.evaluate, member.number, arrival.activations, arrival.labels)
        if self.tests is tests:
            row = tests.found.setdefault(member.number, [0.0, 0.0, 0.0])
            tests.found[member.number] = [a + b for a, b in zip(row, found, strict=True)]
            tests.missing[member.number] -= 1
            self._wake()

    async def _admit(self, member: Member) -> None:
        """Tell a device that has come, or come back, what the others are doing."""
        block = self.block
        if block is None or member.session is None:
            return
        if member.attempt != block.attempt:
            member.cut, member.answered = block.cuts[member.number], None
            await self._compute(self.edge_model.admit, member.number, member.cut)
            member.attempt = block.attempt
        self._send_plan(member, block)
        if block.closing:
            member.session.send(wire.ToDevice(deliver=wire.Deliver(attempt=block.attempt)))

    def _send_plan(self, member: Member, block: OpenBlock) -> None:
        if member.session is None:
            return
        plan = wire.Plan(
            attempt=block.attempt,
            block=block.number,
            next_round=self.rounds + 1,
            last_round=block.last_round,
            cut=member.cut,
            evaluate=block.evaluate and self.tests is not None,
        )
        member.session.send(wire.ToDevice(plan=plan))

    # --- conducting ---

    async def run(self) -> str:
        """Train until the recipe's end; return what ended it."""
        self._resume()
        self._write_run("running")
        self._began = time.monotonic()
        await self._wait_for_start()
        while not self.ended_by:
            await self._block()
        await self._finish()
        return self.ended_by

    async def _wait_for_start(self) -> None:
        """Wait for all devices; after a while for as many as are needed."""
        deadline = time.monotonic() + self.recipe.deploy.start_deadline_s
        while True:
            here = len(self._here())
            if here == self.terms.devices or (here >= self.quorum and time.monotonic() >= deadline):
                return
            self._wait_for(f"devices: {here} of {self.terms.devices} are here")
            await self._change(deadline - time.monotonic() if here >= self.quorum else None)

    async def _block(self) -> None:
        """One block of rounds under one plan, and the averaging at its end."""
        await self._enough()
        decision, numbers, observed = self._decide()
        assert decision.plan.interval is not None
        left = self._rounds_left()
        rounds = decision.plan.interval if left is None else min(decision.plan.interval, left)
        evaluate = self.rounds > 0 and self.rounds - self.evaluated_at >= self.run_config.evaluate_every
        block = self.block = await self._open(decision, numbers, observed, rounds, evaluate=evaluate)
        while self.rounds < block.last_round:
            await self._train_round(block)
        await self._close(block)

    async def _open(
        self, decision: Decision, numbers: Sequence[int], observed: Fleet, rounds: int, *, evaluate: bool
    ) -> OpenBlock:
        """Open a block at the fed server, place the layers and tell devices; they begin at once."""
        planned = dict(zip(numbers, decision.plan.cuts, strict=True))
        least = min(planned.values())  # for those who come while it runs
        cuts = tuple(planned.get(number, least) for number in range(self.terms.devices))
        deepest, before = max(cuts), self.edge_model.deepest
        attempt = secrets.randbits(63)
        named_cuts = {member.name: cuts[member.number] for member in self.by_number}
        opening = wire.Opening(attempt=attempt, version=self.version, deepest=deepest, cuts=named_cuts)
        brought = self.edge_model.becoming_specific(deepest) if deepest > before else {}
        await self._with_fed(lambda: self.fed.open(opening, before + 1, brought))
        first, last = min(cuts) + 1, max(deepest, before)
        fetched: LayerStates = {}
        if first <= last:
            moved = await self._fetch(opening, before + 1, brought, first, last)
            fetched = moved
        self.block, self.round = None, None
        await self._compute(self.edge_model.place, deepest, fetched)
        self.tests = Tests(self.rounds) if evaluate else None
        block = OpenBlock(
            attempt,
            self.blocks + 1,
            self.rounds + 1,
            rounds,
            decision.plan.interval or rounds,
            cuts,
            opening,
            brought,
            tuple(numbers),
            observed,
            self._predicted(observed, [planned[number] for number in numbers]),
            evaluate,
        )
        self.block = block
        if rounds:
            self.round = Round(self.rounds + 1)
            self._round_began = time.perf_counter()
        for member in self._here():
            member.attempt = 0
            await self._admit(member)
        self._tell_of_plan(block)
        return block

    async def _fetch(
        self, opening: wire.Opening, first_brought: int, brought: LayerStates, first: int, last: int
    ) -> LayerStates:
        """Fetch averaged layers; a fed server that was restarted meanwhile is told of the block again."""
        while True:
            try:
                moved = await self._with_fed(lambda: self.fed.fetch(opening.attempt, first, last))
                self.measured.server["from_fed_bps"].add(moved.bps)
                return moved.states
            except NotNow:
                await self._with_fed(lambda: self.fed.open(opening, first_brought, brought))

    async def _train_round(self, block: OpenBlock) -> None:
        """Wait for activations, train, answer."""
        number = self.rounds + 1
        if self.round is None or self.round.number != number:
            self.round = Round(number)
        current = self.round
        while True:
            await self._arrivals(block, current)
            present = tuple(sorted(current.arrivals))
            began = time.perf_counter()
            weights = self._shares(present)
            labels = {device: current.arrivals[device].labels for device in present}
            try:
                losses, gradients = await self._compute(self.edge_model.train, present, labels, weights)
                break
            except Spoilt as error:
                for device in error.devices:
                    del current.arrivals[device]
                    session = self.by_number[device].session
                    if session is not None:
                        session.close(BadMessage("activations came that lead to no numbers"))
        took = time.perf_counter() - began
        self.rounds = number
        self.round = Round(number + 1) if number < block.last_round else None
        for device, gradient in zip(present, gradients, strict=True):
            self._answer(self.by_number[device], number, gradient)
        loss = float((losses * losses.new_tensor(weights)).sum())
        self._end_tests()
        self._note_round(block, current, present, loss, took)

    def _answer(self, member: Member, number: int, gradient: Tensor) -> None:
        tensor, data = pack(gradient, self.shapes.wire_dtype)
        header = wire.Gradients(round=number, tensor=tensor)
        member.answered = number, (header, data)
        member.last_round, member.rounds = number, member.rounds + 1
        if member.session is not None:
            member.session.send(wire.ToDevice(gradients=header), data)

    async def _arrivals(self, block: OpenBlock, current: Round) -> None:
        """Wait until all who are there have sent, or the deadline has passed and enough have."""
        deadline = time.monotonic() + self.recipe.deploy.round_deadline_s
        while True:
            waiting = [m for m in self._here() if m.attempt == block.attempt and m.number not in current.arrivals]
            enough = len(current.arrivals) >= self.quorum
            if enough and (not waiting or time.monotonic() >= deadline):
                if waiting:
                    self.say(f"round {current.number} goes on without {', '.join(m.name for m in waiting)}")
                return
            if not waiting:
                self._wait_for(f"devices: {len(current.arrivals)} of {self.quorum} that are needed")
            await self._change(max(0.0, deadline - time.monotonic()) if enough else None)

    async def _close(self, block: OpenBlock) -> None:
        """Have all copies delivered and averaged; note where we are."""
        began = time.perf_counter()
        block.closing = True
        self._wait_for("the devices' layers")
        for member in self._here():
            if member.session is not None and member.attempt == block.attempt:
                member.session.send(wire.ToDevice(deliver=wire.Deliver(attempt=block.attempt)))
        ours: set[int] = set()
        uploaded = began
        while True:
            try:
                await self._deliveries(block)
                uploaded = time.perf_counter()
                for device in sorted(block.delivered - ours):
                    await self._deliver_own(block, device)
                    ours.add(device)
                weights = {self.by_number[k].name: self._weight(k) for k in sorted(block.delivered)}
                closed = await self._with_fed(lambda w=weights: self.fed.close(block.attempt, w))
                if not closed.missing:
                    break
                block.delivered -= {self.members[name].number for name in closed.missing if name in self.members}
            except NotNow:  # the fed server was restarted: it knows nothing of this block any more
                first = self.edge_model.deepest + 1 - len(block.brought)
                await self._with_fed(lambda f=first: self.fed.open(block.opening, f, block.brought))
                ours.clear()
                block.delivered.clear()
            for member in self._here():
                if member.number not in block.delivered and member.session is not None:
                    member.session.send(wire.ToDevice(deliver=wire.Deliver(attempt=block.attempt)))
        self.version = closed.version
        block.seconds["b1"] += uploaded - began
        block.seconds["b2"] += time.perf_counter() - uploaded
        if block.rounds:
            self._note_block(block)
        self._save()
        self._intervals_left -= 1

    async def _deliveries(self, block: OpenBlock) -> None:
        """Wait until those who are there have delivered; after the deadline until enough have."""
        deadline = time.monotonic() + self.recipe.deploy.round_deadline_s
        last = set(block.present[-1]) if block.present else set()
        while True:
            here = {m.number for m in self._here() if m.attempt == block.attempt}
            # Those who took part in the last round count; if too few of them are left, whoever is here.
            counted = here & last if len(here & last) >= self.quorum or not last else here
            done = block.delivered & (counted if len(counted) >= self.quorum else here)
            if len(done) >= self.quorum and (done >= counted or time.monotonic() >= deadline):
                block.delivered = done
                return
            await self._change(max(0.0, deadline - time.monotonic()) if len(done) >= self.quorum else None)

    async def _deliver_own(self, block: OpenBlock, device: int) -> None:
        """Take a device's layers above its cut to the fed server."""
        member = self.by_number[device]
        states = await self._compute(self.edge_model.own_states, device, member.cut)
        if states:
            moved = await self._with_fed(lambda: self.fed.deliver(block.attempt, member.name, states))
            self.measured.server["to_fed_bps"].add(moved.bps)

    async def _finish(self) -> None:
        """Evaluate once more, put the model together, and send everybody home."""
        if self.evaluated_at < self.rounds:
            decision, numbers, observed = self._decide()
            block = await self._open(decision, numbers, observed, 0, evaluate=True)
            deadline = time.monotonic() + self.recipe.deploy.round_deadline_s
            while (left := deadline - time.monotonic()) > 0 and self._untested(block):
                await self._change(left)
            self._end_tests()
            self.block = None
            # The layers that this plan moved to devices are not moved back: the fed server has them all.
            common = {n: s for n, s in self._common_at_close.items()}
        else:
            common = self._common_at_close
        self._flush_record()
        await self._with_fed(lambda: self.fed.finish(self.version, common))
        self._write_run("done")
        for member in self._here():
            if member.session is not None:
                reason = f"the run is over ({self.ended_by}, {self.rounds} rounds)"
                member.session.send(wire.ToDevice(stop=wire.Stop(reason=reason, done=True)))
                member.session.close()

    def _untested(self, block: OpenBlock) -> bool:
        assert self.tests is not None
        return any(self.tests.missing.get(m.number, 1) > 0 for m in self._here() if m.attempt == block.attempt)

    def shut_down(self) -> None:
        """Let go of the thread that computes."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    # --- deciding ---

    def _make_policy(self) -> None:
        recipe, run = self.recipe, self.run_config
        name = run.policies[0]
        self.policy_name = name
        self.policy = make_policy(name, **run.options.get(name, {}))
        if len(run.policies) > 1:
            raise InvalidInput("run.policies", f"names {len(run.policies)}", "A deployment follows one: give one")
        if self.policy.trainer != "engine":
            problem = f"{name} trains devices in turns, or without them"
            raise InvalidInput("run.policies", problem, "Give one that trains all devices at once, such as adaptsfl")
        adapt = recipe.adapt.model_copy(update=dict(self.policy.adapt))
        self.beliefs = beliefs_from(recipe, adapt, self.model.layers)
        given = recipe.planner
        allowed = [cut for cut in given.allowed_cuts or range(1, self.model.layers + 1) if cut >= self.terms.floor]
        self.limits: PlannerConfig = given.model_copy(update={"allowed_cuts": allowed})

    def _decide(self) -> tuple[Decision, tuple[int, ...], Fleet]:
        """Ask the policy, or go on with its plan while that lasts and the same devices are here."""
        numbers = tuple(member.number for member in self._here())
        fleet = self.measured.fleet(numbers)
        if self._plan_left is not None and self._intervals_left > 0 and numbers == self._decided_for:
            return self._plan_left, numbers, fleet
        everybody = len(numbers) == self.terms.devices
        costs = self.measured.costs
        seen = Observation(
            round=self.rounds,
            block=self.blocks,
            fleet=fleet,
            costs=costs,
            batch_size=self.terms.batch_size,
            convergence=self._convergence(len(numbers)),
            epoch_rounds=max(1, max(m.samples for m in self._here()) // self.terms.batch_size),
            rng=np.random.default_rng([self.terms.seed, POLICY_STREAM, self.blocks]),
            limits=self.limits,
            present=() if everybody else numbers,
            trusted_interval=self.beliefs.trusted_interval,
        )
        decision = decided(self.policy, seen)
        decision.check(len(numbers), costs.layers)
        self._check_decision(decision)
        interval = decision.plan.interval
        assert interval is not None
        self._plan_left, self._intervals_left, self._decided_for = decision, decision.length // interval, numbers
        return decision, numbers, fleet

    def _check_decision(self, decision: Decision) -> None:
        plan = decision.plan
        if plan.interval is None or plan.layer_intervals or decision.placed is not None:
            problem = f"{self.policy.title} averages some layers at other times than others, or never"
            raise InvalidInput("run.policies", problem, "A deployment averages all client-specific layers together")
        if min(plan.cuts) < self.terms.floor:
            problem = f"is {self.terms.floor}, but {self.policy.title} cuts at {min(plan.cuts)}"
            raise InvalidInput("deploy.cut_floor", problem, "Lower it, or give cuts from it on")

    def _convergence(self, devices: int) -> ConvergenceModel:
        """Return what is believed about convergence: what the recipe gives, or the priors of calibration."""
        given = self.recipe.convergence
        if given is None:
            return self.beliefs.model(devices)
        with inside("convergence"):
            return model_from(given, self.recipe.training.learning_rate, devices, self.model.layers)

    def _predicted(self, fleet: Fleet, cuts: Sequence[int]) -> dict[str, float]:
        """Return the seconds of every phase of one round, and of one averaging, as the latency model has them."""
        times = latency.phase_times(self.measured.costs, fleet, np.array(cuts), self.terms.batch_size)
        return {time_.phase: time_.seconds for time_ in times}

    # --- remembering ---

    def _note_round(self, block: OpenBlock, current: Round, present: tuple[int, ...], loss: float, took: float) -> None:
        """Account for one round: who held it up, how long each phase took."""
        now = time.perf_counter()
        block.present.append(present)
        block.losses.append(loss)
        if not math.isfinite(loss):
            raise TrainingDiverged(f"round {current.number}: the loss is {loss}. Lower the learning rate.")
        cuts = [block.cuts[device] for device in present]
        self.measured.server_took(cuts, took)
        slowest = max(current.arrivals.values(), key=lambda arrival: arrival.told.forward_s)
        bits = {k: 8 * self.shapes.size(self.by_number[k].cut) for k in present}
        fleet = self.measured
        phases = {
            "a1": slowest.told.forward_s,
            "a2": max(bits[k] / fleet.devices[k]["uplink_bps"].rate for k in present),
            "a3": took,
            "a4": max(bits[k] / fleet.devices[k]["downlink_bps"].rate for k in present),
            "a5": max(arrival.told.backward_s for arrival in current.arrivals.values()),
        }
        for phase, seconds in phases.items():
            block.seconds[phase] += seconds
        block.bits += 2 * sum(bits.values())
        self.round_s = now - self._round_began
        self._round_began = now
        self.board.add_loss(current.number, loss)
        self._tell_of_round(block, phases)

    def _note_block(self, block: OpenBlock) -> None:
        """Make the record's line of a block; it is written when the evaluation after it is known."""
        self._flush_record()
        self.blocks = block.number
        members = sorted({device for present in block.present for device in present})
        cuts = [block.cuts[k] if k in members else 0 for k in range(self.terms.devices)]
        slowest = max(block.seconds, key=lambda phase: block.seconds[phase])
        everybody = all(len(present) == self.terms.devices for present in block.present)
        predicted = block.rounds * sum(block.predicted[p] for p in PHASES if p.startswith("a"))
        predicted += sum(block.predicted[p] for p in PHASES if p.startswith("b"))
        self.unrecorded = Block(
            block=block.number,
            first_round=block.first_round,
            rounds=block.rounds,
            time_s=self._elapsed(),
            interval=block.interval,
            cuts=tuple(cuts),
            deepest=block.deepest,
            layer_intervals={},
            seconds=dict(block.seconds),
            bottleneck=(self._bottleneck(block, slowest), slowest),
            bits=block.bits,
            loss=float(np.mean(block.losses)),
            evaluations=(),
            estimates={"predicted": block.predicted},
            resources=rates_seen(block.observed, block.members, self.terms.devices),
            predicted_s=predicted,
            present=None if everybody else tuple(block.present),
        )
        self.ended_by = self._end()
        self._common_at_close = self.edge_model.common_states()

    def _bottleneck(self, block: OpenBlock, phase: str) -> str:
        times = latency.phase_times(
            self.measured.costs,
            block.observed,
            np.array([block.cuts[k] for k in block.members]),
            self.terms.batch_size,
        )
        return next(time_.bottleneck for time_ in times if time_.phase == phase)

    def _end_tests(self) -> None:
        """Take what the evaluation came to, once training goes on."""
        tests, self.tests = self.tests, None
        if tests is None:
            return
        result = tests.result()
        if result is None:
            return
        accuracy, loss = result
        self.evaluated_at = tests.round
        self.accuracies.append(accuracy)
        self.board.add_evaluation(tests.round, accuracy)
        self.say(f"round {tests.round}: accuracy {accuracy:.1%} on the devices' test samples")
        if self.unrecorded is not None:
            row = (tests.round, self.unrecorded.time_s, accuracy, loss)
            self.unrecorded = _with_evaluation(self.unrecorded, row)
        goal = self.run_config.target_accuracy
        if goal is not None and accuracy >= goal:
            self.ended_by = "target"

    def _flush_record(self) -> None:
        if self.unrecorded is not None:
            with (self.folder / RECORD).open("a", encoding="utf-8") as file:
                append_block(file, self.unrecorded)
            self.unrecorded = None

    def _end(self) -> str:
        run = self.run_config
        if run.rounds is not None and self.rounds >= run.rounds:
            return "rounds"
        if run.samples is not None and self.rounds * self.terms.batch_size >= run.samples:
            return "samples"
        if run.seconds is not None and self._elapsed() >= run.seconds:
            return "seconds"
        return self.ended_by

    def _rounds_left(self) -> int | None:
        planned = rounds_planned(self.run_config, self.terms.batch_size)
        return None if planned is None else planned - self.rounds

    def _elapsed(self) -> float:
        return self.seconds_before + time.monotonic() - self._began

    def _save(self) -> None:
        """Write the checkpoint: all that a restarted server needs, in one file that is there whole or not at all."""
        about = {
            "terms": self.terms.to_json(),
            "rounds": self.rounds,
            "blocks": self.blocks,
            "version": self.version,
            "deepest": self.edge_model.deepest,
            "evaluated_at": self.evaluated_at,
            "seconds": self._elapsed(),
            "unrecorded": None if self.unrecorded is None else block_line(self.unrecorded),
        }
        tensors = named(self.edge_model.common_states()) or {"0.nothing": torch.zeros(1)}
        try:
            replace_file(
                self.folder / CHECKPOINT, lambda path: write_tensors(path, tensors, {"state": json.dumps(about)})
            )
        except OSError as error:
            raise NotWritten(
                f"{self.folder}: the checkpoint cannot be written ({first_line(error)}). Free some space; the older "
                "one is still there, and the run goes on from it."
            ) from error

    def _resume(self) -> None:
        """Go on from the checkpoint, if there is one."""
        place = self.folder / CHECKPOINT
        self.folder.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            (self.folder / RECORD).unlink(missing_ok=True)
            return
        from safetensors.torch import load_file  # noqa: PLC0415

        try:
            about = json.loads(about_tensors(place)["state"])
            states = by_layer(load_file(place))
        except (KeyError, ValueError, OSError) as error:
            problem = f"cannot be read ({first_line(error)})"
            raise InvalidInput("checkpoint", problem, "Begin anew in an empty folder", source=str(place)) from None
        if about["terms"] != self.terms.to_json():
            problem = "is of a run with another recipe"
            raise InvalidInput("checkpoint", problem, "Give a folder of its own to every run", source=str(place))
        states.pop(0, None)
        self.rounds, self.blocks, self.version = about["rounds"], about["blocks"], about["version"]
        self.evaluated_at, self.seconds_before = about["evaluated_at"], about["seconds"]
        self.edge_model.load_common(states, about["deepest"])
        self._common_at_close = self.edge_model.common_states()
        if about["unrecorded"] is not None:
            self.unrecorded = block_of(json.loads(about["unrecorded"]))
        self._keep_record()
        self.ended_by = self._end_after_resume()
        self.say(f"going on after round {self.rounds}")

    def _end_after_resume(self) -> str:
        self._began = time.monotonic()
        return self._end()

    def _keep_record(self) -> None:
        """Remove lines of blocks that are trained again."""
        record = self.folder / RECORD
        done = self.unrecorded.first_round if self.unrecorded is not None else self.rounds + 1
        lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
        kept = [line for line in lines if json.loads(line)["first_round"] < done]
        replace_file(record, lambda path: path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8"))

    def _write_run(self, status: str) -> None:
        run = self.run_config
        write_run(
            self.folder,
            {
                "name": self.recipe.name,
                "policy": self.policy_name,
                "title": self.policy.title,
                "seed": self.terms.seed,
                "recipe": self.recipe.model_dump(mode="json"),
                "versions": {"adaptsfl": adaptsfl.__version__, "torch": torch.__version__},
                "devices": list(self.members),
                "layers": list(self.model.names),
                "batch_size": self.terms.batch_size,
                "costs": {k: v for k, v in _costs_data(self.measured.nominal).items()},
                "server": {name: moving.rate for name, moving in self.measured.server.items()},
                "targets": run.targets,
                "status": status,
                "ended_by": self.ended_by,
                "wall_s": self._elapsed() if hasattr(self, "_began") else 0.0,
                "trainer": "engine",
                "rounds": self.rounds if status == "done" else None,
            },
        )

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
                f"(version {self.version} of the layers)"
            )
        self.board.update(block=block.number, interval=block.interval, deepest=block.deepest)

    def _tell_of_round(self, block: OpenBlock, phases: dict[str, float]) -> None:
        predicted = sum(block.predicted[phase] for phase in phases)
        self.board.update(
            round=self.rounds,
            round_s=self.round_s,
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
        return [m for m in self.by_number if m.session is not None and m.samples and m.number in self.measured.devices]

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
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def _with_fed(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call the fed server, again and again while it is away; `NotNow` if it does not know what we speak of."""
        wait = FIRST_WAIT_S
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                    raise NotNow(str(error.details())) from None
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    problem = f"{error.code().name}: {error.details()}"
                    raise InvalidInput("fed server", problem, "Check its log, certificates and recipe") from None
                self._wait_for(f"the fed server ({first_line(Exception(error.details()))})")
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_S)

    def _wake(self) -> None:
        self._changed.set()

    async def _change(self, timeout: float | None) -> None:
        """Wait until something has happened, or the time is over."""
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), timeout)
        except TimeoutError:
            pass

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


def _with_evaluation(block: Block, row: tuple[int, float, float, float]) -> Block:
    from dataclasses import replace  # noqa: PLC0415

    return replace(block, evaluations=(*block.evaluations, row))


def _costs_data(costs: Any) -> dict[str, Any]:
    from dataclasses import asdict  # noqa: PLC0415

    return {k: v for k, v in asdict(costs).items() if k != "names" and v is not None}
