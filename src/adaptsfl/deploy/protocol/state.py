"""The protocol's state: the devices, their connections, the block under way. Only this package writes it."""

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
    """A recipe's settings for waiting.

    Attributes:
        quorum: the fewest devices with which a run goes on.
        round_deadline_s: the time after which a round, a delivery or an evaluation goes on without late devices.
    """

    quorum: int
    round_deadline_s: float


@dataclass
class DeviceState:
    """A device of the fleet, connected or not.

    Attributes:
        connection: its connection, once the device is ready; `newest` is set also before, and while it closes.
        samples: the number of its training samples; 0 until it has joined once.
        attempt: the block in which both sides hold layers of this device; 0 if none.
        cut: its cut in that block.
        admission: what it waits for: "reopening", until the fed server confirms that it knows the block; "giving",
            until the edge server holds its layers.
        answered: the last round of the block that was trained with it; its gradients are kept to be sent again.
        late: whether the last round went on without it; rounds do not wait for it until it sends again.
        strikes: violations in a row; `violations` counts all of them.
        undelivered: how often in a row its layers did not reach the fed server.
        gave_up: whether it reported that it cannot go on.
        informed: whether it knows that the run is over.
        last_round, rounds: the last round that was trained with it, and the number of such rounds.
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
        """Count a delivery for which the block waited, and which did not come."""
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
        stopped: whether the message that the run is over was sent to the device.
        closing: whether the edge server is ending it.
        skipped_to: the round of the last `SendSkip` to the device.
        useless: messages in a row that had no effect.
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
        arrived: devices whose activations have arrived.
        awaited: devices that the round has waited for at some time.
        early: connections that have sent activations of the next round while this one is being trained.
        lost: devices that have lost their layers since training began; a repeated training leaves them out.
        watched: one of the devices that it waits for, None if there is none: until that one sends, nobody has to look
            at the others. Every event but an arrival makes the protocol look at all of them again.
    """

    number: int
    deadline: float = math.inf
    arrived: set[int] = field(default_factory=set)
    awaited: set[int] = field(default_factory=set)
    training: bool = False
    early: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    watched: int | None = None

    def leave_out(self, device: int) -> None:
        """Drop the activations that a device sent before it lost its layers."""
        if self.training:
            self.lost.add(device)
        else:
            self.arrived.discard(device)


@dataclass
class Evaluation:
    """An evaluation under way, of the model after `round`.

    Attributes:
        found: by device and number of the mini-batch: correctly classified samples, sum of losses, number of samples.
        batches: the number of mini-batches of each device.
    """

    round: int
    found: dict[int, dict[int, tuple[int, float, int]]] = field(default_factory=dict)
    batches: dict[int, int] = field(default_factory=dict)

    def announced(self, device: int, batches: int) -> None:
        """Record how many mini-batches a device has; a different count means that the device was restarted."""
        if self.batches.get(device) != batches:
            self.batches[device], self.found[device] = batches, {}

    def add(self, device: int, number: int, row: tuple[int, float, int]) -> None:
        """Record one mini-batch; after a lost connection a device sends all of them again."""
        if number < self.batches.get(device, 0):
            self.found.setdefault(device, {})[number] = row

    def complete(self, device: int) -> bool:
        """Whether all mini-batches of a device were evaluated."""
        return device in self.batches and len(self.found.get(device, {})) >= self.batches[device]

    def result(self) -> tuple[float, float] | None:
        """Return accuracy and loss over all evaluated samples; None if there are none."""
        rows = [row for found in self.found.values() for row in found.values()]
        right, loss, samples = (sum(row[k] for row in rows) for k in range(3))
        return (right / samples, loss / samples) if samples else None


@dataclass
class Estimation:
    """Batch-norm's statistics, estimated for the model after `round` on that round's mini-batches.

    Attributes:
        arrived: devices whose activations at their cuts have arrived. They belong to the model with which the block
            begins, so they stay valid if the device loses its layers.
        closed: whether activations that arrive now are too late.
        merged: whether the merged statistics are available for the evaluation.
    """

    round: int
    arrived: set[int] = field(default_factory=set)
    closed: bool = False
    merged: bool = False


