"""The state of the block under way: its rounds, its evaluation, and layers on their way to the fed server."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from adaptsfl.deploy.sending import Sending

Phase = Literal["placing", "estimating", "merging", "training", "testing", "delivering", "averaging"]


@dataclass
class Round:
    """The round whose activations are being collected, or that is being trained; part by part.

    A device takes part as long as it sends its parts in time, and in their order: who misses one is left out until the
    next round.

    Attributes:
        parts: into how many parts its mini-batches are divided; `part` is the one under way, from 0.
        arrived: devices whose activations of that part have arrived.
        sent: by device: how many of its parts have arrived.
        members: devices with which the part before was trained: nobody else may train this one. None in part 0.
        awaited: devices that the part has waited for at some time.
        early: connections that are told to go on with the next round once this one is trained.
        lost: devices that have lost their layers since training began; a repeated training leaves them out.
        watched: one of the devices that it waits for, None if there is none: until that one sends, nobody has to look
            at the others. Every event but an arrival makes the protocol look at all of them again.
        began_again: whether it has been begun before, and devices may still be sending parts for that.
    """

    number: int
    deadline: float = math.inf
    parts: int = 1
    part: int = 0
    arrived: set[int] = field(default_factory=set)
    sent: dict[int, int] = field(default_factory=dict)
    members: set[int] | None = None
    awaited: set[int] = field(default_factory=set)
    training: bool = False
    early: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    watched: int | None = None
    began_again: bool = False

    @property
    def under_way(self) -> bool:
        """Whether it is being trained, so that no device can join it any more."""
        return self.training or self.part > 0

    def takes(self, device: int, part: int) -> bool:
        """Whether a device can still send a part."""
        if device in self.lost or (self.members is not None and device not in self.members):
            return False
        return part > self.part or (part == self.part and not self.training)

    def arrives(self, device: int) -> None:
        """Count the next part of a device."""
        self.sent[device] = self.sent.get(device, 0) + 1
        if self.sent[device] == self.part + 1:
            self.arrived.add(device)

    def next_part(self, deadline: float) -> None:
        """Go on with the next part, among those with whom this one was trained."""
        self.members = self.arrived - self.lost
        self.part, self.training, self.deadline = self.part + 1, False, max(self.deadline, deadline)
        self.arrived = {device for device in self.members if self.sent[device] > self.part}
        self.awaited, self.lost, self.watched = set(), set(), None

    def reject(self, devices: Collection[int]) -> None:
        """Collect the part once more, without these devices and those that have lost their layers."""
        for device in {*devices, *self.lost}:
            self._forget(device)
        self.training, self.lost, self.awaited = False, set(), set()

    def leave_out(self, device: int) -> None:
        """Drop the activations that a device sent before it lost its layers."""
        if self.training:
            self.lost.add(device)
            self.sent.pop(device, None)
        else:
            self._forget(device)

    def _forget(self, device: int) -> None:
        self.arrived.discard(device)
        self.sent.pop(device, None)
        if self.members is not None:
            self.members.discard(device)


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
        sending: in how many parts mini-batches are sent.
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
    sending: Sending = field(default_factory=Sending)
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
