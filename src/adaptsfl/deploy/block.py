"""A block of rounds as the edge server sees it: who has sent what, how it is evaluated, how long its phases took."""

from dataclasses import dataclass, field

from torch import Tensor

from adaptsfl.deploy import wire_pb2 as wire
from adaptsfl.deploy.clock import BlockClock
from adaptsfl.deploy.layers_file import LayerStates
from adaptsfl.deploy.sessions import Arrival
from adaptsfl.runs.backend import Scene


@dataclass
class Round:
    """A round, and the activations that have come for it, by device; once it is closed no more are taken.

    Attributes:
        lost: who has lost its layers since it was closed: should it be trained once more, then without them.
    """

    number: int
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    closed: bool = False
    lost: set[int] = field(default_factory=set)

    def leave_out(self, device: int) -> None:
        """Drop what a device has sent before it lost its layers."""
        if self.closed:
            self.lost.add(device)
        else:
            self.arrivals.pop(device, None)


@dataclass
class Tests:
    """An evaluation under way, of the model after `round`.

    Attributes:
        found: by device and number of the mini-batch: samples recognised, the sum of their losses, how many they are.
        batches: by device: how many mini-batches it has.
    """

    round: int
    found: dict[int, dict[int, tuple[int, float, int]]] = field(default_factory=dict)
    batches: dict[int, int] = field(default_factory=dict)

    def announced(self, device: int, batches: int) -> int:
        """Return how many mini-batches a device has; if it tells another number it has begun a new life."""
        if self.batches.get(device) != batches:
            self.batches[device], self.found[device] = batches, {}
        return batches

    def add(self, device: int, number: int, row: tuple[int, float, int]) -> None:
        """Take in one mini-batch; after a lost connection a device sends all of them again."""
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
        sent: by device: activations at its cut. They are those of the model with which the block begins, so they stay
            true if the device loses its layers.
        closed: whether what comes now comes too late.
        merged: whether the statistics are there to evaluate with.
    """

    round: int
    sent: dict[int, Tensor] = field(default_factory=dict)
    closed: bool = False
    merged: bool = False


@dataclass
class OpenBlock:
    """The block that is being trained.

    Attributes:
        attempt: a number that no other block had, so that nobody mistakes one for another.
        number: from 1 on.
        rounds: none in the block at a run's end, in which the model is only evaluated.
        cuts: one per device of the fleet, also for those who may still come.
        opening, brought: what the fed server was told, in case it has to be told again.
        scene: who was there when it was planned, and what was known of them.
        known: how many layers the fed server holds of it: L_c, or more where some become common with it.
        predicted: seconds of every phase of one round and of one averaging.
        estimation: of batch-norm's statistics, before it is evaluated; None if there is none.
        trained: who took part in the last round and has not lost its layers since.
        closing: whether layers are being delivered: `delivered` by devices, `delivered_for` them by the edge server.
        over: whether it was averaged; nobody trains in it any more.
        forgotten: how often the fed server had to be told of it again.
        spoilt: whose activations, losses or layers came to no numbers.
        delivered_last: who was the last of them, when, and at how many bits per second.
        present, losses: by round.
        told: by device: what came with its last activations.
        clock: how long everything took.
    """

    attempt: int
    number: int
    first_round: int
    rounds: int
    interval: int
    cuts: tuple[int, ...]
    opening: wire.Opening
    brought: LayerStates
    scene: Scene
    known: int
    predicted: dict[str, float]
    clock: BlockClock
    estimation: Estimation | None = None
    trained: set[int] = field(default_factory=set)
    closing: bool = False
    delivered: set[int] = field(default_factory=set)
    delivered_for: set[int] = field(default_factory=set)
    over: bool = False
    forgotten: int = 0
    spoilt: set[int] = field(default_factory=set)
    delivered_last: tuple[int, float, float] | None = None
    told: dict[int, wire.Activations] = field(default_factory=dict)
    present: list[tuple[int, ...]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    bits: float = 0.0

    @property
    def last_round(self) -> int:
        """Its last round."""
        return self.first_round + self.rounds - 1

    @property
    def deepest(self) -> int:
        """L_c."""
        return max(self.cuts)

    @property
    def predicted_s(self) -> float:
        """How long all of it was thought to take."""
        every_round = sum(seconds for phase, seconds in self.predicted.items() if phase.startswith("a"))
        averaging = sum(seconds for phase, seconds in self.predicted.items() if phase.startswith("b"))
        return self.rounds * every_round + averaging
