"""Virtual time: how long one round takes with the true resources of its devices.

All times come from the formulas of `latency`, which the planner uses too: a round with the planned resources takes
exactly the predicted time.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np

from adaptsfl import latency
from adaptsfl.checks import FloatArray, IntArray
from adaptsfl.costs import CutCosts
from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput
from adaptsfl.fleet import Fleet
from adaptsfl.latency import EDGE_SERVER, PHASES
from adaptsfl.runs.backend import Order
from adaptsfl.simulation.faults import Faults
from adaptsfl.training.schedule import Schedule

NOBODY = ""  # in `waited_for`, for a phase that did not take place


@dataclass(frozen=True)
class Elapsed:
    """Virtual time that has passed in one or more rounds.

    Attributes:
        seconds: by phase, a1 to b3, all of them; they add up to `total_s`.
        waited_for: by phase, its bottleneck: the name of a device or a server, or NOBODY.
        bits: sent over all links.
    """

    seconds: Mapping[str, float]
    waited_for: Mapping[str, str]
    bits: float

    @property
    def total_s(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds[phase] for phase in PHASES)

    @property
    def bottleneck(self) -> tuple[str, str]:
        """The bottleneck of the longest phase, and that phase."""
        phase = max(PHASES, key=lambda phase: self.seconds[phase])
        return self.waited_for[phase], phase


@dataclass(frozen=True)
class Charged:
    """The clock's account of one block.

    Attributes:
        elapsed: the time of the whole block.
        ends_s: virtual seconds since the run began, at the start of the block and at the end of every round.
    """

    elapsed: Elapsed
    ends_s: tuple[float, ...]


# Returns the time of a round, given the cuts of the devices that take part, these devices with their true resources,
# the costs of every cut, the batch size b of every device, the layers (from 1 on) that are averaged at the end, and the
# number of parts in which mini-batches go through the round.
RoundTime = Callable[[Sequence[int], Fleet, CutCosts, int, Collection[int], int], Elapsed]


class Clock:
    """Virtual time over the rounds of a run, with each round's true resources.

    Args:
        fleet_at: the true resources in round 1, 2, ….
        round_time: returns how long a round of the trainer takes.
    """

    def __init__(
        self,
        fleet_at: Callable[[int], Fleet],
        costs: CutCosts,
        batch_size: int,
        faults: Faults,
        round_time: RoundTime,
    ) -> None:
        self.fleet_at, self.costs, self.batch_size = fleet_at, costs, batch_size
        self.faults, self.round_time = faults, round_time
        self.now_s = 0.0
        self.schedule: Schedule | None = None

    def charge(
        self, order: Order, members: Sequence[int], measuring: int, reestimated: Collection[int] = ()
    ) -> Charged:
        """Charge one block; measuring adds the exchanges of `measuring` rounds to its last round.

        Args:
            members: the devices that began the block, as indices of the whole fleet.
            reestimated: the rounds after which batch-norm's statistics were re-estimated. A re-estimation right before
                the block is charged to the block too, and delays its start.
        """
        self.schedule = self._ahead(order.decision)
        cuts = dict(zip(members, order.decision.placement, strict=True))
        rounds: list[Elapsed] = []
        ends = [self.now_s]
        for k in range(order.rounds):
            t = order.first_round + k
            present = members if order.present is None else order.present[k]
            fleet = self.faults.slowed(self.fleet_at(t), t - 1)
            here = fleet if len(present) == fleet.size else fleet.subset(present)
            placed = [cuts[device] for device in present]
            costs, parts = self._sent(order, k)
            moment = (placed, here, costs, self.batch_size)
            if not k and t - 1 in reestimated:
                rounds.append(reestimation_time(*moment))
                ends[0] = self.now_s = self.now_s + rounds[0].total_s
            new = [self.round_time(*moment, self.schedule.advance(), parts)]
            if order.compared and not k:
                new.append(comparison_time(*moment, len(order.compared)))
            if t in reestimated:
                new.append(reestimation_time(*moment))
            if measuring and k == order.rounds - 1:
                new += [self.round_time(*moment, (), parts)] * measuring
            rounds += new
            self.now_s += sum(elapsed.total_s for elapsed in new)
            ends.append(self.now_s)
        return Charged(together(rounds), tuple(ends))

    def predicted_s(self, order: Order, observed: Fleet) -> float:
        """Return how long a block takes if no device leaves and rates stay as observed."""
        schedule, cuts = self._ahead(order.decision), order.decision.placement
        rounds = []
        for k in range(order.rounds):
            costs, parts = self._sent(order, k)
            moment = (cuts, observed, costs, self.batch_size)
            rounds.append(self.round_time(*moment, schedule.advance(), parts))
            if order.compared and not k:
                rounds.append(comparison_time(*moment, len(order.compared)))
        return together(rounds).total_s

    def _sent(self, order: Order, k: int) -> tuple[CutCosts, int]:
        """Return the costs with the type of numbers that is sent in round k of a block, and the parts of mini-batches.

        Where types are compared, the first round is sent whole and exact.
        """
        if order.compared and not k:
            return self.costs.sent_as("float32"), 1
        dtype = order.decision.wire_dtype
        return self.costs if dtype is None else self.costs.sent_as(dtype), order.decision.micro_batches

    def _ahead(self, decision: Decision) -> Schedule:
        """Return a schedule that follows a decision from now on; layers that were not averaged last keep their age."""
        decision = decision.levelled()
        if self.schedule is None:
            return Schedule(decision)
        schedule = copy(self.schedule)
        if decision != schedule.plan:
            schedule.change(decision)
        return schedule


def reestimation_time(cuts: Sequence[int], fleet: Fleet, costs: CutCosts, batch_size: int) -> Elapsed:
    """Return the time to re-estimate batch-norm's statistics: one mini-batch per device forward, and merging."""
    chosen = np.array(cuts, dtype=np.int64)
    times = latency.reestimation_times(costs, fleet, chosen, batch_size)
    devices, server = latency.statistics_bits(costs, chosen)
    bits = batch_size * float(np.sum(costs.activation_bits[chosen - 1])) + 2 * float(np.sum(devices) + server)
    return _elapsed({time.phase: (time.seconds, time.bottleneck) for time in times}, bits)


