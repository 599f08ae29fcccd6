"""The ledger of one block at the edge server: how it was opened at the fed server, and how long its phases took."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from adaptsfl.deploy import wire_pb2 as wire
from adaptsfl.deploy.layers_file import LayerStates
from adaptsfl.deploy.parties.edge.clock import BlockClock
from adaptsfl.deploy.protocol.events import Averaged
from adaptsfl.deploy.sending import Sending
from adaptsfl.runs.backend import Scene


@dataclass
class Ledger:
    """The ledger of one block.

    Attributes:
        attempt: a number that identifies the block; no other block of the run has it.
        number: counts from 1.
        rounds: their number; 0 in the last block of a run, which only evaluates the model.
        cuts: one per device of the fleet, also for devices that are not connected.
        opening, brought: the call that opened the block at the fed server, kept to be repeated.
        scene: the connected devices when it was planned, and their resources.
        sending: how its activations and gradients are sent.
        known: how many layers the fed server holds: L_c, or more where some become common with this block.
        predicted: seconds of every phase of one round and of one averaging.
        predicted_first: the same where the first round is undivided and exact, because types of numbers are compared.
        clock: the times of its phases.
        estimated: whether batch-norm's statistics are estimated before the evaluation; `merged` once they are merged.
        over: whether the block is over.
        averaged: the fed server's answer.
        evaluation: round, accuracy and loss of the model with which it began.
        own_bits, own_delivered_at: layers that the edge server has delivered for devices, and when it did last.
        delivered_last: the last device to deliver, when it did, and the seconds of its backward pass and its upload.
        evaluates: whether the model with which it began is evaluated.
        opened_s: how long the fed server took to open it.
        placed_at: when the edge server held the layers of all devices, as far as it has been asked to.
        tested: devices whose test samples have arrived since the gradients of the last round were sent.
        answered: when the gradients of every part of the last round were sent.
        present, losses: the devices and the loss of every round.
        compared: types of numbers whose cost in rounds is measured in the first round; `wires` has the factors.
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
    sending: Sending = field(default_factory=Sending)
    estimated: bool = False
    merged: bool = False
    over: bool = False
    averaged: Averaged | None = None
    evaluation: tuple[int, float, float] | None = None
    delivered_last: tuple[int, float, dict[str, float]] | None = None
    evaluates: bool = False
    opened_s: float = 0.0
    placed_at: float = 0.0
    tested: set[int] = field(default_factory=set)
    present: list[tuple[int, ...]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    compared: tuple[str, ...] = ()
    predicted_first: dict[str, float] | None = None
    answered: tuple[float, ...] = ()
    wires: dict[str, float] = field(default_factory=dict)
    bits: float = 0.0
    own_bits: float = 0.0
    own_delivered_at: float = 0.0

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
        """The predicted time of the whole block."""
        first = self.predicted if self.predicted_first is None else self.predicted_first
        every_round, first_round = (_seconds(predicted, "a") for predicted in (self.predicted, first))
        more = max(0, self.rounds - 1)
        return (self.rounds - more) * first_round + more * every_round + _seconds(self.predicted, "b")


def _seconds(predicted: Mapping[str, float], kind: str) -> float:
    """Return the seconds of all phases of a round ("a") or of an averaging ("b")."""
    return sum(seconds for phase, seconds in predicted.items() if phase.startswith(kind))
