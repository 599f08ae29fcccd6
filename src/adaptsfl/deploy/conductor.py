"""Who conducts a run at the edge server: plans, trains the common layers for all devices, waits for nobody for ever.

The life of a block: decide, open the block at the fed server, tell devices their cuts, train I rounds, have all layers
delivered, let them be averaged, note where we are. Whatever stops the server, it goes on from the last such note.
"""

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from adaptsfl.config import Recipe
from adaptsfl.decisions import Decision
from adaptsfl.deploy import wire_pb2 as wire
from adaptsfl.deploy.accounts import Accounts
from adaptsfl.deploy.averaging import Averaging
from adaptsfl.deploy.backend import DeployedBackend, deployed_policy
from adaptsfl.deploy.block import Estimation, OpenBlock, Round, Tests
from adaptsfl.deploy.clock import ALL, BlockClock
from adaptsfl.deploy.edge_model import EdgeModel, Spoilt
from adaptsfl.deploy.fed_client import OTHER_FOLDERS, PatientFed
from adaptsfl.deploy.journal import Journal, Progress
from adaptsfl.deploy.layers_file import LayerStates, Template
from adaptsfl.deploy.probe import measure_link
from adaptsfl.deploy.reestimation import Reestimation
from adaptsfl.deploy.resources import MeasuredFleet
from adaptsfl.deploy.roster import Roster
from adaptsfl.deploy.service import Calls, NotNow
from adaptsfl.deploy.sessions import Member, Session, Shapes
from adaptsfl.deploy.status import Board, Status
from adaptsfl.deploy.tensors import NoNumbers, pack
from adaptsfl.deploy.terms import Terms
from adaptsfl.errors import BadMessage, InvalidInput, TrainingDiverged
from adaptsfl.latency import EDGE_SERVER
from adaptsfl.loading import costs_of
from adaptsfl.runs.backend import Order, Scene, Trained
from adaptsfl.runs.ending import rounds_planned
from adaptsfl.runs.loop import BlockLoop
from adaptsfl.runs.recipe import about_run, check_run, norm_remark, reestimates
from adaptsfl.training.timing import time_layers

FAREWELL_S = 30.0  # for devices that are away when the run ends to come and hear of it
LAST_ATTEMPTS = 3  # to re-estimate the final model's statistics, while servers are restarted or devices fail
PREPARING_S = 90.0  # and for those who are connected, but do not listen while they measure their links
T = TypeVar("T")


