"""When layers are averaged under a decision."""

from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput


class Schedule:
    """Counts rounds: which layers are to be averaged, and when the plan may change.

    A layer is averaged once its age, the rounds since its copies were last equal, has reached its interval. With one
    interval for all that is Algorithm 1's (t - ρ) mod I = 0; ages also carry over a change of the plan.
    """

    def __init__(self, plan: Decision) -> None:
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

    def change(self, plan: Decision) -> None:
        """Follow another plan from the next round on; layers that become client-specific begin as equal copies."""
        if not self.at_boundary:
            assert self.plan.interval is not None
            since = (self.round - self.planned_at) % self.plan.interval
            remedy = f"Change it {self.plan.interval - since} round(s) later"
            raise InvalidInput("plan", f"changes {since} round(s) after the last averaging", remedy)
        self.ages = [*self.ages[: plan.deepest], *[0] * (plan.deepest - len(self.ages))]
        self.plan, self.planned_at = plan, self.round