def comparison_time(cuts: Sequence[int], fleet: Fleet, costs: CutCosts, batch_size: int, types: int) -> Elapsed:
    """Return the time of the edge server to compare types of numbers: one more turn for each, and nothing is sent."""
    turn_s = float(latency.server_turn_s(costs, fleet, np.array(cuts, dtype=np.int64), batch_size))
    return _elapsed({"a3": (types * turn_s, EDGE_SERVER)}, 0.0)


def together(rounds: Iterable[Elapsed]) -> Elapsed:
    """Sum rounds; the bottleneck of a phase is the device or server with the most seconds in total."""
    held_up: dict[str, dict[str, float]] = {phase: {} for phase in PHASES}
    bits = 0.0
    for elapsed in rounds:
        bits += elapsed.bits
        for phase, who in held_up.items():
            name = elapsed.waited_for[phase]
            who[name] = who.get(name, 0.0) + elapsed.seconds[phase]
    return Elapsed(
        {phase: sum(who.values()) for phase, who in held_up.items()},
        {phase: max(who, key=lambda name: who[name], default=NOBODY) for phase, who in held_up.items()},
        bits,
    )


def averaged_costs(costs: CutCosts, averaged: Collection[int], deepest: int) -> CutCosts:
    """Return the costs with only the averaged layers in δ, so that only layers that are sent are charged."""
    layers = np.arange(1, costs.layers + 1)
    moves = np.isin(layers, list(averaged))
    if moves[:deepest].all():
        return costs
    own_bits = np.diff(costs.client_model_bits, prepend=0.0)
    return dataclasses.replace(costs, client_model_bits=np.cumsum(np.where(moves, own_bits, 0.0)))


