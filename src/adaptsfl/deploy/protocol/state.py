"""The protocol's state: the devices, their connections, and the block under way. Only this package writes it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from adaptsfl.checks import printable
from adaptsfl.deploy.protocol.actions import Action, Close, Diverged
from adaptsfl.deploy.protocol.block import BlockState
from adaptsfl.deploy.protocol.events import Activations
from adaptsfl.deploy.security.limits import MOST_USELESS, MOST_VIOLATIONS, STRIKES

Admission = Literal["", "reopening", "giving"]


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
        answered: the last round of the block that was trained with it, so many parts of it; the gradients of this
            round are kept to be sent again.
        late: whether the last round went on without it; rounds do not wait for it until it sends again.
        strikes: violations in a row; `violations` counts all of them.
        undelivered: how often in a row its layers did not reach the fed server.
        untested: whether its test samples were missing when a block had waited for them until its deadline; the next
            blocks do not wait for them until they have come completely once.
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
    answered_parts: int = 0
    late: bool = False
    strikes: int = 0
    violations: int = 0
    undelivered: int = 0
    quarantined: bool = False
    untested: bool = False
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
        skipped_to: the highest round of a `SendSkip` to the device.
        unwanted: the round of which further parts are ignored, until the device has read what it should send instead.
        useless: messages in a row that had no effect.
        kept: activations that arrived before the edge server held the device's layers; handled once it does.
    """

    number: int
    device: int
    held: int = 0
    planned: int = 0
    stopped: bool = False
    closing: bool = False
    skipped_to: int = 0
    unwanted: int = 0
    useless: int = 0
    kept: Activations | None = None


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

    def awaiting_layers(self, number: int, attempt: int) -> Connection | None:
        """Return a connection over which a plan of the block was sent before the edge server held the layers for it."""
        connection, block = self.connections.get(number), self.block
        if (
            connection is None
            or connection.closing
            or block is None
            or not connection.planned == attempt == block.attempt
        ):
            return None
        device = self.devices[connection.device]
        return connection if device.connection == number and device.admission == "giving" else None

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
