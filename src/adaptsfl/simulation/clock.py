"""Virtual seconds: what one round takes with the resources that its devices truly have.

Every second comes from the formulas of `latency`, which the planner uses too: a round with the resources that were
planned for takes exactly the time that was predicted.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from adaptsfl import latency
from adaptsfl.checks import FloatArray, IntArray
from adaptsfl.costs import CutCosts
from adaptsfl.errors import InvalidInput
from adaptsfl.fleet import Fleet
from adaptsfl.latency import EDGE_SERVER, PHASES
from adaptsfl.policies import Trainer

NOBODY = ""  # whom a phase waited for that did not take place


@dataclass(frozen=True)
class Elapsed:
    """Virtual time that has passed in one or more rounds.

    Attributes:
        seconds: by phase, a1 to b3, all of them; they add up to `total_s`.
        waited_for: by phase, who made it take that long: a device's name, a server, or nobody.
        bits: what was sent over all links.
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
        """Who held up the phase that took longest, and that phase."""
        phase = max(PHASES, key=lambda phase: self.seconds[phase])
        return self.waited_for[phase], phase


def round_time(
    trainer: Trainer,
    cuts: Sequence[int],
    fleet: Fleet,
    costs: CutCosts,
    batch_size: int,
    averaged: Collection[int] = (),
) -> Elapsed:
    """Return what one round takes.

    Args:
        trainer: who trains, as the policy says.
        cuts: where every device's model is cut in truth, `Decision.cuts`: for the devices of `fleet`, in its order.
        fleet: the devices that take part in this round, with the resources that they truly have in it.
        costs: of every cut.
        batch_size: b, of every device.
        averaged: the layers (from 1 on) that are averaged at the end of the round; empty for none.
    """
    if len(cuts) != fleet.size:
        raise InvalidInput("cuts", f"has {len(cuts)} entries", f"Give {fleet.size}, one per device of the fleet")
    chosen = np.array(cuts, dtype=np.int64)
    match trainer:
        case "centralized":
            return _centralized(fleet, costs, batch_size)
        case "relay":
            return _relayed(chosen, fleet, costs, batch_size)
        case _:
            # Devices that take turns with the server model (SplitFed V2) still compute and send at the same time, and
            # the server's work is the same in any order.
            return _parallel(chosen, fleet, costs, batch_size, averaged)


def together(rounds: Iterable[Elapsed]) -> Elapsed:
    """Add rounds up; each phase waited for whoever held it up longest in all."""
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
    """Return the costs with only the averaged layers in δ, so that only what moves is charged."""
    layers = np.arange(1, costs.layers + 1)
    moves = np.isin(layers, list(averaged))
    if moves[:deepest].all():
        return costs
    own_bits = np.diff(costs.client_model_bits, prepend=0.0)
    return dataclasses.replace(costs, client_model_bits=np.cumsum(np.where(moves, own_bits, 0.0)))


def _parallel(cuts: IntArray, fleet: Fleet, costs: CutCosts, batch_size: int, averaged: Collection[int]) -> Elapsed:
    """A round as in the paper, and the averaging of some layers.

    Where every device has copies of layers beyond the deepest cut (SplitFed V1), all of those copies are on the edge
    server, which averages them without sending anything.
    """
    times = [time for time in latency.phase_times(costs, fleet, cuts, batch_size) if time.every_round]
    bits = batch_size * float(np.sum(costs.activation_bits[cuts - 1] + costs.gradient_bits[cuts - 1]))
    if len(averaged):
        charged = averaged_costs(costs, averaged, int(cuts.max()))
        times += [time for time in latency.phase_times(charged, fleet, cuts, batch_size) if not time.every_round]
        one_way = np.sum(charged.client_model_bits[cuts - 1]) + latency.non_common_bits(charged, cuts)
        bits += 2 * float(one_way)
    return _elapsed({time.phase: (time.seconds, time.bottleneck) for time in times}, bits)


def _relayed(cuts: IntArray, fleet: Fleet, costs: CutCosts, batch_size: int) -> Elapsed:
    """One device after the other; each sends the client model on, by way of the fed server, to the next.

    The last one sends it to the first, for the next round. A device that is alone keeps it.
    """
    moment = (costs, fleet, cuts)
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
    times["a3"] = float(latency.server_turn_s(*moment, batch_size)), EDGE_SERVER
    bits = batch_size * float(np.sum(costs.activation_bits[cuts - 1] + costs.gradient_bits[cuts - 1]))
    bits += 0.0 if alone else 2 * float(np.sum(costs.client_model_bits[cuts - 1]))
    return _elapsed(times, bits)


def _centralized(fleet: Fleet, costs: CutCosts, batch_size: int) -> Elapsed:
    """The server trains on the batches of all devices, N b (ρ_L + ϖ_L) / f_s; nothing is sent."""
    flops = fleet.size * batch_size * (costs.forward_flops[-1] + costs.backward_flops[-1])
    return _elapsed({"a3": (float(flops / fleet.server.flops), EDGE_SERVER)}, 0.0)


def _elapsed(times: Mapping[str, tuple[float, str]], bits: float) -> Elapsed:
    """Return the time with every phase in it, also those that did not take place."""
    every = {phase: times.get(phase, (0.0, NOBODY)) for phase in PHASES}
    return Elapsed(
        {phase: s for phase, (s, _) in every.items()}, {phase: who for phase, (_, who) in every.items()}, bits
    )
