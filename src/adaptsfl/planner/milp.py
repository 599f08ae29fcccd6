"""The cuts for a fixed interval and a fixed λ, as a mixed-integer linear program for HiGHS (the paper's problem P₂').

Variables: μ_{i,j} ∈ {0, 1} for every device and allowed cut, and T₁ … T₆ ≥ 0. Minimise

    Q − λP = T₃ + T_s^F + T_s^B + T₄ + (T₅ + T₆)/I − λ (1/R(I, 1) − T₁)

subject to C3 (one cut per device) and R1 … R8 (the maxima). T₁ is the progress of a round that is lost because L_c is
above 1, 1/R(I, 1) − 1/R(I, L_c): a maximum over devices, because R does not fall with L_c. With the paper's bound
that is γI²·4β²γ²(G̃²(L_c) − G̃²(1))/2ϑ, the paper's T₁ up to constants. The constant −λ/R(I, 1) changes no choice and
is left out. Fixed seconds of a transfer between the servers count only if there is something to send: one more binary
variable, z = 1 if some device's cut is shallower than the deepest. b2 depends on T₂ alone.
HiGHS works with absolute tolerances, so T₁ and T₂ are given in units of their largest value, the other T in units of
the seconds that a known plan takes, and the objective is divided by the same seconds.
"""

from dataclasses import dataclass

import numpy as np
import scipy.optimize
import scipy.sparse

from adaptsfl import latency
from adaptsfl.checks import FloatArray, IntArray
from adaptsfl.errors import SolverError
from adaptsfl.planner.problem import PlanProblem

RELATIVE_GAP = 1e-9
T1, T2, T3, T4, T5, T6, Z = range(7)  # columns of the auxiliary variables, after all the μ
OPTIMAL, LIMIT_REACHED = 0, 1  # scipy's codes


@dataclass(frozen=True)
class MilpAnswer:
    """The cuts HiGHS chose (None if it found none in time) and whether it claims them to be optimal."""

    cuts: IntArray | None
    finished: bool


