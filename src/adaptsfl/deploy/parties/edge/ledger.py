"""The books of one block at the edge server: what was agreed with the fed server, and how long everything took."""

from dataclasses import dataclass, field

from adaptsfl.deploy import wire_pb2 as wire
from adaptsfl.deploy.layers_file import LayerStates
from adaptsfl.deploy.parties.edge.clock import BlockClock
from adaptsfl.deploy.protocol.events import Averaged
from adaptsfl.runs.backend import Scene


@dataclass
class Ledger:
    """The books of one block.

    Attributes:
        attempt: a number that no other block had.
        number: from 1 on.
        rounds: none in the block at a run's end, in which the model is only evaluated.
        cuts: one per device of the fleet, also for those who may still come.
        opening, brought: how the block was opened at the fed server, which may have to be repeated.
        scene: who was there when it was planned, and what was known of them.
        known: how many layers the fed server holds of it: L_c, or more where some become common with it.
        predicted: seconds of every phase of one round and of one averaging.
        clock: how long everything took.
        estimated: whether batch-norm's statistics are estimated before it is evaluated; `merged` once they were.
        over: whether the block is over.
        averaged: the fed server's answer.
        evaluation: round, accuracy and loss of the model with which it began.
        delivered_last: who was the last to deliver, when, and at how many bits per second.
        headers: by device: what came with its last activations.
        present, losses: by round.
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
    estimated: bool = False
    merged: bool = False
    over: bool = False
    averaged: Averaged | None = None
    evaluation: tuple[int, float, float] | None = None
    delivered_last: tuple[int, float, float] | None = None
    headers: dict[int, wire.Activations] = field(default_factory=dict)
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
