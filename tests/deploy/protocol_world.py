"""The edge server's protocol among models of devices and of the fed server; work ends when a test says so.

What is checked here on every step is what no order of events may break:

- nothing is trained twice: rounds follow one another, and so do their parts, each with activations that belong to the
  layers it trains, and with devices that were in all parts before;
- no delivery is lost or mixed up: what is averaged was delivered by both sides, from one life of the device's layers;
- nobody is waited for beyond a deadline, if enough others are there;
- a quorum is always needed;
- a round that watches one of the devices that it waits for does what one that looks at all of them does.
"""

import math
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, TypeVar

from adaptsfl.deploy.protocol import EdgeProtocol, actions, events
from adaptsfl.deploy.protocol.state import Rules
from adaptsfl.deploy.sending import Sending

A = TypeVar("A", bound=actions.Action)
WORK = (
    actions.PlaceLayers,
    actions.GiveLayers,
    actions.TrainRound,
    actions.EvaluateBatch,
    actions.EstimateMoments,
    actions.Reopen,
    actions.DeliverOwn,
    actions.Average,
)


@dataclass
class Device:
    """A device that does what it is told.

    Attributes:
        life: which of its layers it holds; they begin anew when it is restarted.
        pending: the round that it has sent and not been answered; `unanswered` are its parts.
        evaluates: whether it sends test samples while it waits; `tested` are those that were evaluated, `testing` is
            on its way.
    """

    number: int
    connection: int = 0
    ready: bool = False
    inbox: list[Any] = field(default_factory=list)
    held: int = 0
    life: int = 0
    next_round: int = 0
    last_round: int = 0
    pending: int = 0
    unanswered: set[int] = field(default_factory=set)
    sending: Sending = field(default_factory=Sending)
    learned: int = 0
    delivered: bool = False
    evaluates: bool = False
    tested: set[int] = field(default_factory=set)
    testing: int | None = None
    told: str = ""


@dataclass
class Fed:
    """A fed server: the block that it knows, and whose layers of which life are there."""

    attempt: int = 0
    from_devices: dict[int, int] = field(default_factory=dict)
    from_edge: dict[int, int] = field(default_factory=dict)

    def know(self, attempt: int) -> bool:
        """Open a block; return whether it was not known."""
        if self.attempt == attempt:
            return False
        self.attempt, self.from_devices, self.from_edge = attempt, {}, {}
        return True


class Thorough(EdgeProtocol):
    """The protocol, which looks at all devices after every event."""

    @property
    def only_arrived(self) -> bool:
        return False

    @only_arrived.setter
    def only_arrived(self, _value: bool) -> None:
        pass


def _awaited(protocol: EdgeProtocol) -> set[int]:
    """Devices that the round has waited for."""
    block = protocol.block
    return set() if block is None or block.round is None else block.round.awaited