class CutProgram:
    """The constraints of P₂', built once per interval; `solve` takes a λ and a plan to scale by."""

    def __init__(self, problem: PlanProblem, interval: int) -> None:
        self.problem = problem
        self.interval = interval
        progress = 1 / problem.convergence.rounds(interval, np.arange(1, problem.layers + 1))
        self.lost = progress[0] - progress
        # Paper: P > 0 is not required. Here: cuts at which the drift leaves no progress are forbidden. Because: beyond
        # that pole the fraction is negative and would look best.
        self.cut_index, self.device = np.nonzero(problem.allowed & (progress > 0)[:, None])
        self.choices = self.device.size
        self.lost_scale = float(self.lost.max()) or 1.0
        self.bits_scale = float(problem.costs.client_model_bits[-1]) or 1.0

    def solve(self, price: float, reference: IntArray, time_limit_s: float) -> MilpAnswer:
        """Minimise Q − λP for λ = `price`, scaled by the times of the plan `reference`."""
        problem, interval = self.problem, self.interval
        seconds = max(float(problem.round_s(reference)), float(problem.aggregation_s(reference)) / interval) or 1.0
        matrix, lower, upper = self._constraints(seconds)
        answer = scipy.optimize.milp(
            self._objective(price, seconds),
            integrality=np.repeat([1, 0, 1], [self.choices, 6, 1]),
            bounds=scipy.optimize.Bounds(0, np.repeat([1, np.inf, 1], [self.choices, 6, 1])),
            constraints=scipy.optimize.LinearConstraint(matrix, lower, upper),
            options={"mip_rel_gap": RELATIVE_GAP, "time_limit": max(time_limit_s, 0.01)},
        )
        if answer.status not in (OPTIMAL, LIMIT_REACHED):
            raise SolverError(f"HiGHS could not solve the cuts for interval {interval}: {answer.message}")
        cuts = None if answer.x is None else self._cuts(answer.x)
        return MilpAnswer(cuts, finished=answer.status == OPTIMAL)

    def _objective(self, price: float, seconds: float) -> FloatArray:
        """Return the coefficients of (Q − λP) / seconds, without its constant."""
        problem = self.problem
        turn_s = problem.batch_size * latency.remaining_flops(problem.costs) / problem.fleet.server.flops
        times = np.zeros(7)
        times[T1] = price * self.lost_scale / seconds
        times[[T3, T4]] = 1.0
        times[[T5, T6]] = 1.0 / self.interval
        if problem.fleet.server.averaging_bps is not None:
            averaged_s = problem.devices * self.bits_scale / problem.fleet.server.averaging_bps
            times[T2] = averaged_s / self.interval / seconds
        return np.concatenate((turn_s[self.cut_index] / seconds, times))

    def _constraints(self, seconds: float) -> tuple[scipy.sparse.csr_array, FloatArray, FloatArray]:
        """Return C3 and R1 … R8, in this order, with lower and upper limits of every row."""
        problem, costs, fleet = self.problem, self.problem.costs, self.problem.fleet
        every_cut = np.arange(1, problem.layers + 1)[:, None]
        bits = costs.client_model_bits[every_cut - 1] / self.bits_scale
        per_device = [
            (self.lost[:, None] / self.lost_scale, T1),
            (bits, T2),
            (latency.to_server_s(costs, fleet, every_cut, problem.batch_size) / seconds, T3),
            (latency.from_server_s(costs, fleet, every_cut, problem.batch_size) / seconds, T4),
            (latency.client_model_upload_s(costs, fleet, every_cut) / seconds, T5),
            (latency.client_model_download_s(costs, fleet, every_cut) / seconds, T6),
        ]
        blocks = [self._rows(np.ones((problem.layers, 1)), None)]
        blocks += [self._rows(values, maximum) for values, maximum in per_device]
        server = fleet.server
        blocks += [
            self._server_row(self.bits_scale / server.to_fed_bps / seconds, T5, server.to_fed_s / seconds),
            self._server_row(self.bits_scale / server.from_fed_bps / seconds, T6, server.from_fed_s / seconds),
        ]
        if server.to_fed_s or server.from_fed_s:
            blocks.append(self._server_row(1 / problem.devices, Z))  # Λ / (N δ_L) ≤ z
        matrix = scipy.sparse.csr_array(scipy.sparse.vstack(blocks))
        at_most_zero = np.zeros(matrix.shape[0] - problem.devices)
        lower = np.concatenate((np.ones(problem.devices), np.full_like(at_most_zero, -np.inf)))
        return matrix, lower, np.concatenate((np.ones(problem.devices), at_most_zero))

    def _rows(self, values: FloatArray, maximum: int | None) -> scipy.sparse.coo_array:
        """Return one row per device: Σ_j μ_{i,j} values_{j,i} [− T_maximum]."""
        devices = self.problem.devices
        chosen = np.broadcast_to(values, (self.problem.layers, devices))[self.cut_index, self.device]
        rows, columns = self.device, np.arange(self.choices)
        if maximum is not None:
            chosen = np.concatenate((chosen, -np.ones(devices)))
            rows = np.concatenate((rows, np.arange(devices)))
            columns = np.concatenate((columns, np.full(devices, self.choices + maximum)))
        return scipy.sparse.coo_array((chosen, (rows, columns)), shape=(devices, self.choices + 7))

    def _server_row(self, seconds_per_unit: float, maximum: int, fixed_s: float = 0.0) -> scipy.sparse.coo_array:
        """Return R6 or R8: (N T₂ − Σ μ δ) / r + fixed_s z − T_maximum."""
        bits = self.problem.costs.client_model_bits[self.cut_index] / self.bits_scale
        tail = np.zeros(7)
        tail[Z] = fixed_s
        tail[T2] = self.problem.devices * seconds_per_unit
        tail[maximum] = -1.0
        return scipy.sparse.coo_array(np.concatenate((-bits * seconds_per_unit, tail))[None])

    def _cuts(self, solution: FloatArray) -> IntArray:
        """Return each device's cut with the largest μ."""
        share = np.zeros((self.problem.layers, self.problem.devices))
        share[self.cut_index, self.device] = solution[: self.choices]
        return share.argmax(axis=0) + 1