@dataclass
class Deliveries:
    """The end of a block: layers on their way to the fed server.

    Attributes:
        by_devices: devices that report that they have delivered.
        own: devices whose layers above the cut the edge server has delivered.
        sending: devices for which it is delivering now; False if that delivery has become obsolete.
        forgotten: how often the fed server had to open the block again; `asked` is its value at the last request to
            average.
        chosen: devices of the last request to average.
        check_at: when to ask the fed server whether it still knows the block; the next check is `pause_s` later.
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
        """Discard the deliveries for a device that has lost its layers."""
        self.by_devices.discard(device)
        self.own.discard(device)
        if device in self.sending:
            self.sending[device] = False

    def forget_all(self) -> None:
        """Discard all deliveries, because the fed server has lost them."""
        for device in {*self.by_devices, *self.own, *self.sending}:
            self.leave_out(device)


@dataclass
class BlockState:
    """The block under way.

    Attributes:
        attempt: a number that identifies the block; no other block of the run has it.
        number: counts from 1.
        rounds: their number; 0 in the last block of a run, which only evaluates the model.
        cuts: one per device of the fleet.
        planned: the number of devices for which it was planned.
        result_wanted: whether the result of the evaluation is needed; if not, only the statistics are.
        trained: devices of the last round that have not lost their layers since; `present` are all of that round.
        not_finite: devices whose activations, losses or layers contained NaN or infinity.
        reopening: whether a check that the fed server knows the block is under way.
        test_deadline: the deadline of the last evaluation of a run.
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
    """The protocol's state, and the actions that follow from the current event.

    Attributes:
        rounds: the number of rounds trained.
        wake_at: when the caller hands in `DeadlinePassed` if no other event comes before.
        only_arrived: whether the current event has changed nothing but that one more device's activations are here.
    """

    def __init__(self, names: Sequence[str], rules: Rules) -> None:
        self.rules = rules
        self.devices = [DeviceState(number, name) for number, name in enumerate(names)]
        self.connections: dict[int, Connection] = {}
        self.block: BlockState | None = None
        self.shutdown: Shutdown | None = None
        self.rounds = 0
        self.wake_at = math.inf
        self.only_arrived = False
        self.actions: list[Action] = []

    def emit(self, *actions: Action) -> None:
        """Add actions."""
        self.actions.extend(actions)

    def live(self, device: DeviceState) -> Connection | None:
        """Return the connection of a device that is ready; None if it has none, or one that is being ended."""
        connection = None if device.connection is None else self.connections.get(device.connection)
        return None if connection is None or connection.closing else connection

    def here(self) -> list[DeviceState]:
        """Return the devices that are connected and ready, in the order of the fleet."""
        found, open_ = [], self.connections  # as `live`, without a call per device: every event asks for all of them
        for device in self.devices:
            if device.connection is not None:
                connection = open_.get(device.connection)
                if connection is not None and not connection.closing:
                    found.append(device)
        return found

    def enough(self) -> bool:
        """Whether enough devices are connected and ready."""
        return len(self.here()) >= self.rules.quorum

    def holding(self) -> list[DeviceState]:
        """Return the devices that are connected and ready, and hold layers of the block."""
        block = self.block
        return [] if block is None else [device for device in self.here() if device.attempt == block.attempt]

    def current(self, number: int, attempt: int) -> DeviceState | None:
        """Return the device of a connection, if that is its current one and `attempt` is the block under way."""
        connection, block = self.connections.get(number), self.block
        if connection is None or connection.closing or block is None:
            return None
        device = self.devices[connection.device]
        fits = device.connection == number and attempt == device.attempt == block.attempt
        return device if fits else None

    def close(self, number: int | None, reason: str = "", *, violation: bool = False) -> None:
        """End a connection, if it exists."""
        connection = None if number is None else self.connections.get(number)
        if connection is not None and not connection.closing:
            connection.closing = True
            self.emit(Close(connection.number, reason, violation))

    def useless(self, number: int) -> None:
        """Count a message without effect: late devices send a few; too many in a row are a violation."""
        connection = self.connections.get(number)
        if connection is not None:
            connection.useless += 1
            if connection.useless > MOST_USELESS:
                self.close(number, f"{MOST_USELESS} messages came that lead to nothing", violation=True)

    def useful(self, number: int) -> None:
        """Reset the count of messages without effect."""
        connection = self.connections.get(number)
        if connection is not None:
            connection.useless = 0

    def not_finite(self, device: int) -> None:
        """Record that a device's data led to NaN or infinity; if that is so for most devices, training has diverged."""
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
