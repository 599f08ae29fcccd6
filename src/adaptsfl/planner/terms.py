"""The maxima over devices that determine a plan's time: four for undivided mini-batches, seven with micro-batches.

With k = 1, A = T3 + S + T4, where T3 = max T_i^F + T_{a,i}^U and T4 = max T_{g,i}^D + T_i^B. With k > 1 parts, A is
`latency.pipelined_s` of the five maxima X_1, X_k, Y_1, Y_k and Z. In both cases T5 = max T_{c,i}^U and
T6 = max T_{c,i}^D are the last two, and A rises with every maximum and with the server's turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adaptsfl import latency
from adaptsfl.checks import FloatArray, IntArray
from adaptsfl.planner.problem import PlanProblem

CAPPED = [1, 3, 4]  # X_k, Y_k and Z, which A alone limits
ROUND = 7  # A itself, as one more threshold beside the seven maxima
ROUNDING = 1e-12  # thresholds computed from A are this much higher, so that rounding excludes no cut
TRACE = 1e-3  # a maximum that alone has no effect may have one together with others


@dataclass(frozen=True)
class Terms:
    """The maxima for k micro-batches: `of_round` in a round, and two in an aggregation."""

    micro_batches: int = 1

    @property
    def of_round(self) -> int:
        """How many maxima a round has."""
        return 2 if self.micro_batches == 1 else 5

    @property
    def count(self) -> int:
        """How many maxima there are together."""
        return self.of_round + 2

    @property
    def charged(self) -> list[int]:
        """The maxima that a plan pays for on the path through the server's turns: T3 or X_1, T4 or Y_1, T5, T6."""
        return [0, 1, 2, 3] if self.micro_batches == 1 else [0, 2, 5, 6]

    def times(self, problem: PlanProblem, cuts: IntArray) -> FloatArray:
        """Return the time of each device with these cuts for each maximum: shape (count, …)."""
        moment = (problem.costs, problem.fleet, cuts)
        if self.micro_batches == 1:
            to_server_s = latency.to_server_s(*moment, problem.batch_size)
            rounds = np.stack((to_server_s, latency.from_server_s(*moment, problem.batch_size)))
        else:
            part = latency.part_size(problem.batch_size, self.micro_batches)
            rounds = latency.part_terms(*moment, part, self.micro_batches)
        models = latency.client_model_upload_s(*moment), latency.client_model_download_s(*moment)
        return np.concatenate((rounds, np.stack(models)))

    def round_s(self, terms: FloatArray | Sequence[FloatArray], turn_s: FloatArray | float) -> FloatArray:
        """Return A for these maxima of a round, if the server's turn for one part takes `turn_s`."""
        if self.micro_batches == 1:
            return np.asarray(terms[0] + turn_s + terms[1])
        return latency.pipelined_s(np.asarray(terms), turn_s, self.micro_batches)

    def caps_s(self, low: FloatArray, turn_s: float, cap_s: float) -> FloatArray:
        """Return how long each maximum of a round can be if the others are at least `low` and A is at most `cap_s`."""
        if self.micro_batches == 1:
            return low[:2] + (cap_s - float(low[0] + turn_s + low[1]))
        first_in, last_in, last_out, first_out, _ = low
        turns_s = self.micro_batches * turn_s
        spent = (
            max(turns_s + last_out, turn_s + first_out),
            turn_s + last_out,
            max(turns_s + first_in, turn_s + last_in),
            turn_s + first_in,
            0.0,
        )
        return np.maximum(cap_s - np.array(spent), low)

    def effects_s(self, low: FloatArray, high: FloatArray, turn_s: float) -> FloatArray:
        """Return by how much A grows from `low` if one of its maxima alone rises to `high`; a trace if by nothing."""
        if self.micro_batches == 1:
            return high - low
        raised = np.repeat(low[:, None], len(low) + 1, axis=1)
        np.fill_diagonal(raised, high)
        times = self.round_s(raised, turn_s)
        return times[:-1] - times[-1] + TRACE * (high - low)

    def needed_s(self, times: FloatArray, low: FloatArray, turn_s: float) -> FloatArray:
        """Return, for k > 1, the least A of a plan with each cut, if the plan's maxima and turn are at least these."""
        first_in, first_out = low[0] + turn_s, turn_s + low[2]
        return np.maximum(np.maximum(times[1] + first_out, times[3] + first_in), times[4])

    def room_s(self, low: FloatArray, turn_s: float, round_s: FloatArray | float) -> FloatArray:
        """Return, for k > 1, how long X_k, Y_k and Z can be where A is at most `round_s`: shape (3, …)."""
        room = np.asarray(round_s) * (1 + ROUNDING)
        return np.stack((room - turn_s - low[2], room - turn_s - low[0], room))


UNDIVIDED = Terms()
