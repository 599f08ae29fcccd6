"""Carries out the protocol's actions: messages to devices, computing, calls of the fed server.

The executor handles events one after another; work that takes time runs as a task, whose end is an event again. All
computing runs in one thread: what training needs in the order of the requests, test samples when it needs nothing.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Coroutine
from functools import partial
from itertools import count
from typing import Any

from torch import Tensor

from adaptsfl.deploy import wire_pb2 as wire
from adaptsfl.deploy.parties.edge.accounts import Accounts
from adaptsfl.deploy.parties.edge.averaging import Averaging
from adaptsfl.deploy.parties.edge.computing import ComputingThread
from adaptsfl.deploy.parties.edge.journal import RunProgress
from adaptsfl.deploy.parties.edge.ledger import Ledger
from adaptsfl.deploy.parties.edge.model import EdgeModel, RejectedActivations
from adaptsfl.deploy.parties.edge.reestimation import Reestimation
from adaptsfl.deploy.parties.edge.roster import Roster
from adaptsfl.deploy.parties.edge.sessions import Arrival, Member, Session, Shapes
from adaptsfl.deploy.parties.edge.training import RoundTraining
from adaptsfl.deploy.parties.fed.client import RetryingFedClient
from adaptsfl.deploy.protocol import actions as do
from adaptsfl.deploy.protocol import events
from adaptsfl.deploy.service import NotNow
from adaptsfl.deploy.tensors import NonFiniteTensor
from adaptsfl.errors import BadMessage, TrainingDiverged


class Executor:
    """Drives the protocol of a run.

    Args:
        settings: the settings that are sent to devices with the welcome.
        measure_divergence: whether the fed server measures how far apart copies are before it averages them.

    Attributes:
        progress: the progress of the run.
        ledger: the ledger of the block under way; None between two blocks.
        training: trains rounds with the activations that have arrived.
    """

    def __init__(
        self,
        roster: Roster,
        edge_model: EdgeModel,
        fed: RetryingFedClient,
        accounts: Accounts,
        settings: str,
        *,
        measure_divergence: bool = False,
    ) -> None:
        self.protocol, self.roster, self.edge_model, self.accounts = roster.protocol, roster, edge_model, accounts
        self.shapes: Shapes = accounts.shapes
        self.settings = settings
        self.computing = ComputingThread(edge_model)
        self.training = RoundTraining(roster, self.computing)
        self.averaging = Averaging(roster, fed, accounts, self._own_layers, measure_divergence)
        self.reestimation = Reestimation(roster, fed, self.shapes, edge_model, self.computing.run)
        self.progress = RunProgress()
        self.ledger: Ledger | None = None
        self._for_estimation: dict[int, Tensor] = {}
        self._sessions: dict[int, Session] = {}
        self._numbers = count(1)
        self._events: deque[events.Event] = deque()
        self._handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._wake_at = math.inf  # the time for which it is set
        self._tasks: set[asyncio.Task[None]] = set()
        self._outcome: asyncio.Future[None] | None = None  # of the block, or of the shutdown
        self._handled = asyncio.Event()  # set for a moment after every event

    # --- events ---

    def handle(self, event: events.Event) -> None:
        """Handle an event, and start the actions that follow; an error ends the run."""
        self._events.append(event)
        if self._handling:
            return  # it is handled after the present event
        self._handling = True
        try:
            while self._events:
                for action in self.protocol.handle(self._events.popleft(), time.monotonic()):
                    getattr(self, HANDLERS[type(action)])(action)
        except Exception as error:  # if raised here, it would end one connection only, and the run would hang
            self._ended(error)
        finally:
            self._handling = False
        self._set_timer()
        self._handled.set()
        self._handled.clear()
        self.roster.wake()

    def tick(self) -> None:
        """Let the protocol check its deadlines."""
        self._timer, self._wake_at = None, math.inf
        self.handle(events.DeadlinePassed())

    def _set_timer(self) -> None:
        if self.protocol.wake_at == self._wake_at:
            return  # most events change no deadline
        if self._timer is not None:
            self._timer.cancel()
        self._wake_at, self._timer = self.protocol.wake_at, None
        if self._wake_at < math.inf:
            left_s = max(0.0, self._wake_at - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(left_s, self.tick)

    async def outcome(self, event: events.Event) -> None:
        """Handle an event that opens a block, or ends the run; wait until the block, or the shutdown, is over."""
        self.roster.check()  # raise an error that occurred between two blocks
        self._outcome = asyncio.get_running_loop().create_future()
        self.handle(event)
        await self._outcome

    def shut_down(self) -> None:
        """Cancel all tasks and computations."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        self.computing.shutdown(wait=False, cancel_futures=True)

    def _ended(self, error: BaseException | None = None) -> None:
        """Wake up the caller that waits in `outcome`, or raise an error there."""
        if self._outcome is None or self._outcome.done():
            if isinstance(error, Exception):
                self.roster.give_up(error)
        elif error is None:
            self._outcome.set_result(None)
        else:
            self._outcome.set_exception(error)

    def _start(self, work: Coroutine[Any, Any, events.Event | None]) -> "asyncio.Task[None]":
        """Run work as a task; the event that it returns is handled, and an error ends the run."""

        async def guarded() -> None:
            try:
                event = await work
                if event is not None:
                    self.handle(event)
            except Exception as error:
                self._ended(error)

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- connections ---

    def connect(self, member: Member) -> Session:
        """Return a new connection of a device."""
        number = next(self._numbers)
        session = Session(member, number, lambda closed: self.handle(events.Closing(closed)))
        self._sessions[number] = session
        return session

    def disconnect(self, session: Session, *, violated: bool, informed: bool) -> None:
        """Remove a connection that is over."""
        self._sessions.pop(session.number, None)
        self.handle(events.Disconnected(session.number, violated, informed))

    async def taken(self, session: Session) -> None:
        """Wait until the activations that a connection has brought are handled."""
        while self.protocol.keeps(session.number):
            await self._handled.wait()
        session.arrival = None

    def _close(self, action: do.Close) -> None:
        if session := self._sessions.get(action.connection):
            error = BadMessage(action.reason) if action.violation else NotNow(action.reason)
            session.close(error if action.reason else None)

    def _send(self, connection: int, message: wire.ToDevice, data: memoryview | None = None) -> None:
        if session := self._sessions.get(connection):
            session.send(message, data)

    def _send_welcome(self, action: do.SendWelcome) -> None:
        welcome = wire.Welcome(number=action.device, settings=self.settings)
        self._send(action.connection, wire.ToDevice(welcome=welcome))

    def _send_plan(self, action: do.SendPlan) -> None:
        plan = wire.Plan(
            attempt=action.attempt,
            block=action.block,
            next_round=action.next_round,
            last_round=action.last_round,
            cut=action.cut,
            evaluate=action.evaluate,
            estimate=action.estimate,
        )
        if self.ledger is not None:
            sending, session = self.ledger.sending, self._sessions.get(action.connection)
            plan.micro_batches, plan.wire_dtype = sending.micro_batches, sending.wire_dtype
            plan.exact_round = sending.exact_round
            if session is not None:
                session.parts = sending.micro_batches
        self._send(action.connection, wire.ToDevice(plan=plan))

    def _send_gradients(self, action: do.SendGradients) -> None:
        answer = self.roster.by_number[action.device].answer(action.round, action.part)
        if answer is not None:
            self._send(action.connection, wire.ToDevice(gradients=answer[0]), answer[1])

    def _send_skip(self, action: do.SendSkip) -> None:
        self._send(action.connection, wire.ToDevice(skip=wire.Skip(next_round=action.next_round)))

    def _send_evaluate(self, action: do.SendEvaluate) -> None:
        self._send(action.connection, wire.ToDevice(evaluate=wire.Evaluate(attempt=action.attempt)))

    def _send_evaluated(self, action: do.SendEvaluated) -> None:
        evaluated = wire.Evaluated(attempt=action.attempt, number=action.number)
        self._send(action.connection, wire.ToDevice(evaluated=evaluated))

    def _send_deliver(self, action: do.SendDeliver) -> None:
        self._send(action.connection, wire.ToDevice(deliver=wire.Deliver(attempt=action.attempt)))

    def _send_stop(self, action: do.SendStop) -> None:
        self._send(action.connection, wire.ToDevice(stop=wire.Stop(reason=action.reason, done=True)))

    # --- computing ---

    def _place_layers(self, action: do.PlaceLayers) -> None:
        assert self.ledger is not None
        self._start(self._placed(self.ledger))

    async def _placed(self, block: Ledger) -> events.Event:
        fetched, forgotten = await self.averaging.fetch_own(block)
        place = partial(self.edge_model.place, block.deepest, fetched, evaluates=block.evaluates)
        await self.computing.run(place)
        block.placed_at = time.perf_counter()
        return events.LayersPlaced(block.attempt, forgotten)

    def _give_layers(self, action: do.GiveLayers) -> None:
        assert self.ledger is not None
        block, given = self.ledger, events.LayersGiven(action.attempt, action.device)

        async def work() -> events.Event:
            await self.computing.run(self.edge_model.admit, action.device, action.cut)
            block.placed_at = time.perf_counter()
            return given

        self.training.arrivals.pop(action.device, None)
        if action.cut < block.deepest:
            self._start(work())
        else:  # it has none above its cut
            self.handle(given)

    def _use_activations(self, action: do.UseActivations) -> None:
        self.training.use(action, self._sessions[action.connection])

    def _keep_for_estimation(self, action: do.KeepForEstimation) -> None:
        arrival = self._sessions[action.connection].arrival
        assert arrival is not None
        self._for_estimation[action.device] = arrival.activations

    def _evaluate_batch(self, action: do.EvaluateBatch) -> None:
        session, start, block = self._sessions[action.connection], self.edge_model.start, self.ledger
        assert session.arrival is not None
        assert start is not None
        assert block is not None
        block.tested.add(action.device)
        batch = block.cuts[action.device], session.arrival.activations, session.arrival.labels

        async def work() -> events.Event:
            try:
                row = await self.computing.run_when_idle(start.evaluate, *batch)
            except NonFiniteTensor:
                self.handle(events.NotFinite(action.device, action.attempt))
                raise
            return events.BatchEvaluated(action.attempt, action.device, action.number, row)

        session.evaluation = self._work_for(session, work())

    def _work_for(self, session: Session, work: Coroutine[Any, Any, events.Event | None]) -> "asyncio.Task[None]":
        """Compute with a device's activations; an error ends its connection, and not the run."""

        async def guarded() -> events.Event | None:
            try:
                return await work
            except Exception as error:
                session.close(error)
                return None

        return self._start(guarded())

    def _train_round(self, action: do.TrainRound) -> None:
        assert self.ledger is not None
        self._start(self._trained(self.ledger, action, self.training.arrived(action)))

    async def _trained(self, block: Ledger, action: do.TrainRound, arrivals: dict[int, Arrival]) -> events.Event | None:
        """Train a part of a round; after the last one write down how long the round took."""
        try:
            parts = await self.training.train(block, action, arrivals)
        except RejectedActivations as error:
            return events.RoundRejected(action.attempt, action.round, error.devices, action.part)
        if block.over:
            return None
        trained = events.RoundTrained(action.attempt, action.round, action.part)
        if action.part + 1 < action.parts:
            return trained
        self.progress.rounds = action.round
        self.handle(trained)
        phases, round_s = self.accounts.note_round(block, action.round, parts)
        self.roster.board.add_loss(action.round, block.losses[-1])
        self.roster.show_round(action.round, block.predicted, phases, round_s)
        return None

    def _drop_round(self, _action: do.DropRound) -> None:
        self.training.drop()
        self.computing.drop_round()

    def _estimate_moments(self, action: do.EstimateMoments) -> None:
        assert self.ledger is not None
        sent = {device: self._for_estimation[device] for device in action.devices}
        self._start(self.reestimation.estimate(self.ledger, sent))

    async def _own_layers(self, device: int, cut: int) -> Any:
        return await self.computing.run(self.edge_model.own_states, device, cut)

    def _end_evaluation(self, action: do.EndEvaluation) -> None:
        assert self.ledger is not None
        self.progress.evaluated_at, self.edge_model.start = action.round, None
        self.ledger.evaluation = action.round, action.accuracy, action.loss
        self.roster.board.add_evaluation(action.round, action.accuracy)
        self.roster.say(f"round {action.round}: accuracy {action.accuracy:.1%} on the devices' test samples")

    # --- the fed server ---

    def _reopen(self, _action: do.Reopen) -> None:
        assert self.ledger is not None
        self._start(self.averaging.reopen(self.ledger))

    def _deliver_own(self, action: do.DeliverOwn) -> None:
        assert self.ledger is not None
        if action.cut < self.ledger.deepest:
            self._start(self.averaging.deliver_own(self.ledger, action.device, action.cut))
        else:  # it has none above its cut
            self.handle(events.OwnDelivered(action.attempt, action.device))

    def _average(self, action: do.Average) -> None:
        assert self.ledger is not None
        self._start(self.averaging.average(self.ledger, action.devices))

    # --- the course of the run ---

    def _end_block(self, _action: do.EndBlock) -> None:
        self._forget_block()
        self._ended()

    def _diverged(self, action: do.Diverged) -> None:
        self._forget_block()
        self._ended(TrainingDiverged(action.reason))

    def _forget_block(self) -> None:
        if self.ledger is not None:
            self.ledger.over = True
        self.training.drop()
        self.ledger, self._for_estimation, self.edge_model.start = None, {}, None

    def _end_shutdown(self, _action: do.EndShutdown) -> None:
        self._ended()

    # --- what people see ---

    def _show(self, action: do.Show) -> None:
        self.roster.show(action.devices)

    def _say(self, action: do.Say) -> None:
        self.roster.say(action.text)

    def _wait_for(self, action: do.WaitFor) -> None:
        self.roster.wait_for(action.what)


def _handler(action: type[do.Action]) -> str:
    """Return the name of the method that carries out an action: SendPlan is `_send_plan`."""
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in action.__name__)


HANDLERS = {action: _handler(action) for action in do.Action.__subclasses__()}
