"""Conducts a run at the edge server: plans, opens blocks, has them trained and averaged, records their results.

The life of a block: decide, open the block at the fed server, hand it to the protocol, which trains I rounds and
has all layers averaged; then write a checkpoint, while the next block begins. A restarted server resumes from the last
checkpoint.
"""

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from adaptsfl.config import Recipe
from adaptsfl.decisions import Decision
from adaptsfl.deploy import wire_pb2 as wire
from adaptsfl.deploy.layers_file import LayerStates, Template, copied
from adaptsfl.deploy.parties.edge.accounts import Accounts
from adaptsfl.deploy.parties.edge.backend import DeployedBackend, deployed_policy
from adaptsfl.deploy.parties.edge.clock import ALL, BlockClock
from adaptsfl.deploy.parties.edge.executor import Executor
from adaptsfl.deploy.parties.edge.journal import Journal, RunProgress
from adaptsfl.deploy.parties.edge.ledger import Ledger
from adaptsfl.deploy.parties.edge.model import EdgeModel
from adaptsfl.deploy.parties.edge.resources import MeasuredFleet, passes
from adaptsfl.deploy.parties.edge.roster import Roster
from adaptsfl.deploy.parties.edge.sessions import WHOLE, Shapes
from adaptsfl.deploy.parties.fed.client import OTHER_FOLDERS, RetryingFedClient
from adaptsfl.deploy.parties.passes import time_passes
from adaptsfl.deploy.parties.probe import measure_link
from adaptsfl.deploy.protocol import EdgeProtocol
from adaptsfl.deploy.protocol.events import BlockOpened, RunOver
from adaptsfl.deploy.protocol.state import Rules
from adaptsfl.deploy.sending import Sending
from adaptsfl.deploy.service import Calls, NotNow
from adaptsfl.deploy.status.board import Board, Status
from adaptsfl.deploy.terms import Terms
from adaptsfl.errors import InvalidInput, TrainingDiverged
from adaptsfl.latency import FED_SERVER
from adaptsfl.loading import costs_of
from adaptsfl.runs.backend import Order, Scene, Trained
from adaptsfl.runs.ending import rounds_planned
from adaptsfl.runs.loop import BlockLoop
from adaptsfl.runs.recipe import about_run, check_run, norm_remark, reestimates
from adaptsfl.runs.record import Block
from adaptsfl.training.batchnorm import mixes_samples

SHUTDOWN_S = 30.0  # for devices that are disconnected when the run ends to reconnect and be informed
LAST_ATTEMPTS = 3  # to re-estimate the final model's statistics, while servers are restarted or devices fail
MESSAGES_S = 1e-3  # the first guess of what activations and gradients of one device cost the edge server, of any size
PREPARING_S = 90.0  # more for devices that are connected, but read no messages while they measure their links


