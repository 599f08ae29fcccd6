"""All that the protocol knows: the devices, their connections, the block under way. Only this room writes it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from adaptsfl.checks import printable
from adaptsfl.deploy.protocol.actions import Action, Close, Diverged
from adaptsfl.deploy.security.limits import MOST_USELESS, MOST_VIOLATIONS, STRIKES

Admission = Literal["", "reopening", "giving"]
Phase = Literal["estimating", "merging", "training", "testing", "delivering", "averaging"]


@dataclass(frozen=True)
class Rules:
    """What a recipe says about waiting.

    Attributes:
        quorum: how many devices are enough to go on.
        round_deadline_s: after which a round, a delivery or an evaluation goes on without those who are late.
    """

    quorum: int
    round_deadline_s: float


@dataclass
class DeviceState:
    """A device of the fleet, connected or not.

    Attributes:
        connection: its connection, once it is ready; `newest` also before that, and while it closes.
        samples: that it trains on; 0 until it has joined once.
        attempt: the block in which both sides hold layers of this device; 0 if none.
        cut: in that block.
        admission: whether it waits for layers: until the fed server is known to know the block, or until they are here.
        answered: the last round of the block that was trained with it: its gradients are kept in case it asks again.
        late: whether the last round went on without it; nobody waits for it until it sends again.
        strikes: violations in a row; `violations` is all of them.
        undelivered: how often in a row its layers did not get to the fed server.
        gave_up: it said that it cannot go on.
        informed: it knows that the run is over.
        last_round, rounds: the last round that was trained with it, and how many were.
    """

    number: int
    name: str
    connection: int | None = None
    newest: int | None = None
    samples: int = 0
    attempt: int = 0
    cut: int = 0
    admission: Admission = ""
    answered: int = 0
    late: bool = False
    strikes: int = 0
    violations: int = 0
    undelivered: int = 0
    quarantined: bool = False
    gave_up: bool = False
    informed: bool = False
    last_round: int = 0
    rounds: int = 0
    last_error: str = ""

    def violated(self, reason: str) -> None:
        """Count a violation."""
        self.violations += 1
        self.strikes += 1
        self.last_error = printable(reason)
        if self.strikes >= STRIKES or self.violations >= MOST_VIOLATIONS:
            self.quarantined = True

    def failed_to_deliver(self) -> None:
        """Count a block whose end was held up for layers that did not come."""
        self.undelivered += 1
        if self.undelivered >= STRIKES:
            self.last_error = f"its layers did not get to the fed server {STRIKES} times in a row"
            self.quarantined = True


@dataclass
class Connection:
    """One connection of a device.

    Attributes:
        held: the attempt whose layers the device says it holds.
        planned: the attempt of the block whose plan was sent last over it.
        stopped: whether the device was sent word that the run is over.
        closing: whether this side is ending it.
        skipped_to: the round that the device was last told to go on with.
        useless: messages in a row that led to nothing.
    """

    number: int
    device: int
    held: int = 0
    planned: int = 0
    stopped: bool = False
    closing: bool = False
    skipped_to: int = 0
    useless: int = 0


@dataclass
class Round:
    """The round whose activations are being collected, or that is being trained.

    Attributes:
        arrived: devices whose activations are here.
        awaited: devices that were waited for at some time.
        early: connections that have sent activations of the next round while this one is being trained.
        lost: devices that have lost their layers since training began: should it be repeated, then without them.
    """

    number: int
    deadline: float = math.inf
    arrived: set[int] = field(default_factory=set)
    awaited: set[int] = field(default_factory=set)
    training: bool = False
    early: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)

    def leave_out(self, device: int) -> None:
        """Drop what a device has sent before it lost its layers."""
        if self.training:
            self.lost.add(device)
        else:
            self.arrived.discard(device)


@dataclass
class Evaluation:
    """An evaluation under way, of the model after `round`.

    Attributes:
        found: by device and number of the mini-batch: samples recognised, the sum of their losses, how many they are.
        batches: by device: how many mini-batches it has.
    """

    round: int
    found: dict[int, dict[int, tuple[int, float, int]]] = field(default_factory=dict)
    batches: dict[int, int] = field(default_factory=dict)

    def announced(self, device: int, batches: int) -> None:
        """Take in how many mini-batches a device has; a different count means that the device was restarted."""
        if self.batches.get(device) != batches:
            self.batches[device], self.found[device] = batches, {}

    def add(self, device: int, number: int, row: tuple[int, float, int]) -> None:
        """Take in one mini-batch; after a lost connection a device sends all of them again."""
        if number < self.batches.get(device, 0):
            self.found.setdefault(device, {})[number] = row

    def complete(self, device: int) -> bool:
        """Whether all of a device's samples have come."""
        return device in self.batches and len(self.found.get(device, {})) >= self.batches[device]

    def result(self) -> tuple[float, float] | None:
        """Return accuracy and loss over all samples that came; None if none did."""
        rows = [row for found in self.found.values() for row in found.values()]
        right, loss, samples = (sum(row[k] for row in rows) for k in range(3))
        return (right / samples, loss / samples) if samples else None