class World:
    """The protocol, and everything around it.

    Attributes:
        pending: work that was begun and has not ended, in its order.
        log: all actions.
        ended: attempts whose blocks are over.
    """

    def __init__(self, devices: int = 2, quorum: int = 1, deadline_s: float = 10.0) -> None:
        names = [f"device-{number + 1}" for number in range(devices)]
        self.protocol = EdgeProtocol(names, Rules(quorum, deadline_s))
        self.devices = [Device(number) for number in range(devices)]
        self.fed = Fed()
        self.now = 0.0
        self.pending: list[actions.Action] = []
        self.log: list[actions.Action] = []
        self.ended: list[int] = []
        self.diverged = ""
        # By attempt, round and part: devices, and their lives.
        self.trained: dict[tuple[int, int, int], dict[int, int]] = {}
        self.averaged: list[tuple[int, ...]] = []
        self.life = dict.fromkeys(range(devices), 0)  # of the layers that the edge server holds of a device
        self.arrived: dict[int, list[tuple[int, int]]] = {}  # by device and part: life and round of activations here
        self.early: set[int] = set()  # devices that have a plan, and whose layers the edge server does not hold yet
        self.unread: dict[int, list[events.Event]] = {}  # by connection: sent, and not read by the edge server yet
        self.open: dict[int, int] = {}  # connections, and whose they are
        self.planned: dict[int, int] = {}  # by connection: the attempt whose plan was sent last
        self.slow: dict[int, set[int]] = {}  # by device: parts that it does not send
        self.liars: set[int] = set()  # devices that say what is not true
        self.connections = 0
        self.attempts = 0
        self.rounds = 0

    # --- events ---

    def do(self, event: events.Event) -> list[actions.Action]:
        """Hand an event to the protocol; check and begin what it leads to."""
        thorough = deepcopy(self.protocol)
        thorough.__class__ = Thorough
        expected = thorough.handle(event, self.now)
        found = self.protocol.handle(event, self.now)
        assert (found, self.protocol.wake_at, _awaited(self.protocol)) == (
            expected,
            thorough.wake_at,
            _awaited(thorough),
        )
        for action in found:
            self.log.append(action)
            self._check(action)
            self._begin(action)
        self._check_waiting()
        for connection in list(self.unread):
            self._read_on(connection)
        return found

    def say(self, connection: int, event: events.Event) -> None:
        """Send a message over a connection; the edge server reads it once it has handled those before."""
        self.unread.setdefault(connection, []).append(event)
        self._read_on(connection)

    def _read_on(self, connection: int) -> None:
        messages = self.unread.get(connection, [])
        while messages and connection in self.open and not self.protocol.keeps(connection):
            self.do(messages.pop(0))
        if not messages or connection not in self.open:
            self.unread.pop(connection, None)

    def open_block(
        self, rounds: int = 2, cuts: tuple[int, ...] | None = None, *, placed: bool = True, **options: Any
    ) -> int:
        """Open a block, as the conductor does; `placed` if the edge server's own layers come at once."""
        assert self.protocol.block is None
        self.attempts += 1
        self.fed.know(self.attempts)
        cuts = cuts or (1,) * len(self.devices)
        self.arrived, self.early = {}, set()
        planned = len(self.protocol.here())
        self.do(events.BlockOpened(self.attempts, self.attempts, self.rounds + 1, rounds, cuts, planned, **options))
        if placed:
            self.finish(actions.PlaceLayers)
        return self.attempts

    def connect(self, number: int, *, ready: bool = True, anew: bool = False) -> int:
        """Let a device connect, and be ready; `anew` if it was restarted, and holds no layers."""
        device = self.devices[number]
        if self.protocol.devices[number].quarantined:
            return 0
        self.connections += 1
        if anew:
            self.devices[number] = device = Device(number)
        device.connection, device.inbox, device.ready, device.testing = self.connections, [], False, None
        self.open[device.connection] = number
        self.do(events.Hello(device.connection, number, device.held))
        if ready:
            self.be_ready(device)
        return device.connection

    def be_ready(self, device: Device) -> None:
        """Let a device have loaded its data; once per connection."""
        if device.connection and not device.ready:
            device.ready = True
            self.do(events.Ready(device.connection, 100))

    def lose(self, number: int, **how: Any) -> None:
        """Break a device's connection."""
        device = self.devices[number]
        if device.connection:
            self._gone(device.connection, **how)

    def _gone(self, connection: int, **how: Any) -> None:
        if self.open.pop(connection, None) is None:
            return
        device = next((d for d in self.devices if d.connection == connection), None)
        if device is not None:
            device.connection, device.inbox = 0, []
        self.do(events.Disconnected(connection, **how))

    def forget(self) -> None:
        """Restart the fed server in the middle of a block."""
        self.fed.attempt = 0

    def wait(self, seconds: float = math.inf) -> None:
        """Let time pass, at most until the protocol wants to be called."""
        until = min(self.now + seconds, self.protocol.wake_at)
        if until < math.inf:
            self.now = until
            self.do(events.DeadlinePassed())

    # --- devices ---

    def read(self, number: int) -> bool:
        """Let a device read one message, and act on it; return whether there was one."""
        device = self.devices[number]
        if not device.inbox:
            return False
        message = device.inbox.pop(0)
        match message:
            case actions.SendWelcome():
                self.be_ready(device)
            case actions.SendPlan():
                self._follow(device, message)
            case actions.SendGradients():
                self._learn(device, message)
            case actions.SendSkip():
                self.send(device, message.next_round)
            case actions.SendEvaluate() if message.attempt == device.held:
                device.evaluates = True
                if not device.pending:
                    self.send(device, device.next_round)
            case actions.SendEvaluated() if message.attempt == device.held:
                device.tested.add(message.number)
                device.testing = None
            case actions.SendDeliver() if message.attempt == device.held:
                self.deliver(device)
            case actions.SendStop():
                device.told = message.reason
                self.lose(number, informed=True)
        return True

    def read_all(self, *numbers: int) -> None:
        """Let devices read all that is there for them."""
        for number in numbers or range(len(self.devices)):
            while self.read(number):
                pass

    def _learn(self, device: Device, gradients: actions.SendGradients) -> None:
        if gradients.round <= device.learned or (
            gradients.round == device.pending and gradients.part not in device.unanswered
        ):
            return  # a duplicate
        asked = device.pending == gradients.round or device.number in self.liars
        assert asked, f"{gradients} was not asked for"
        device.unanswered.discard(gradients.part)
        if not device.unanswered:
            device.learned, device.pending = gradients.round, 0
            self.send(device, gradients.round + 1)

    def _follow(self, device: Device, plan: actions.SendPlan) -> None:
        if device.held != plan.attempt:
            if self.fed.attempt != plan.attempt:
                self.lose(device.number)  # it cannot fetch its layers, and comes back
                return
            device.held, device.life = plan.attempt, self.life[device.number]
            device.pending = device.learned = 0
            assert self.protocol.block is not None
            device.sending = self.protocol.block.sending
            device.evaluates = device.delivered = False
            device.tested = set()
        device.next_round, device.last_round = plan.next_round, plan.last_round
        if plan.estimate and not device.pending:
            self.say(device.connection, events.Activations(device.connection, device.held, plan.estimate, "estimation"))
            return
        device.evaluates = device.evaluates or plan.evaluate
        if device.pending:
            self._say_parts(device)
        else:
            self.send(device, plan.next_round)

    def send(self, device: Device, number: int) -> None:
        """Send activations of a round."""
        if not device.connection:
            return
        if not 1 <= number <= device.last_round:
            device.pending = 0
            return
        device.pending, device.unanswered = number, set(range(device.sending.parts(number)))
        self._say_parts(device)

    def _say_parts(self, device: Device) -> None:
        """Send the parts that were not answered."""
        connection, attempt = device.connection, device.held
        for part in sorted(device.unanswered - self.slow.get(device.number, set())):
            self.say(connection, events.Activations(connection, attempt, device.pending, part=part))

    def test(self, number: int, batches: int = 2) -> bool:
        """Let a device send a mini-batch of test samples, if it waits for the edge server; return whether it did."""
        device = self.devices[number]
        waits = device.pending or device.delivered or device.next_round > device.last_round
        left = [k for k in range(batches) if k not in device.tested]
        if (
            not (device.connection and device.evaluates and waits and left)
            or device.inbox
            or device.testing is not None
        ):
            return False
        device.testing = left[0]
        self.say(device.connection, events.Activations(device.connection, device.held, left[0], "evaluation", batches))
        return True

    def deliver(self, device: Device) -> None:
        """Take layers to the fed server, and say so."""
        if self.fed.attempt == device.held:
            self.fed.from_devices[device.number] = device.life
            device.delivered = True
            self.say(device.connection, events.Delivered(device.connection, device.held))

    # --- work ---

    def finish(self, kind: type[actions.Action] | None = None, *, device: int | None = None) -> bool:
        """End the first work of a kind as it should end; return whether there was any."""
        for action in self.pending:
            if (kind is None or type(action) is kind) and device in (None, getattr(action, "device", None)):
                self.pending.remove(action)
                self.do(self._outcome(action))
                return True
        return False

    def reject(self, *devices: int) -> None:
        """Let a round end because activations of these devices led to NaN or infinity."""
        action = self.take(actions.TrainRound)
        for device in devices:
            self.arrived.pop(device, None)
        self.do(events.RoundRejected(action.attempt, action.round, devices, action.part))

    def take(self, kind: type[A]) -> A:
        """Return the first work of a kind; the test says how it ends."""
        action = next(action for action in self.pending if isinstance(action, kind))
        self.pending.remove(action)
        return action

    def _outcome(self, action: actions.Action) -> events.Event:  # noqa: PLR0911
        match action:
            case actions.PlaceLayers():
                return events.LayersPlaced(action.attempt, self.fed.know(action.attempt))
            case actions.GiveLayers():
                return events.LayersGiven(action.attempt, action.device)
            case actions.TrainRound():
                return self._train(action)
            case actions.EvaluateBatch():
                return events.BatchEvaluated(action.attempt, action.device, action.number, (5, 1.0, 10))
            case actions.EstimateMoments():
                return events.MomentsMerged(action.attempt, merged=self.fed.attempt == action.attempt)
            case actions.Reopen():
                block = self.protocol.block
                wanted = block is not None and block.attempt == action.attempt
                return events.Reopened(action.attempt, wanted and self.fed.know(action.attempt))
            case actions.DeliverOwn():
                if self.fed.attempt != action.attempt:
                    return events.BlockForgotten(action.attempt, action.device)
                self.fed.from_edge[action.device] = self._own_lives.pop((action.attempt, action.device))
                return events.OwnDelivered(action.attempt, action.device)
            case actions.Average():
                return self._average(action)
        raise AssertionError(action)

    def _train(self, action: actions.TrainRound) -> events.Event:
        block = self.protocol.block
        if block is not None and block.attempt == action.attempt:
            key = action.attempt, action.round, action.part
            assert key not in self.trained, f"part {action.part} of round {action.round} was trained twice"
            assert action.round == self.rounds + 1, "rounds follow one another"
            if action.part:
                before = self.trained[action.attempt, action.round, action.part - 1]
                assert self._training.items() <= before.items(), "trained with who was not in the part before"
            self.trained[key] = self._training
            if action.part + 1 == action.parts:
                self.rounds, self.arrived = action.round, {}
        return events.RoundTrained(action.attempt, action.round, action.part)

    def _average(self, action: actions.Average) -> events.Event:
        if self.fed.attempt != action.attempt:
            return events.BlockForgotten(action.attempt)
        both = self.fed.from_devices.keys() & self.fed.from_edge.keys()
        if missing := tuple(device for device in action.devices if device not in both):
            return events.NotDelivered(action.attempt, missing)
        self.averaged.append(action.devices)
        self.fed.attempt = 0  # nobody can fetch layers of it any more
        return events.Averaged(action.attempt, version=1)

    # --- what actions do, and what they must not do ---

    _training: dict[int, int]
    _own_lives: dict[tuple[int, int], int]

    def _begin(self, action: actions.Action) -> None:  # noqa: PLR0912
        if isinstance(action, WORK):
            self.pending.append(action)
        match action:
            case actions.GiveLayers():
                self._begin_life(action.device)
                self.early.discard(action.device)
            case actions.TrainRound():
                self._training = {device: self.arrived[device][action.part][0] for device in action.devices}
            case actions.DropRound():
                self._drop(action)
            case actions.DeliverOwn():
                self.__dict__.setdefault("_own_lives", {})[action.attempt, action.device] = self.life[action.device]
            case actions.UseActivations():
                sender = self.devices[action.device]
                self.arrived.setdefault(action.device, []).append((self.life[action.device], sender.pending))
            case actions.Close():
                violated = action.violation
                number = self.open.get(action.connection)
                self._gone(action.connection, violated=violated)
                if violated and number is not None:
                    self.devices[number] = Device(number)  # it is refused, and has to be started anew
                    self.do(events.Violated(number, action.reason))
            case actions.EndBlock():
                self.ended.append(action.attempt)
            case actions.Diverged():
                self.diverged = action.reason
            case actions.SendPlan():
                self._send_plan(action)
        connection = getattr(action, "connection", None)
        if type(action).__name__.startswith("Send") and connection in self.open:
            receiver = self.devices[self.open[connection]]
            if receiver.connection == connection:
                receiver.inbox.append(action)

    def _drop(self, action: actions.DropRound) -> None:
        self.arrived = {}
        self.trained = {key: lives for key, lives in self.trained.items() if key[:2] != (action.attempt, action.round)}

    def _send_plan(self, plan: actions.SendPlan) -> None:
        self.planned[plan.connection] = plan.attempt
        block = self.protocol.block
        if block is not None and not block.placed:
            self._begin_life(self.open[plan.connection])
            self.early.add(self.open[plan.connection])

    def _begin_life(self, device: int) -> None:
        """Let a device begin with the block's layers; once, if it has its plan before the edge server has these."""
        if device not in self.early:
            self.life[device] += 1
            self.arrived.pop(device, None)

    def _check(self, action: actions.Action) -> None:
        quorum, block = self.protocol.rules.quorum, self.protocol.block
        match action:
            case actions.TrainRound():
                assert len(set(action.devices)) >= quorum, "trained without a quorum"
                lives = {device: self.arrived[device][action.part][0] for device in action.devices}
                assert lives == {device: self.life[device] for device in action.devices}, "trained with lost layers"
            case actions.EstimateMoments():
                assert len(set(action.devices)) >= quorum, "estimated without a quorum"
            case actions.Average():
                assert len(set(action.devices)) >= quorum, "averaged without a quorum"
                self._check_average(action)
            case actions.GiveLayers():
                assert block is not None
                assert block.placed, "layers given before they are there"
            case actions.UseActivations():
                assert block is not None
                assert block.placed, "activations used before layers are there"
                assert len(self.arrived.get(action.device, [])) == action.part, "used twice, or out of order"
            case actions.DropRound():
                busy = any(isinstance(a, actions.TrainRound) and a.attempt == action.attempt for a in self.pending)
                assert not busy, "dropped while it is trained"
            case actions.SendGradients():
                assert block is not None
                lives = self.trained[block.attempt, action.round, action.part]
                assert lives.get(action.device) == self.life[action.device], "gradients of layers that were lost"
                assert self.planned.get(action.connection) == block.attempt, "gradients before a plan"
            case actions.SendSkip():
                self._check_skip(action)
            case actions.SendDeliver():
                assert self.planned.get(action.connection) == action.attempt, "asked to deliver before a plan"
            case actions.DeliverOwn():
                same = [a for a in self.pending if isinstance(a, actions.DeliverOwn)]
                assert all((a.attempt, a.device) != (action.attempt, action.device) for a in same), "delivered at once"

    def _check_skip(self, action: actions.SendSkip) -> None:
        """Nobody is told to go on without the gradients of a round that was trained with its layers."""
        device, block = self.devices[self.open[action.connection]], self.protocol.block
        if block is not None and device.pending > device.learned and device.number not in self.liars:
            last = block.sending.parts(device.pending) - 1
            lives = self.trained.get((block.attempt, device.pending, last), {})
            trained_with = device.held == block.attempt and lives.get(device.number) == device.life
            assert not trained_with or device.life != self.life[device.number], "gradients were lost"

    def _check_average(self, action: actions.Average) -> None:
        """What is averaged was delivered by both sides, and nothing that was delivered in time is left out."""
        block = self.protocol.block
        assert block is not None
        if self.fed.attempt == action.attempt:
            for device in action.devices:
                delivered = self.fed.from_devices.get(device, self.life[device])  # unless it has lied
                assert delivered == self.fed.from_edge[device] == self.life[device], "layers of two lives"
        last = self.trained[block.attempt, block.last_round, block.sending.parts(block.last_round) - 1]
        trained = {device for device, life in last.items() if life == self.life[device]} & set(action.devices)
        if len(trained) >= self.protocol.rules.quorum:
            assert trained == set(action.devices), "layers that were not trained are averaged with those that were"
        kept = {d.number for d in self.protocol.holding() if d.number in block.deliveries.by_devices}
        assert kept & block.trained <= set(action.devices), "a delivery was lost"

    def _check_waiting(self) -> None:
        """Nobody is waited for beyond a deadline, if the others are enough; and the protocol wakes up in time."""
        block, quorum = self.protocol.block, self.protocol.rules.quorum
        assert self.protocol.wake_at > self.now, "it would be called again and again"
        if block is None:
            return
        match block.phase:
            case "training" if block.round is not None and not block.round.training:
                if len(block.round.arrived) >= quorum:
                    assert self.now < block.round.deadline, "a round waits beyond its deadline"
                    assert self.protocol.wake_at <= block.round.deadline
            case "estimating":
                assert self.now < block.estimation_deadline, "an estimation waits beyond its deadline"
                assert self.protocol.wake_at <= block.estimation_deadline
            case "testing":
                assert self.now < block.test_deadline, "an evaluation waits beyond its deadline"
                assert self.protocol.wake_at <= block.test_deadline
            case "delivering":
                holding = {device.number for device in self.protocol.holding()}
                if len(block.deliveries.by_devices & holding & block.trained) >= quorum:
                    busy = block.reopening or block.deliveries.sending
                    assert self.now < block.deliveries.deadline or busy, "deliveries are waited for beyond the deadline"
                    assert self.protocol.wake_at <= block.deliveries.deadline or busy, "nobody looks at the deadline"

    # --- to the end ---

    def settle(self, *numbers: int) -> None:
        """Let these devices, the edge server and the fed server work until nothing is left to be done at once."""
        moved = True
        while moved:
            moved = self.finish()
            for number in numbers or range(len(self.devices)):
                moved = self.read(number) or self.test(number) or moved

    def drain(self) -> None:
        """Let everybody behave from now on: connect, work, wait; the block has to end."""
        for _ in range(200):
            if self.protocol.block is None:
                return
            for device in self.devices:
                if not device.connection:
                    self.connect(device.number, anew=True)
            self.settle()
            if self.protocol.block is not None:
                self.wait()
        raise AssertionError(f"the block never ends: {self.protocol.block}")