class Conductor:
    """Leads a run from its first block to its last.

    Args:
        fed: the fed server.
        folder: the folder of the record and the checkpoint.
        say: called with every line for the log.

    Attributes:
        board: the status that people see while it runs.
        protocol: the connected devices, and the state of the block under way.
        executor: carries out the protocol's actions.
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
        self.terms = terms = Terms.of(recipe)
        self.recipe = recipe = terms.recipe
        check_run(terms.run)
        self.model, example = terms.model()
        self.template = Template(self.model, terms.optimizer)
        self.shapes = Shapes.of(terms, self.model, example)
        self.edge_model = EdgeModel(self.model, self.template, recipe.training.statistics, terms.devices, terms.floor)
        self.measured = self._measured(example)
        self.policy = deployed_policy(terms)
        mixes = mixes_samples(self.model.pieces)
        self.backend = DeployedBackend(self, terms, self.measured, self.policy, mixes_samples=mixes)
        self.loop = BlockLoop(self.backend, self.policy)
        self.journal = Journal(folder, terms)
        planned = rounds_planned(terms.run, terms.batch_size)
        self.board = Board(Status(recipe.name, time.time(), rounds_planned=planned))
        quorum = max(1, math.ceil(recipe.deploy.quorum * terms.devices))
        self.protocol = EdgeProtocol(terms.names, Rules(quorum, recipe.deploy.round_deadline_s))
        by_size = recipe.data is not None and recipe.data.weights == "size"
        self.roster = Roster(self.protocol, by_size=by_size, board=self.board, say=say)
        self.fed = RetryingFedClient(fed, self.template, self.roster.wait_for)
        self.accounts = Accounts(terms.names, self.shapes, self.measured)
        settings, apart = terms.to_json(), self.policy.divergence
        self.executor = Executor(
            self.roster, self.edge_model, self.fed, self.accounts, settings, measure_divergence=apart
        )
        self.progress = RunProgress(deepest=terms.floor)
        self.reestimates = reestimates(recipe.training, self.model, terms.devices)
        self._last_cuts: tuple[int, ...] = (terms.floor,) * terms.devices
        self._last_wire: str = recipe.model.usual_wire_dtype
        self._before_s = self._began = self._noted = 0.0
        self._common_at_close: LayerStates = {}
        self._keeping: Future[None] | None = None
        self.executor.averaging.kept = self._kept

    @property
    def progress(self) -> RunProgress:
        """The progress of the run."""
        return self.executor.progress

    @progress.setter
    def progress(self, progress: RunProgress) -> None:
        self.executor.progress = progress

    @property
    def ended_by(self) -> str:
        """What ended the run; empty while it goes on."""
        return self.loop.ended_by

    # --- conducting ---

    async def run(self) -> str:
        """Train until the recipe's end; return what ended it."""
        if await self._resume():
            self.say("this run is over already")
            await self._announce_end(range(self.terms.devices), self._how_it_ended())
            return self.ended_by
        self._write_run("running")
        if remark := norm_remark(self.recipe, self.model):
            self.say(remark)
        await self._wait_for_start()
        self._began = time.monotonic()
        to_fed = await self.fed.retry(lambda: measure_link(self.fed.calls))
        self.measured.server_probed(to_fed.uplink, to_fed.downlink, to_fed.uplink_s, to_fed.downlink_s)
        self._noted = time.perf_counter()
        try:
            await self.backend.beside(self._train_blocks, self.loop.interrupt)
            await self._finish()
        except TrainingDiverged as error:
            here = [device.number for device in self.protocol.here()]
            await self._announce_end(here, f"training has failed: {error}")
            raise
        return self.ended_by

    def _train_blocks(self) -> None:
        """Train block after block, and keep each on disk while the next one begins; in the thread of the loop."""
        with ThreadPoolExecutor(1, "disk") as disk:
            for block in self.loop:
                self._keeping = disk.submit(self._keep, block, replace(self.progress), copied(self._common_at_close))
            if self._keeping is not None:
                self._keeping.result()

    def _keep(self, block: Block, progress: RunProgress, common: LayerStates) -> None:
        """Write a block's line and the checkpoint after it; in the thread of the disk."""
        self.journal.add(block)
        self.journal.save(progress, common)

    async def _kept(self) -> None:
        """Wait until the last block is on disk; raise the error if it could not be written."""
        if self._keeping is not None:
            await asyncio.wrap_future(self._keeping)

    async def _wait_for_start(self) -> None:
        """Wait for all devices that can take part; after the start deadline, for a quorum."""
        deadline = time.monotonic() + self.recipe.deploy.start_deadline_s
        while not self.protocol.may_start(time.monotonic(), deadline):
            self.roster.wait_for(f"devices: {len(self.protocol.here())} of {self.terms.devices} are here")
            await self.roster.change(deadline - time.monotonic() if self.protocol.enough() else math.inf)

    async def observe(self) -> Scene:
        """Return the connected devices, once they are enough, and their measured resources."""
        await self.roster.enough()
        members = self.protocol.here()
        numbers = tuple(member.number for member in members)
        epoch_rounds = max(1, max(member.samples for member in members) // self.terms.batch_size)
        return Scene(numbers, self.measured.fleet(numbers), self.measured.costs, epoch_rounds)

    async def train(self, order: Order, scene: Scene) -> Trained:
        """Train one block of rounds under one decision, and have the layers of devices averaged."""
        since = self.progress.rounds - self.progress.evaluated_at
        evaluate = since >= self.terms.run.evaluate_every
        block = await self._opened(order, scene)
        began_s = self.progress.seconds
        self._show_plan(block)
        self.board.update_beliefs(order.estimates, scene.fleet)
        await self._carry_out(block, evaluate=evaluate)
        self._note(block)
        self.board.update_phases(block.predicted, {phase: block.clock.seconds[phase] for phase in ("b1", "b2", "b3")})
        return self.accounts.trained(block, began_s, self.progress.seconds)

    async def _opened(self, order: Order, scene: Scene) -> Ledger:
        """Open a block at the fed server."""
        decision, sending = order.decision, self._sending(order)
        assert decision.interval is not None
        planned = dict(zip(scene.members, decision.cuts, strict=True))
        least = min(planned.values())  # for devices that join while it runs
        cuts = tuple(planned.get(number, least) for number in range(self.terms.devices))
        deepest, before = max(cuts), self.edge_model.deepest
        opening = wire.Opening(
            attempt=secrets.randbits(63),
            version=self.progress.version,
            deepest=deepest,
            cuts=dict(zip(self.terms.names, cuts, strict=True)),
        )
        brought = self.edge_model.becoming_specific(deepest) if deepest > before else {}
        clock = BlockClock(self._noted)
        clock.passed(time.perf_counter())
        await self.fed.open_block(opening, brought)
        opened = clock.passed(time.perf_counter(), FED_SERVER, b2=ALL)
        block = Ledger(
            attempt=opening.attempt,
            number=self.progress.blocks + 1,
            first_round=order.first_round,
            rounds=order.rounds,
            interval=decision.interval,
            cuts=cuts,
            opening=opening,
            brought=brought,
            scene=scene,
            known=max(deepest, before),
            predicted=self.accounts.predicted(scene, decision.cuts, sending),
            clock=clock,
            opened_s=opened["b2"],
            sending=sending,
            compared=order.compared,
        )
        if order.compared:
            block.predicted_first = self.accounts.predicted(scene, decision.cuts, WHOLE)
        self._last_cuts, self._last_wire = cuts, sending.wire_dtype
        return block

    def _sending(self, order: Order) -> Sending:
        """Return how the activations and gradients of a block are sent."""
        decision = order.decision
        wire_dtype = decision.wire_dtype or self.recipe.model.usual_wire_dtype
        return Sending(decision.micro_batches, wire_dtype, order.first_round if order.compared else 0)

    async def _carry_out(self, block: Ledger, *, evaluate: bool, result_wanted: bool = True) -> None:
        """Run a block by the protocol, until it ends."""
        block.evaluates, block.estimated = evaluate, evaluate and self.reestimates
        if block.rounds:
            block.clock.begin_rounds(time.perf_counter())
        self.executor.ledger = block
        await self.executor.outcome(
            BlockOpened(
                attempt=block.attempt,
                number=block.number,
                first_round=block.first_round,
                rounds=block.rounds,
                cuts=block.cuts,
                planned=len(block.scene.members),
                evaluate=evaluate,
                estimate=block.estimated,
                result_wanted=result_wanted,
                sending=block.sending,
            )
        )

    def _note(self, block: Ledger) -> None:
        """Record the progress after an averaging."""
        assert block.averaged is not None
        block.clock.passed(time.perf_counter())  # missing test samples were waited for
        self.progress.version, self.progress.divergence = block.averaged.version, block.averaged.divergence
        self.progress.deepest = block.deepest
        self.progress.blocks, self.progress.seconds = block.number, self._elapsed()
        self._noted = time.perf_counter()
        self._common_at_close = self.edge_model.common_states()

    async def _finish(self) -> None:
        """Evaluate once more, have the complete model written, and tell all devices that the run is over."""
        for attempt in range(LAST_ATTEMPTS + 1):
            wanted = attempt < LAST_ATTEMPTS
            estimated = wanted and await self._evaluate_last()
            if self.reestimates and not estimated:
                if wanted and self.protocol.enough():
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
                # the fed server was restarted, and has lost the statistics
        self._write_run("done")
        joined = [device.number for device in self.protocol.devices if device.samples]
        await self._announce_end(joined, self._how_it_ended())

    async def _hand_over(self, common: LayerStates, *, statistics: bool) -> None:
        """Have the fed server write the complete model."""
        version = self.progress.version
        await self.fed.retry(lambda: self.fed.finish(version, common, statistics=statistics))

    async def _evaluate_last(self) -> bool:
        """Evaluate the final model, unless that was done; return whether its statistics were re-estimated."""
        untested = self.progress.evaluated_at < self.progress.rounds
        if not (untested or self.reestimates) or not await self.roster.enough(self.recipe.deploy.start_deadline_s):
            return False
        scene = await self.observe()
        cuts = tuple(self._last_cuts[number] for number in scene.members)
        last = Decision(cuts, 1, wire_dtype=self._last_wire)
        block = await self._opened(Order(last, 0, self.progress.rounds + 1), scene)
        await self._carry_out(block, evaluate=True, result_wanted=untested)
        self.roster.check()  # raise errors before a broken model is written
        if block.evaluation is not None:
            _, accuracy, _ = block.evaluation
            self.loop.evaluated_last(accuracy)
            self.journal.evaluated(*block.evaluation)
        return block.merged

    def _how_it_ended(self) -> str:
        return f"{self.ended_by}, {self.progress.rounds} rounds"

    async def _announce_end(self, devices: Sequence[int], why: str) -> None:
        """Tell devices that the run is over, also those that are disconnected for a moment."""
        reason = f"the run is over ({why})"
        await self.executor.outcome(RunOver(reason, tuple(devices), SHUTDOWN_S, PREPARING_S))

    def shut_down(self) -> None:
        """Cancel all tasks and computations."""
        self.executor.shut_down()

    # --- checkpoint ---

    def _elapsed(self) -> float:
        return self._before_s + time.monotonic() - self._began

    async def _resume(self) -> bool:
        """Resume from the checkpoint, if there is one; return whether the run is already done."""
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
                self._last_wire = blocks[-1].wire_dtype or self._last_wire
        self._common_at_close = self.edge_model.common_states()
        return False

    def _write_run(self, status: str) -> None:
        terms, measured = self.terms, self.measured
        name, recipe = terms.run.policies[0], self.backend.recipe
        info = about_run(recipe, terms.seed, name, self.policy, terms.names, measured.nominal, measured.servers())
        how = {"status": status, "ended_by": self.ended_by, "wall_s": self.progress.seconds, "real": True}
        done = {"rounds": self.progress.rounds} if status == "done" else {}
        self.journal.write_run({**info, **how, **done})

    # --- helpers ---

    def _show_plan(self, block: Ledger) -> None:
        cuts = ", ".join(str(block.cuts[k]) for k in block.scene.members)
        sending, plain = block.sending, Sending(wire_dtype=self.recipe.model.usual_wire_dtype)
        how = "" if sending == plain else f", {sending.micro_batches} parts in {sending.wire_dtype}"
        self.say(
            f"block {block.number}: rounds {block.first_round} to {block.last_round}, cuts {cuts}{how} "
            f"(version {self.progress.version} of the layers)"
        )
        parts, wire_dtype = sending.micro_batches, sending.wire_dtype
        self.board.update(
            block=block.number,
            interval=block.interval,
            deepest=block.deepest,
            micro_batches=parts,
            wire_dtype=wire_dtype,
        )

    def _measured(self, example: Tensor) -> MeasuredFleet:
        """Return the resources of the fleet before any device has joined: only this server's speed is measured."""
        terms, recipe = self.terms, self.recipe
        nominal = costs_of(self.model, example, recipe.model, terms.batch_size, recipe.training.optimizer)
        measured = MeasuredFleet(nominal, terms.names, terms.batch_size, terms.optimizer)
        times, fixed_s = time_passes(self.model, example, terms.batch_size)
        passes_s = sum(times.forward_s) + sum(times.backward_s)
        flops = terms.batch_size * nominal.forward_flops[-1] / max(1e-9, sum(times.forward_s))
        measured.server["flops"] = passes(flops, passes_s, fixed_s, beside_s=MESSAGES_S * terms.devices)
        return measured