class Conductor:
    """Leads a run from its first block to its last.

    Args:
        fed: the fed server.
        folder: for the record and the checkpoint.
        say: called with what people may want to know.

    Attributes:
        board: what people see while it runs.
        block, round, tests: under way; none between two blocks.
        over: what devices are told once it has.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        fed: Calls,
        *,
        say: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self.say = say
        self.terms = Terms.of(recipe)
        self.recipe = recipe = self.terms.recipe
        check_run(self.terms.run)
        self.model, example = self.terms.model()
        self.template = Template(self.model, self.terms.optimizer)
        self.shapes = Shapes.of(self.terms, self.model, example)
        self.edge_model = EdgeModel(
            self.model, self.template, recipe.training.statistics, self.terms.devices, self.terms.floor
        )
        nominal = costs_of(self.model, example, recipe.model, self.terms.batch_size, recipe.training.optimizer)
        self.measured = MeasuredFleet(nominal, self.terms.names, self.terms.batch_size, self.terms.optimizer)
        self._time_server(example)
        self.policy = deployed_policy(self.terms)
        self.backend = DeployedBackend(self, self.terms, self.measured, self.policy)
        self.loop = BlockLoop(self.backend, self.policy)
        self.journal = Journal(folder, self.terms)
        self.progress = Progress(deepest=self.terms.floor)
        planned = rounds_planned(self.terms.run, self.terms.batch_size)
        self.board = Board(Status(recipe.name, time.time(), rounds_planned=planned))
        self.roster = Roster(
            self.terms.names,
            max(1, math.ceil(recipe.deploy.quorum * self.terms.devices)),
            by_size=recipe.data is not None and recipe.data.weights == "size",
            measured=self.measured,
            board=self.board,
            say=say,
        )
        self.fed = PatientFed(fed, self.template, self.roster.wait_for)
        self.accounts = Accounts(self.roster.by_number, self.shapes, self.measured)
        self.averaging = Averaging(
            self.roster,
            self.fed,
            self.accounts,
            own_layers=lambda device, cut: self.compute(self.edge_model.own_states, device, cut),
            deadline_s=lambda: self.recipe.deploy.round_deadline_s,
            blame=self.blame,
            measure_divergence=self.policy.divergence,
        )
        self.reestimates = reestimates(recipe.training, self.model, self.terms.devices)
        self.reestimation = Reestimation(
            self.roster,
            self.fed,
            self.shapes,
            self.edge_model,
            self.compute,
            deadline_s=lambda: self.recipe.deploy.round_deadline_s,
            blame=self.blame,
        )
        self.block: OpenBlock | None = None
        self.round: Round | None = None
        self.tests: Tests | None = None
        self.over = ""
        self._evaluation: tuple[int, float, float] | None = None  # of the model with which the block began
        self._last_cuts: tuple[int, ...] = (self.terms.floor,) * self.terms.devices
        self._before_s = self._began = self._noted = 0.0
        self._common_at_close: LayerStates = {}
        self._admitting = asyncio.Lock()  # devices are let in one by one, and not between two blocks
        self._thread = ThreadPoolExecutor(1, "compute")  # all computing, one call at a time

    @property
    def ended_by(self) -> str:
        """What ended the run; empty while it goes on."""
        return self.loop.ended_by

    # --- telling devices what to do ---

    async def admit(self, session: Session) -> None:
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
            if self.tests is not None and block.estimation is not None and block.estimation.merged:
                session.send(wire.ToDevice(evaluate=wire.Evaluate(attempt=block.attempt)))
            if block.closing:
                session.send(wire.ToDevice(deliver=wire.Deliver(attempt=block.attempt)))

    async def _give_layers(self, member: Member, block: OpenBlock) -> None:
        """Let a device begin with the block's layers; what it did in the block before it was lost counts no more."""
        if self.round is not None:
            self.round.leave_out(member.number)
        for lost in (block.trained, block.delivered, block.delivered_for):
            lost.discard(member.number)
        member.cut, member.answered = block.cuts[member.number], None
        await self.compute(self.edge_model.admit, member.number, member.cut)
        member.attempt = block.attempt

    def _send_plan(self, session: Session, block: OpenBlock) -> None:
        estimation = block.estimation
        plan = wire.Plan(
            attempt=block.attempt,
            block=block.number,
            next_round=self.progress.rounds + 1,
            last_round=block.last_round,
            cut=session.member.cut,
            evaluate=self.tests is not None and estimation is None,
            estimate=estimation.round if estimation is not None and not estimation.closed else 0,
        )
        session.send(wire.ToDevice(plan=plan))

    def send_home(self, session: Session) -> None:
        """Tell a device that the run is over; it ends the connection."""
        session.stopped = True
        session.send(wire.ToDevice(stop=wire.Stop(reason=self.over, done=True)))

    @contextmanager
    def blaming(self, block: OpenBlock, member: Member) -> Iterator[None]:
        """Remember that what a device sent came to no numbers, if it does."""
        try:
            yield
        except NoNumbers:
            self.blame(block, member)
            raise

    def blame(self, block: OpenBlock, member: Member) -> None:
        """Remember that what a device did came to no numbers: if that happens to most, it is the model."""
        block.spoilt.add(member.number)
        spoilt, devices = len(block.spoilt), max(len(block.scene.members), len(self.roster.here()))
        if 2 * spoilt > devices and (spoilt > 1 or self.terms.devices == 1):
            what = f"round {self.progress.rounds + 1}: what {spoilt} of {devices} devices sent came to no numbers"
            remedy = "Lower training.learning_rate, and begin anew in an empty folder"
            self.roster.give_up(TrainingDiverged(f"{what}, so it is the model. {remedy}"))

    # --- conducting ---

    async def run(self) -> str:
        """Train until the recipe's end; return what ended it."""
        if await self._resume():
            self.say("this run is over already")
            await self._say_goodbye(self.roster.by_number, self._how_it_ended())
            return self.ended_by
        self._write_run("running")
        if remark := norm_remark(self.recipe, self.model):
            self.say(remark)
        await self._wait_for_start()
        self._began = time.monotonic()
        to_fed = await self.fed.patiently(lambda: measure_link(self.fed.calls))
        self.measured.server_link(ALL, to_fed_bps=to_fed.uplink, from_fed_bps=to_fed.downlink)
        self._noted = time.perf_counter()
        try:
            await self.backend.beside(self._train_blocks, self.loop.interrupt)
            await self._finish()
        except TrainingDiverged as error:
            self.block = None
            await self._say_goodbye(self.roster.here(), f"it makes no sense any more: {error}")
            raise
        return self.ended_by

    def _train_blocks(self) -> None:
        """Train block after block, and keep each on disk; in the thread of the loop."""
        for block in self.loop:
            self.journal.add(block)
            self.journal.save(self.progress, self._common_at_close)

    async def _wait_for_start(self) -> None:
        """Wait for all devices but those that cannot; after a while for as many as are needed."""
        deadline = time.monotonic() + self.recipe.deploy.start_deadline_s
        while True:
            here = len(self.roster.here())
            able = sum(not (member.gave_up or member.quarantined) for member in self.roster.by_number)
            if here >= self.roster.quorum and (here >= able or time.monotonic() >= deadline):
                return
            self.roster.wait_for(f"devices: {here} of {self.terms.devices} are here")
            await self.roster.change(deadline - time.monotonic() if here >= self.roster.quorum else math.inf)

    async def observe(self) -> Scene:
        """Return who is here, once they are enough, and what was measured of them."""
        await self.roster.enough()
        members = self.roster.here()
        numbers = tuple(member.number for member in members)
        epoch_rounds = max(1, max(member.samples for member in members) // self.terms.batch_size)
        return Scene(numbers, self.measured.fleet(numbers), self.measured.costs, epoch_rounds)

    async def train(self, order: Order, scene: Scene) -> Trained:
        """Train one block of rounds under one decision, and have the layers of devices averaged."""
        since = self.progress.rounds - self.progress.evaluated_at
        evaluate = since >= self.terms.run.evaluate_every
        block = await self._open(order.decision, order.rounds, scene, evaluate=evaluate)
        if block.estimation is not None and not await self.reestimation.carry_out(block, block.first_round):
            self.tests = None
        while self.progress.rounds < block.last_round:
            await self._train_round(block)
        began_s = self.progress.seconds
        await self._close(block)
        rows = () if self._evaluation is None else (self._evaluation,)
        return self.accounts.trained(block, began_s, self.progress.seconds, rows, self.progress.divergence)

    async def _open(self, decision: Decision, rounds: int, scene: Scene, *, evaluate: bool) -> OpenBlock:
        """Open a block at the fed server, place layers, tell devices; they begin at once."""
        assert decision.interval is not None
        planned = dict(zip(scene.members, decision.cuts, strict=True))
        least = min(planned.values())  # for those who come while it runs
        cuts = tuple(planned.get(number, least) for number in range(self.terms.devices))
        deepest, before = max(cuts), self.edge_model.deepest
        attempt = secrets.randbits(63)
        named_cuts = {member.name: cuts[member.number] for member in self.roster.by_number}
        opening = wire.Opening(attempt=attempt, version=self.progress.version, deepest=deepest, cuts=named_cuts)
        brought = self.edge_model.becoming_specific(deepest) if deepest > before else {}
        await self.fed.tell(opening, brought)
        first, last = min(cuts) + 1, max(deepest, before)
        fetched: LayerStates = {}
        clock = BlockClock(self._noted)
        clock.passed(time.perf_counter())
        if first <= last:
            moved = await self.fed.fetch_of(opening, brought, first, last)
            self.measured.server_link(8 * moved.size, from_fed_bps=moved.bps)
            fetched = moved.states
            clock.passed(time.perf_counter(), EDGE_SERVER, b3=ALL)
        block = OpenBlock(
            attempt=attempt,
            number=self.progress.blocks + 1,
            first_round=self.progress.rounds + 1,
            rounds=rounds,
            interval=decision.interval,
            cuts=cuts,
            opening=opening,
            brought=brought,
            scene=scene,
            known=max(deepest, before),
            predicted=self.accounts.predicted(scene, decision.cuts),
            clock=clock,
            estimation=Estimation(self.progress.rounds) if evaluate and self.reestimates else None,
        )
        async with self._admitting:
            await self.compute(self.edge_model.place, deepest, fetched)
            self.tests = Tests(self.progress.rounds) if evaluate else None
            self.block, self.round = block, Round(self.progress.rounds + 1) if rounds else None
            if rounds:
                clock.told(time.perf_counter())
            for member in self.roster.by_number:
                member.attempt = 0
        self._evaluation, self._last_cuts = None, cuts
        self._tell_of_plan(block)
        for member in self.roster.here():
            if member.session is not None:
                await self.admit(member.session)
        return block

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
            weights = self.roster.shares(present)
            labels = {device: current.arrivals[device].labels for device in present}
            try:
                losses, gradients = await self.compute(self.edge_model.train, number, present, labels, weights)
                break
            except Spoilt as error:
                current.closed = False
                for device in {*error.devices, *current.lost}:
                    current.arrivals.pop(device, None)
                for member in [self.roster.by_number[device] for device in error.devices]:
                    self.blame(block, member)
                    if member.session is not None:
                        member.session.close(BadMessage("activations came that lead to no numbers"))
                self.roster.check()
        self.progress.rounds = number
        self.round = Round(number + 1) if number < block.last_round else None
        block.trained = {device for device in present if self.roster.by_number[device].attempt == block.attempt}
        for device, gradient in zip(present, gradients, strict=True):
            self._answer(block, self.roster.by_number[device], number, gradient)
        took = time.perf_counter() - began
        loss = float((losses * losses.new_tensor(weights)).sum())
        self._end_tests()
        turn_s = ALL if everybody else took
        phases, round_s = self.accounts.note_round(block, current, present, loss, began + took, turn_s)
        self.board.add_loss(number, loss)
        self._tell_of_round(block, phases, round_s)

    def _answer(self, block: OpenBlock, member: Member, number: int, gradient: Tensor) -> None:
        member.last_round, member.rounds, member.strikes = number, member.rounds + 1, 0
        if member.attempt != block.attempt:
            return  # it has lost the layers that this is for
        tensor, data = pack(gradient, self.shapes.wire_dtype)
        header = wire.Gradients(round=number, tensor=tensor)
        member.answered, member.answered_bits = (number, (header, data)), 8 * len(data)
        if member.session is not None and member.session.planned == block.attempt:  # else it asks once it has its plan
            member.session.send(wire.ToDevice(gradients=header), data)

    async def _arrivals(self, block: OpenBlock, current: Round) -> bool:
        """Wait until all who are there have sent, or the deadline has passed and enough have.

        Returns whether everybody who was waited for has sent: then what has passed since the last activations came is
        the server's own time.
        """
        deadline = time.monotonic() + self.recipe.deploy.round_deadline_s
        awaited: set[int] = set()
        while True:
            missing = [m for m in self.roster.here() if m.attempt == block.attempt and m.number not in current.arrivals]
            waiting = [m for m in missing if not m.late]
            enough = len(current.arrivals) >= self.roster.quorum
            if enough and (not waiting or time.monotonic() >= deadline):
                if waiting:
                    self.say(f"round {current.number} goes on without {', '.join(m.name for m in waiting)}")
                for member in waiting:
                    member.late = True
                return not waiting and awaited <= set(current.arrivals)
            awaited |= {m.number for m in waiting}
            if not missing:
                self.roster.wait_for(f"devices: {len(current.arrivals)} of {self.roster.quorum} that are needed")
            await self.roster.change(max(0.0, deadline - time.monotonic()) if enough else math.inf)

    async def _close(self, block: OpenBlock) -> None:
        """Have all copies averaged; note where we are."""
        averaged = await self.averaging.close(block)
        self.progress.version, self.progress.divergence = averaged.version, averaged.divergence
        self.progress.deepest = block.deepest
        self.block = None  # whoever comes now is let in with the next one
        self.progress.blocks, self.progress.seconds = block.number, self._elapsed()
        self._noted = time.perf_counter()
        self._common_at_close = self.edge_model.common_states()

    async def _finish(self) -> None:
        """Evaluate once more, put the model together, and send everybody home."""
        for attempt in range(LAST_ATTEMPTS + 1):
            wanted = attempt < LAST_ATTEMPTS
            estimated = wanted and await self._evaluate_last()
            if self.reestimates and not estimated:
                if wanted and len(self.roster.here()) >= self.roster.quorum:
                    continue
                self.say("the model has the devices' averaged statistics of batch-norm: none could be re-estimated")
            common = self._common_at_close
            layers = self.edge_model.estimated(common) if estimated else common
            try:
                await self._hand_over(layers, statistics=estimated)
                break
            except NotNow as error:
                if not estimated:
                    raise InvalidInput("fed server", str(error), OTHER_FOLDERS) from None
                # it was restarted, and has lost the statistics
        self._write_run("done")
        await self._say_goodbye([member for member in self.roster.by_number if member.samples], self._how_it_ended())

    async def _hand_over(self, common: LayerStates, *, statistics: bool) -> None:
        """Let the fed server put the model together."""
        version = self.progress.version
        await self.fed.patiently(lambda: self.fed.finish(version, common, statistics=statistics))

    async def _evaluate_last(self) -> bool:
        """Evaluate the final model, unless that was done; return whether its statistics were re-estimated."""
        untested = self.progress.evaluated_at < self.progress.rounds
        if not (untested or self.reestimates) or not await self.roster.enough(self.recipe.deploy.start_deadline_s):
            return False
        scene = await self.observe()
        cuts = tuple(self._last_cuts[number] for number in scene.members)
        block = await self._open(Decision(cuts, 1), 0, scene, evaluate=True)
        estimated = block.estimation is not None and await self.reestimation.carry_out(block, block.first_round)
        if not untested or (block.estimation is not None and not estimated):
            self.tests = None
        deadline = time.monotonic() + self.recipe.deploy.round_deadline_s
        while self.tests is not None and (left := deadline - time.monotonic()) > 0 and self._untested(block):
            await self.roster.change(left)
        self.roster.check()  # before a model is written that makes no sense
        self._end_tests()
        self.block, block.over = None, True
        if self._evaluation is not None:
            _, accuracy, _ = self._evaluation
            self.loop.evaluated_last(accuracy)
            self.journal.evaluated(*self._evaluation)
        return estimated

    def _how_it_ended(self) -> str:
        return f"{self.ended_by}, {self.progress.rounds} rounds"

    async def _say_goodbye(self, members: Sequence[Member], why: str) -> None:
        """Tell devices that the run is over, also those that are away for a moment."""
        self.over = f"the run is over ({why})"
        for member in self.roster.here():
            if member.session is not None:
                self.send_home(member.session)
        deadline = time.monotonic() + FAREWELL_S
        patient = deadline + PREPARING_S
        while True:
            able = [m for m in self.roster.by_number if not (m.told or m.gave_up or m.quarantined)]
            missing = [m for m in able if m in members or m.newest is not None]
            preparing = any(m.newest is not None for m in missing)
            left = (patient if preparing else deadline) - time.monotonic()
            if not missing or left <= 0:
                return
            away = [m.name for m in missing if m.session is None]
            if away:
                self.roster.wait_for(f"{', '.join(away)} to hear that the run is over")
            await self.roster.change(left)

    def _untested(self, block: OpenBlock) -> bool:
        assert self.tests is not None
        here = self.roster.here()
        left = any(not self.tests.complete(m.number) for m in here if m.attempt == block.attempt)
        return left or len(here) < self.roster.quorum

    def shut_down(self) -> None:
        """Let go of the thread that computes."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    # --- remembering ---

    def _end_tests(self) -> None:
        """Take what the evaluation came to, once training goes on."""
        tests, self.tests = self.tests, None
        result = None if tests is None else tests.result()
        if tests is None or result is None:
            return
        accuracy, loss = result
        self.progress.evaluated_at, self._evaluation = tests.round, (tests.round, accuracy, loss)
        self.board.add_evaluation(tests.round, accuracy)
        self.say(f"round {tests.round}: accuracy {accuracy:.1%} on the devices' test samples")

    def _elapsed(self) -> float:
        return self._before_s + time.monotonic() - self._began

    async def _resume(self) -> bool:
        """Go on from the checkpoint, if there is one; return whether nothing is left to be done."""
        found = self.journal.begin()
        if found is not None:
            self.progress, states, blocks = found
            self._before_s = self.progress.seconds
            self.edge_model.load_common(states, self.progress.deepest)
            if self.journal.done:
                self.loop.ended_by = self.journal.ended_by
                return True
            self.say(f"going on after round {self.progress.rounds}")
            past = [(block, self.backend.scene_of(block)) for block in blocks]
            await self.backend.beside(lambda: self.loop.go_on(past, self.progress.divergence))
            if blocks:
                # The last evaluation of a run is written after its last checkpoint.
                evaluated = [row[0] for row in blocks[-1].evaluations]
                self.progress.evaluated_at = max([self.progress.evaluated_at, *evaluated])
                least = min(cut for cut in blocks[-1].cuts if cut)
                self._last_cuts = tuple(cut or least for cut in blocks[-1].cuts)
        self._common_at_close = self.edge_model.common_states()
        return False

    def _write_run(self, status: str) -> None:
        terms, measured = self.terms, self.measured
        name, recipe = terms.run.policies[0], self.backend.recipe
        info = about_run(recipe, terms.seed, name, self.policy, terms.names, measured.nominal, measured.servers())
        how = {"status": status, "ended_by": self.ended_by, "wall_s": self.progress.seconds, "real": True}
        done = {"rounds": self.progress.rounds} if status == "done" else {}
        self.journal.write_run({**info, **how, **done})

    # --- telling people ---

    def _tell_of_plan(self, block: OpenBlock) -> None:
        if not block.rounds:  # it is only evaluated: nobody has decided on that
            return
        cuts = ", ".join(str(block.cuts[k]) for k in block.scene.members)
        self.say(
            f"block {block.number}: rounds {block.first_round} to {block.last_round}, cuts {cuts} "
            f"(version {self.progress.version} of the layers)"
        )
        self.board.update(block=block.number, interval=block.interval, deepest=block.deepest)

    def _tell_of_round(self, block: OpenBlock, phases: dict[str, float], round_s: float) -> None:
        predicted = sum(block.predicted[phase] for phase in phases)
        before, members, took = self.board.status, self.roster.by_number, max(round_s, 1e-9)
        sent, received = (sum(getattr(m, name) for m in members) for name in ("sent_bytes", "received_bytes"))
        self.board.update(
            sent_bytes=sent,
            received_bytes=received,
            sent_bps=_smoothed(before.sent_bps, 8 * (sent - before.sent_bytes) / took),
            received_bps=_smoothed(before.received_bps, 8 * (received - before.received_bytes) / took),
            round=self.progress.rounds,
            round_s=_smoothed(before.round_s, round_s),
            predicted_round_s=predicted,
            phases=tuple((phase, block.predicted[phase], seconds) for phase, seconds in phases.items()),
            waiting_for="",
        )
        self.roster.tell_of(*members)

    # --- small things ---

    async def compute(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do some work in the thread that computes; it is done even if the device that it is for leaves meanwhile."""
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments))

    def _time_server(self, example: Tensor) -> None:
        """Guess how fast this server is, until the first round tells."""
        times = time_layers(self.model, example, self.terms.batch_size)
        self.measured.server["flops"].add(
            self.terms.batch_size * self.measured.nominal.forward_flops[-1] / max(1e-9, sum(times.forward_s))
        )


def _smoothed(before: float | None, now: float) -> float:
    """Return what people are shown of something that is measured every round."""
    return before + (now - before) / 10 if before else now
