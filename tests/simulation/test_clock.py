"""Virtual seconds are the planner's seconds; who trains in another way takes another time, worked out by hand."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptsfl import latency
from adaptsfl.errors import InvalidInput
from adaptsfl.latency import PHASES
from adaptsfl.policies import make_policy
from adaptsfl.simulation.clock import Elapsed, averaged_costs, together
from adaptsfl.simulation.trainers import TRAINERS
from policies.observations import of
from problems import Small, by_hand, small_problems

UNRESTRICTED = small_problems(Small(restricted=False))


def timed(problem, trainer, cuts, averaged=(), parts=1) -> Elapsed:
    return TRAINERS[trainer].round_time(cuts, problem.fleet, problem.costs, problem.batch_size, averaged, parts)


@st.composite
def problems_with_cuts(draw):
    problem = draw(UNRESTRICTED)
    cuts = draw(st.lists(st.integers(1, problem.layers), min_size=problem.devices, max_size=problem.devices))
    return problem, cuts


@pytest.mark.parametrize("trainer", ["engine", "turns"])
@given(problems_with_cuts())
def test_a_round_takes_what_the_planner_says(trainer, drawn):
    problem, cuts = drawn
    alone = timed(problem, trainer, cuts)
    averaging = timed(problem, trainer, cuts, range(1, max(cuts) + 1))
    expected = float(problem.round_s(np.array(cuts)))
    more = float(problem.aggregation_s(np.array(cuts)))
    assert alone.total_s == pytest.approx(expected, rel=1e-12)
    assert averaging.total_s == pytest.approx(expected + more, rel=1e-12)
    assert list(averaging.seconds) == list(averaging.waited_for) == list(PHASES)


@given(problems_with_cuts(), st.data())
def test_a_round_in_parts_takes_what_the_planner_says(drawn, data):
    problem, cuts = drawn
    divisors = [k for k in range(1, problem.batch_size + 1) if problem.batch_size % k == 0]
    parts = data.draw(st.sampled_from(divisors))
    moment = (problem.costs, problem.fleet, np.array(cuts), problem.batch_size)
    expected = float(latency.round_s(*moment, parts))
    assert timed(problem, "engine", cuts, parts=parts).total_s == pytest.approx(expected, rel=1e-12)


@given(problems_with_cuts(), st.data())
def test_what_is_averaged_apart_adds_up_to_what_is_averaged_together(drawn, data):
    """In bits; in seconds, apart is never faster."""
    problem, cuts = drawn
    layers = range(1, max(cuts) + 1)
    some = data.draw(st.sets(st.sampled_from(layers)))
    rest = set(layers) - some
    nothing, whole, one, other = (timed(problem, "engine", cuts, part) for part in ((), layers, some, rest))
    assert (one.bits - nothing.bits) + (other.bits - nothing.bits) == pytest.approx(
        whole.bits - nothing.bits, rel=1e-9, abs=1e-9 * whole.bits
    )
    apart = one.total_s + other.total_s - 2 * nothing.total_s
    assert apart >= (whole.total_s - nothing.total_s) * (1 - 1e-9) - 1e-9 * whole.total_s


def test_layers_beyond_the_deepest_cut_are_averaged_for_nothing():
    """SplitFed V1: copies of layers 3 on are all on the edge server."""
    problem = by_hand()
    assert timed(problem, "engine", [2, 2], {1, 2, 3}) == timed(problem, "engine", [2, 2], {1, 2})
    assert averaged_costs(problem.costs, {1, 2, 3}, 2) is problem.costs
    only_servers = timed(problem, "engine", [2, 2], {3})
    assert only_servers.bits == timed(problem, "engine", [2, 2]).bits
    assert only_servers.seconds["b1"] == 0


def test_only_layers_that_are_averaged_are_charged():
    """Cuts 1 and 3, layer 1 of 16 bits, layer 2 of 32, layer 3 of 112.

    Layer 2 alone: device 1 holds nothing of it, device 2 sends 32 bits at 8 bps: 4 s. The edge server holds device 1's
    copy, 32 bits at 16 bps: 2 s. Back: 32/16 = 2 s and 32/32 = 1 s. In all 4 × 32 bits more than the round's own.
    """
    problem = by_hand()
    one = timed(problem, "engine", [1, 3], {2})
    assert (one.seconds["b1"], one.seconds["b3"]) == (4, 2)
    assert one.waited_for["b1"] == "device 2"
    assert one.bits - timed(problem, "engine", [1, 3]).bits == 4 * 32


def test_bits_of_a_round_by_hand():
    """Batches of 2 with cuts 1 and 3: 2·(50 + 50) + 2·(5 + 5) = 220. Averaging all: Σδ = 16 + 160, Λ_s = 144, twice."""
    problem = by_hand()
    assert timed(problem, "engine", [1, 3]).bits == 220
    assert timed(problem, "engine", [1, 3], {1, 2, 3}).bits == 220 + 2 * (176 + 144)


def test_a_relay_by_hand():
    """Both cut after layer 2, b = 2.

    a1: 600/100 + 600/200 = 9. a2: 40/10 + 40/5 = 12. a3: 2·2·900/1000 = 3.6. a4: 40/20 + 40/10 = 6.
    a5: 1200/100 + 1200/200 = 18. b1: 48/4 + 48/8 = 18. b3: 48/8 + 48/16 = 9.
    Bits: 2·2·(20 + 20) and each client model there and back, 4·48.
    """
    relay = timed(by_hand(), "relay", [2, 2])
    assert relay.seconds == pytest.approx({"a1": 9, "a2": 12, "a3": 3.6, "a4": 6, "a5": 18, "b1": 18, "b2": 0, "b3": 9})
    assert relay.waited_for["a1"] == relay.waited_for["b1"] == "device 1"
    assert relay.waited_for["a2"] == "device 2"
    assert relay.bits == 160 + 192


def test_a_phase_that_does_not_take_place_waits_for_nobody():
    alone = timed(by_hand(), "engine", [2, 2])
    assert [phase for phase in PHASES if alone.waited_for[phase] == ""] == ["b1", "b2", "b3"]


@given(UNRESTRICTED)
def test_vanilla_split_learning_takes_the_cut_with_the_shortest_relay(problem):
    chosen = make_policy("vanilla-sl").decide(of(problem)).cuts
    every = [timed(problem, "relay", [cut] * problem.devices).total_s for cut in range(1, problem.layers + 1)]
    assert timed(problem, "relay", chosen).total_s == pytest.approx(min(every), rel=1e-9)


def test_a_device_that_is_alone_relays_nothing():
    problem = by_hand()
    alone = dataclasses.replace(problem, fleet=problem.fleet.subset([1]))
    relay, parallel = timed(alone, "relay", [2]), timed(alone, "engine", [2])
    assert relay.total_s == pytest.approx(parallel.total_s)
    assert relay.bits == parallel.bits


@given(problems_with_cuts())
def test_a_relay_is_never_faster_than_a_parallel_round(drawn):
    problem, cuts = drawn
    same = [cuts[0]] * len(cuts)
    assert timed(problem, "relay", same).total_s >= timed(problem, "engine", same).total_s * (1 - 1e-12)


def test_centralized_by_hand():
    """2 devices · batch 2 · (600 + 1200) flops / 1000 = 7.2 s, all of them the edge server's."""
    central = timed(by_hand(), "centralized", [1, 1])
    assert central.seconds["a3"] == central.total_s == pytest.approx(7.2)
    assert central.bottleneck == (latency.EDGE_SERVER, "a3")
    assert central.bits == 0


