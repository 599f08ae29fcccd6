"""What a run leaves behind: one line of JSON per block of rounds, from which everything is plotted and re-timed."""

from dataclasses import dataclass

from adaptsfl.latency import PHASES


@dataclass(frozen=True)
class Block:
    """The rounds between two decisions of the policy.

    Attributes:
        block: its number, from 1 on.
        first_round, rounds: rounds `first_round` to `first_round + rounds - 1`, counted from 1.
        time_s: virtual seconds since the run began, at the end of the block.
        interval: I; None never averages.
        cuts: one per device of the whole fleet, where its model was cut; 0 for a device that was not there.
        deepest: L_c, the layers of which every device has its own copy.
        layer_intervals: layers with an interval of their own, as text keys.
        seconds: virtual seconds of the block by phase (a1 … b3, see `latency`), which add up to its length.
        bottleneck: who held up the phase that took longest, and that phase: ("device 3", "a2").
        bits: what was sent over all links in the block.
        loss: training loss, the mean over devices and rounds.
        evaluations: [round, virtual seconds, test accuracy, test loss] where the model was evaluated in the block.
        estimates: what was believed about convergence when the plan was made; empty for policies that do not ask.
        resources: per rate of the fleet (see `fleet.RATES`), as measured when the plan was made, one per device.
        predicted_s: how long the planner thought the block would take.
    """

    block: int
    first_round: int
    rounds: int
    time_s: float
    interval: int | None
    cuts: tuple[int, ...]
    deepest: int
    layer_intervals: dict[str, int]
    seconds: dict[str, float]
    bottleneck: tuple[str, str]
    bits: float
    loss: float
    evaluations: tuple[tuple[int, float, float, float], ...]
    estimates: dict[str, object]
    resources: dict[str, tuple[float, ...]]
    predicted_s: float

    @property
    def length_s(self) -> float:
        """Virtual seconds of the block."""
        return sum(self.seconds[phase] for phase in PHASES)