@dataclass
class Estimation:
    """Batch-norm's statistics, estimated for the model after `round` on that round's mini-batches.

    Attributes:
        arrived: devices whose activations at their cuts are here. They are those of the model with which the block
            begins, so they stay true if the device loses its layers.
        closed: whether what comes now comes too late.
        merged: whether the statistics are there to evaluate with.
    """

    round: int
    arrived: set[int] = field(default_factory=set)
    closed: bool = False
    merged: bool = False


@dataclass
class Deliveries:
    """The end of a block: layers on their way to the fed server.

    Attributes:
        by_devices: devices that say that they have delivered.
        own: devices whose layers above the cut the edge server has delivered.
        sending: devices for which it is delivering now; False if what is on its way is of no use any more.
        forgotten: how often the fed server had to be told of the block again; `asked` as it was when it was last asked
            to average.
        chosen: devices that it was asked to average.
        check_at: when to ask the fed server whether it still knows the block; `pause_s` later once more.
    """

    by_devices: set[int] = field(default_factory=set)
    own: set[int] = field(default_factory=set)
    sending: dict[int, bool] = field(default_factory=dict)
    forgotten: int = 0
    asked: int = 0
    chosen: tuple[int, ...] = ()
    deadline: float = math.inf
    check_at: float = math.inf
    pause_s: float = 0.0

    def leave_out(self, device: int) -> None:
        """Forget what was delivered of a device that has lost its layers."""
        self.by_devices.discard(device)
        self.own.discard(device)
        if device in self.sending:
            self.sending[device] = False

    def forget_all(self) -> None:
        """Forget everything that was delivered: the fed server has."""
        for device in {*self.by_devices, *self.own, *self.sending}:
            self.leave_out(device)


@dataclass
class BlockState:
    """The block under way.

    Attributes:
        attempt: a number that no other block had, so that nobody mistakes one for another.
        number: from 1 on.
        rounds: none in the block at a run's end, in which the model is only evaluated.
        cuts: one per device of the fleet.
        planned: how many devices it was planned for.
        result_wanted: whether anybody wants to know how the model does, or only its statistics.
        trained: devices of the last round that have not lost their layers since; `present` are all of them.
        not_finite: devices whose activations, losses or layers contained NaN or infinity.
        reopening: whether the fed server is being asked whether it knows the block.
        test_deadline: when the last evaluation of a run ends.
    """

    attempt: int
    number: int
    first_round: int
    rounds: int
    cuts: tuple[int, ...]
    planned: int
    phase: Phase
    result_wanted: bool = True
    round: Round | None = None
    evaluation: Evaluation | None = None
    estimation: Estimation | None = None
    estimation_deadline: float = math.inf
    test_deadline: float = math.inf
    trained: set[int] = field(default_factory=set)
    present: tuple[int, ...] = ()
    deliveries: Deliveries = field(default_factory=Deliveries)
    not_finite: set[int] = field(default_factory=set)
    reopening: bool = False

    @property
    def last_round(self) -> int:
        """Its last round."""
        return self.first_round + self.rounds - 1

    @property
    def closing(self) -> bool:
        """Whether layers are being delivered and averaged."""
        return self.phase in ("delivering", "averaging")


