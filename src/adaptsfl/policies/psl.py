"""PSL: parallel split learning, whose client-specific layers are never averaged."""

from collections.abc import Sequence

from adaptsfl import checks
from adaptsfl.decisions import Decision
from adaptsfl.policies.place import check_options, fastest_cuts, given_cuts
from adaptsfl.policies.policy import BLOCK_ROUNDS, BasePolicy, Observation


class ParallelSplit(BasePolicy):
    """Never averages. Without `cut` or `cuts`, the cuts with the shortest round are taken, anew every `rounds` rounds.

    They are blind to convergence: by the bound, layers that are never averaged make no progress at any cut.
    """

    title = "PSL"

    def __init__(self, cut: int | None = None, cuts: Sequence[int] | None = None, rounds: int = BLOCK_ROUNDS) -> None:
        check_options(cut, cuts)
        self.cut, self.cuts = cut, cuts
        self.rounds = checks.whole_number("rounds", rounds)

    def decide(self, seen: Observation) -> Decision:
        """Return `rounds` rounds without averaging."""
        cuts = given_cuts(seen, self.cut, self.cuts)
        chosen = fastest_cuts(seen, None) if cuts is None else cuts
        return Decision(tuple(int(cut) for cut in chosen), None, rounds=self.rounds)
