"""When layers are averaged: the plan of a training run, and the count of rounds that it needs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from adaptsfl import checks
from adaptsfl.errors import InvalidInput


@dataclass(frozen=True)
class TrainingPlan:
    """Where every device cuts the model and how often the client-specific layers are averaged.

    Attributes:
        cuts: μ, one cut (1..L) per device; layers up to the deepest, L_c, have one copy per device.
        interval: I, in rounds; None never averages (parallel split learning).
        layer_intervals: layers (1..L_c) that have another interval than I.
    """

    cuts: tuple[int, ...]
    interval: int | None
    layer_intervals: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        cuts = checks.cut_numbers("plan.cuts", self.cuts, checks.LARGEST_WHOLE)
        object.__setattr__(self, "cuts", tuple(int(cut) for cut in cuts))
        if self.interval is not None:
            object.__setattr__(self, "interval", checks.whole_number("plan.interval", self.interval))
        intervals = {}
        for layer, interval in self.layer_intervals.items():
            number = checks.whole_number("plan.layer_intervals", layer, at_least=-checks.LARGEST_WHOLE)
            intervals[number] = checks.whole_number(f"plan.layer_intervals[{layer}]", interval)
            if not 1 <= layer <= self.deepest:
                problem = f"names layer {layer}, but client-specific are 1 to {self.deepest}"
                raise InvalidInput("plan.layer_intervals", problem, "Name layers up to the deepest cut only")
        object.__setattr__(self, "layer_intervals", MappingProxyType(intervals))

    @property
    def deepest(self) -> int:
        """L_c, the number of client-specific layers."""
        return max(self.cuts)

    def interval_of(self, layer: int) -> int | None:
        """Return after how many rounds `layer` is averaged; None means never."""
        return self.layer_intervals.get(layer, self.interval)

    def check(self, devices: int, layers: int) -> None:
        """Refuse a plan for another number of devices or of layers."""
        if len(self.cuts) != devices:
            raise InvalidInput("plan.cuts", f"has {len(self.cuts)} entries", f"Give {devices}, one per device")
        checks.cut_numbers("plan.cuts", self.cuts, layers)


class Schedule:
    """Counts rounds: which layers are to be averaged, and when the plan may change.

    A layer is averaged once its age, the rounds since its copies were last equal, has reached its interval. With one
    interval for all that is Algorithm 1's (t - ρ) mod I = 0; ages also carry over a change of the plan.
    """

    def __init__(self, plan: TrainingPlan) -> None:
        self.plan = plan
        self.round = 0  # rounds done, t
        self.ages = [0] * plan.deepest
        self.planned_at = 0  # ρ

    @property
    def at_boundary(self) -> bool:
        """Whether a whole number of intervals has passed since the plan began."""
        return self.plan.interval is None or (self.round - self.planned_at) % self.plan.interval == 0

    def due(self) -> list[int]:
        """Return the layers (1..L_c) to be averaged at the end of the next round."""
        due = []
        for layer, age in enumerate(self.ages, start=1):
            interval = self.plan.interval_of(layer)
            if interval is not None and age + 1 >= interval:
                due.append(layer)
        return due

    @property
    def lone_round(self) -> bool:
        """Whether all copies are equal now and all are averaged after the next round, as always with I = 1."""
        return not any(self.ages) and len(self.due()) == self.plan.deepest

    def advance(self) -> list[int]:
        """End a round and return the layers to be averaged now."""
        due = self.due()
        self.round += 1
        self.ages = [0 if layer in due else age + 1 for layer, age in enumerate(self.ages, start=1)]
        return due

    def change(self, plan: TrainingPlan) -> None:
        """Follow another plan from the next round on; layers that become client-specific begin as equal copies."""
        if not self.at_boundary:
            assert self.plan.interval is not None
            since = (self.round - self.planned_at) % self.plan.interval
            remedy = f"Change it {self.plan.interval - since} round(s) later"
            raise InvalidInput("plan", f"changes {since} round(s) after the last averaging", remedy)
        self.ages = [*self.ages[: plan.deepest], *[0] * (plan.deepest - len(self.ages))]
        self.plan, self.planned_at = plan, self.round