def test_the_bottleneck_is_who_held_up_the_longest_phase():
    """Cuts 1 and 2: a1 to a5 of device 1 are 2, 10 | 5, 4; of device 2 they are 3, 8 | 4, 6; the server 4.8."""
    assert timed(by_hand(), "engine", [1, 2]).bottleneck == ("device 1", "a2")


def test_rounds_add_up():
    problem = by_hand()
    rounds = [
        timed(problem, "engine", [1, 2]),
        timed(problem, "engine", [1, 2], {1, 2}),
        timed(problem, "engine", [1, 3]),
    ]
    block = together(rounds)
    assert block.total_s == pytest.approx(sum(one.total_s for one in rounds))
    assert block.bits == sum(one.bits for one in rounds)
    assert block.seconds["b1"] == rounds[1].seconds["b1"]
    assert block.waited_for["b1"] == rounds[1].waited_for["b1"] != ""


def test_the_name_with_most_seconds_in_all_is_the_one_waited_for():
    def waited(name: str, seconds: float) -> Elapsed:
        return Elapsed(dict.fromkeys(PHASES, seconds), dict.fromkeys(PHASES, name), 0.0)

    block = together([waited("x", 2.0), waited("y", 3.0), waited("x", 2.0)])
    assert block.waited_for["a1"] == "x"
    assert block.seconds["a1"] == 7.0


def test_cuts_for_another_fleet_are_refused():
    with pytest.raises(InvalidInput, match="cuts: has 3 entries"):
        timed(by_hand(), "engine", [1, 1, 1])