def parallel_time(
    cuts: Sequence[int],
    fleet: Fleet,
    costs: CutCosts,
    batch_size: int,
    averaged: Collection[int] = (),
    micro_batches: int = 1,
) -> Elapsed:
    """Return the time of a round of the paper, with the averaging of the layers in `averaged`.

    Where every device has copies of layers beyond the deepest cut (SplitFed V1), all of those copies are on the edge
    server, which averages them without sending anything.
    """
    chosen = _checked(cuts, fleet)
    phases = latency.phase_times(costs, fleet, chosen, batch_size, micro_batches)
    times = [time for time in phases if time.every_round]
    bits = _exchanged_bits(chosen, costs, batch_size)
    if len(averaged):
        charged = averaged_costs(costs, averaged, int(chosen.max()))
        times += [time for time in latency.phase_times(charged, fleet, chosen, batch_size) if not time.every_round]
        one_way = np.sum(charged.client_model_bits[chosen - 1]) + latency.non_common_bits(charged, chosen)
        bits += 2 * float(one_way)
    return _elapsed({time.phase: (time.seconds, time.bottleneck) for time in times}, bits)


def relayed_time(
    cuts: Sequence[int],
    fleet: Fleet,
    costs: CutCosts,
    batch_size: int,
    _averaged: Collection[int] = (),
    _micro_batches: int = 1,
) -> Elapsed:
    """Return the time of a round in which devices train in turn, each sending the client model to the next.

    The model is sent through the fed server; the last device sends it to the first, for the next round. A single
    device keeps it.
    """
    chosen = _checked(cuts, fleet)
    moment = (costs, fleet, chosen)
    alone = fleet.size == 1
    shares: dict[str, FloatArray] = {
        "a1": latency.client_forward_s(*moment, batch_size),
        "a2": latency.activation_upload_s(*moment, batch_size),
        "a4": latency.gradient_download_s(*moment, batch_size),
        "a5": latency.client_backward_s(*moment, batch_size),
        "b1": np.zeros(1) if alone else latency.client_model_upload_s(*moment),
        "b3": np.zeros(1) if alone else latency.client_model_download_s(*moment),
    }
    times = {phase: (float(np.sum(own)), fleet.name(int(np.argmax(own)))) for phase, own in shares.items()}
    times["a3"] = float(latency.server_turns_s(*moment, batch_size)), EDGE_SERVER
    bits = _exchanged_bits(chosen, costs, batch_size)
    bits += 0.0 if alone else 2 * float(np.sum(costs.client_model_bits[chosen - 1]))
    return _elapsed(times, bits)


def centralized_time(
    cuts: Sequence[int],
    fleet: Fleet,
    costs: CutCosts,
    batch_size: int,
    _averaged: Collection[int] = (),
    _micro_batches: int = 1,
) -> Elapsed:
    """Return the time of the server to train on the batches of all devices, N b (ρ_L + ϖ_L) / f_s; nothing is sent."""
    _checked(cuts, fleet)
    flops = fleet.size * batch_size * (costs.forward_flops[-1] + costs.backward_flops[-1])
    return _elapsed({"a3": (fleet.server.turn_s + float(flops / fleet.server.flops), EDGE_SERVER)}, 0.0)


def _checked(cuts: Sequence[int], fleet: Fleet) -> IntArray:
    if len(cuts) != fleet.size:
        raise InvalidInput("cuts", f"has {len(cuts)} entries", f"Give {fleet.size}, one per device of the fleet")
    return np.array(cuts, dtype=np.int64)


def _exchanged_bits(cuts: IntArray, costs: CutCosts, batch_size: int) -> float:
    """Return the bits of all devices' activations and gradients."""
    return batch_size * float(np.sum(costs.activation_bits[cuts - 1] + costs.gradient_bits[cuts - 1]))


def _elapsed(times: Mapping[str, tuple[float, str]], bits: float) -> Elapsed:
    """Return the time of every phase, 0 for those that did not take place."""
    every = {phase: times.get(phase, (0.0, NOBODY)) for phase in PHASES}
    return Elapsed(
        {phase: s for phase, (s, _) in every.items()}, {phase: who for phase, (_, who) in every.items()}, bits
    )
