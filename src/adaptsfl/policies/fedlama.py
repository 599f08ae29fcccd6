"""FedLAMA: layers whose copies differ little are averaged less often (Lee et al., 2023).

Paper: the discrepancy of a layer is d_l = (1/m) Σ_i ‖u_l − x_l^i‖² / (τ_l dim(u_l)). Here: the square of the mean over
devices of ‖w_i − w̄‖/‖w̄‖, over τ_l. Because: training measures this. It equals the paper's, up to the spread between
devices and a common factor, if the weights of all layers have the same mean square.
Paper: all layers of the model. Here: the client-specific ones. Because: the others have no copies.
"""

from collections.abc import Sequence

import numpy as np

from adaptsfl import checks
from adaptsfl.decisions import Decision
from adaptsfl.policies.interval_rules import IntervalPolicy, within_limits
from adaptsfl.policies.policy import Observation

LARGEST = 1e6  # limit of the divergence, which is infinite for weights that average to zero


class LayerwiseAdaptive(IntervalPolicy):
    """Layers of high discrepancy are averaged every `interval` rounds (τ'), the others every `factor` (φ) · τ' rounds.

    A block is φτ' rounds, after which all layers are averaged and chosen anew. In the first, all are averaged every τ'.
    """

    title = "FedLAMA"
    divergence = True

    def __init__(
        self, interval: int = 6, factor: int = 2, cut: int | None = None, cuts: Sequence[int] | None = None
    ) -> None:
        super().__init__(cut, cuts)
        self.base = checks.whole_number("interval", interval)
        self.factor = checks.whole_number("factor", factor, at_least=2)
        self.last: dict[int, int] = {}  # τ_l of the last block

    def decide(self, seen: Observation) -> Decision:
        """Return φτ' rounds, with an interval for every client-specific layer."""
        base = within_limits(seen, self.base)
        cuts = self.cuts_for(seen, base)
        seldom = self._seldom(seen, max(cuts))
        # The first block names its layers too, so that a deployment refuses the policy before it trains.
        self.last = {layer: base * (self.factor if layer in seldom else 1) for layer in range(1, max(cuts) + 1)}
        return Decision(cuts, base, self.last, rounds=self.factor * base)

    def _seldom(self, seen: Observation, deepest: int) -> set[int]:
        """Return the layers with δ_l < 1 − λ_l, from the least discrepancy on (Algorithm 2).

        δ_l is the share of layers 1..l, in that order, in the discrepancy of all parameters, and λ_l their share in the
        parameters. Layers that have just become client-specific have no discrepancy yet, and are not returned.
        """
        apart = np.minimum(seen.divergence[:deepest], LARGEST)
        ages = np.array([self.last.get(layer, 1) for layer in range(1, len(apart) + 1)])
        per_parameter = apart**2 / ages
        size = np.diff(seen.costs.client_model_bits, prepend=0.0)[: len(apart)]
        order = np.argsort(per_parameter, kind="stable")
        discrepancy, parameters = np.cumsum((per_parameter * size)[order]), np.cumsum(size[order])
        if not len(apart) or not parameters[-1]:
            return set()
        delta, lambda_ = discrepancy / (discrepancy[-1] or 1.0), parameters / parameters[-1]
        return {int(layer) + 1 for layer in order[delta < 1 - lambda_]}