@dataclass
class Shutdown:
    """The run is over, and devices are being informed."""

    reason: str
    expected: frozenset[int]
    deadline: float
    preparing_deadline: float
    over: bool = False


class State:
    """Everything that the protocol remembers, and the actions that the present event leads to.

    Attributes:
        rounds: how many were trained.
        wake_at: when to look again if nothing happens before.
    """

    def __init__(self, names: Sequence[str], rules: Rules) -> None:
        self.rules = rules
        self.devices = [DeviceState(number, name) for number, name in enumerate(names)]
        self.connections: dict[int, Connection] = {}
        self.block: BlockState | None = None
        self.shutdown: Shutdown | None = None
        self.rounds = 0
        self.wake_at = math.inf
        self.actions: list[Action] = []

    def emit(self, *actions: Action) -> None:
        """Let something be done."""
        self.actions.extend(actions)

    def live(self, device: DeviceState) -> Connection | None:
        """Return the connection of a device that is ready; None if it has none, or one that is being ended."""
        connection = None if device.connection is None else self.connections.get(device.connection)
        return None if connection is None or connection.closing else connection

    def here(self) -> list[DeviceState]:
        """Return the devices that are connected and ready, in the order of the fleet."""
        return [device for device in self.devices if self.live(device) is not None]

    def enough(self) -> bool:
        """Whether enough devices are connected and ready."""
        return len(self.here()) >= self.rules.quorum

    def holding(self) -> list[DeviceState]:
        """Return the devices that are here and hold layers of the block."""
        block = self.block
        return [] if block is None else [device for device in self.here() if device.attempt == block.attempt]

    def current(self, number: int, attempt: int) -> DeviceState | None:
        """Return the device behind a connection, if the connection is its present one and it speaks of our block."""
        connection, block = self.connections.get(number), self.block
        if connection is None or connection.closing or block is None:
            return None
        device = self.devices[connection.device]
        fits = device.connection == number and attempt == device.attempt == block.attempt
        return device if fits else None

    def close(self, number: int | None, reason: str = "", *, violation: bool = False) -> None:
        """End a connection, if it is there."""
        connection = None if number is None else self.connections.get(number)
        if connection is not None and not connection.closing:
            connection.closing = True
            self.emit(Close(connection.number, reason, violation))

    def useless(self, number: int) -> None:
        """Count a message that leads to nothing: some do where devices are late, endless ones do not."""
        connection = self.connections.get(number)
        if connection is not None:
            connection.useless += 1
            if connection.useless > MOST_USELESS:
                self.close(number, f"{MOST_USELESS} messages came that lead to nothing", violation=True)

    def useful(self, number: int) -> None:
        """Count a message that leads to something."""
        connection = self.connections.get(number)
        if connection is not None:
            connection.useless = 0

    def not_finite(self, device: int) -> None:
        """Remember that what a device did led to NaN or infinity: if that happens to most, training has diverged."""
        block = self.block
        if block is None:
            return
        block.not_finite.add(device)
        bad, devices = len(block.not_finite), max(block.planned, len(self.here()))
        if 2 * bad > devices and (bad > 1 or len(self.devices) == 1):
            self.block = None
            what = f"activations, losses or layers of {bad} of {devices} devices contain NaN or infinity"
            remedy = "Lower training.learning_rate, and begin anew in an empty folder."
            self.emit(Diverged(f"round {self.rounds + 1}: {what}: training has diverged. {remedy}"))
