"""The state of the block under way: its rounds, its evaluation, and layers on their way to the fed server."""

import math
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["placing", "estimating", "merging", "training", "testing", "delivering", "averaging"]


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
    """An evaluation under way, of the model after `round`, with which the block began; rounds do not wait for it.

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
        """Record one mini-batch; a device that was restarted sends all of them again."""
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
        test_deadline: when the block ends, even if test samples are missing.
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
    def placed(self) -> bool:
        """Whether the edge server has fetched and placed its layers."""
        return self.phase != "placing"

    @property
    def averaged(self) -> bool:
        """Whether its layers are averaged, and only test samples are missing."""
        return self.phase == "testing" and self.rounds > 0

    @property
    def closing(self) -> bool:
        """Whether layers are being delivered and averaged."""
        return self.phase in ("delivering", "averaging")
