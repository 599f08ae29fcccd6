"""How many rounds a plan needs, R(I, L_c): the paper's bound, growth with the interval, or a table.

The planner takes any `RoundsModel`. The bound (Theorem 1, Corollary 1) counts rounds to a target and forbids intervals
whose drift leaves no progress; the other forms are measured, and count rounds relative to a unit.
"""

from adaptsfl.convergence.bound import Constants, ConvergenceModel, drift_per_layer, gradient_bound, noise_floor
from adaptsfl.convergence.estimator import RoundsEstimate, RoundsEstimator
from adaptsfl.convergence.measured import GrowthRounds, PowerRounds, RoundsTable
from adaptsfl.convergence.rounds import LARGEST_POWER, LONGEST_INTERVAL, Form, Intervals, RoundsModel
from adaptsfl.convergence.section import model_from

__all__ = [
    "LARGEST_POWER",
    "LONGEST_INTERVAL",
    "Constants",
    "ConvergenceModel",
    "Form",
    "GrowthRounds",
    "Intervals",
    "PowerRounds",
    "RoundsEstimate",
    "RoundsEstimator",
    "RoundsModel",
    "RoundsTable",
    "drift_per_layer",
    "gradient_bound",
    "model_from",
    "noise_floor",
]
