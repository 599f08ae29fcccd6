"""What the edge server makes of what it is told and measures: rates, shares of layers, and the time of a block."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from adaptsfl import latency
from adaptsfl.costs import CutCosts
from adaptsfl.deploy.layers_file import to_bytes, without_optimizer
from adaptsfl.deploy.parties.edge.clock import ALL, BlockClock
from adaptsfl.deploy.parties.edge.resources import FASTEST, TRAVELLING, MeasuredFleet, passes
from adaptsfl.deploy.wire_pb2 import Rates, Ready
from adaptsfl.errors import BadMessage
from adaptsfl.models import build, profile, split
from adaptsfl.runs.beliefs import MEMORY_ROUNDS
from adaptsfl.training import OptimizerSettings
from adaptsfl.training.layers import Layer

BATCH = 10
COSTS = CutCosts(
    forward_flops=np.array([1e6, 2e6, 4e6]),
    backward_flops=np.array([2e6, 4e6, 8e6]),
    activation_bits=np.array([8e3, 4e3, 1e3]),
    gradient_bits=np.array([8e3, 4e3, 1e3]),
    client_model_bits=np.array([1e3, 5e3, 9e3]),
    memory_bytes=np.array([1e3, 2e3, 3e3]),
)


def ready(**other: object) -> Ready:
    told = {
        "samples": 100,
        "forward_s": [0.1, 0.2, 0.1],
        "backward_s": [0.2, 0.2, 0.4],
        "rates": Rates(uplink=1e6, downlink=2e6, fed_uplink=3e6, fed_downlink=4e6),
    }
    return Ready(**told | other)


def measured(**settings: object) -> MeasuredFleet:
    return MeasuredFleet(COSTS, ["device-1", "device-2"], BATCH, OptimizerSettings(**settings))


# --- rates and fixed seconds ---


def test_the_rate_of_a_link_does_not_fall_because_messages_became_smaller() -> None:
    """640 bytes take 1.3 ms, as on loopback: that is latency, and not a link of 4 Mbit/s."""
    fleet = measured()
    fleet.ready(0, ready(rates=Rates(uplink=1e9)))
    for _ in range(300):
        fleet.transferred(0, "uplink_bps", 5120, 0.0013)
    link = fleet.devices[0]["uplink_bps"]
    assert link.rate > 0.3e9
    assert fleet.transfer_s(0, "uplink_bps", 5120) == pytest.approx(0.0013, rel=0.05)
    seen = fleet.fleet([0])
    assert seen.uplink_s[0] == pytest.approx(0.0013, rel=0.05)


def test_a_rate_that_a_receiver_measured_leaves_fixed_seconds_alone() -> None:
    fleet = measured()
    fleet.ready(0, ready(rates=Rates(uplink=1e6, uplink_s=0.05)))
    for _ in range(50):
        fleet.device(0, 1e6, uplink_bps=2e6)
    link = fleet.devices[0]["uplink_bps"]
    assert link.rate == pytest.approx(2e6, rel=0.1)
    assert link.fixed_s == pytest.approx(0.05, rel=0.3)


def test_latency_comes_from_ready_unless_no_link_has_it() -> None:
    fleet = measured()
    fleet.ready(
        0, ready(rates=Rates(uplink=1e6, uplink_s=0.04, downlink_s=math.nan, fed_uplink_s=-1, fed_downlink_s=1e9))
    )
    seen = fleet.fleet([0])
    assert seen.uplink_s[0] == pytest.approx(0.04, rel=1e-6)
    assert (seen.downlink_s[0], seen.fed_downlink_s[0]) == (0.0, 0.0)
    assert seen.fed_uplink_s[0] == pytest.approx(0.04, rel=1e-6)  # of the message that layers are delivered


def test_layers_are_fetched_and_delivered_by_calls_that_are_answered() -> None:
    """One way each to and from the fed server, and of a message from or to the edge server."""
    fleet = measured()
    fleet.ready(
        0, ready(rates=Rates(uplink=1e6, uplink_s=0.01, downlink_s=0.02, fed_uplink_s=0.04, fed_downlink_s=0.08))
    )
    fleet.server_probed(1e6, 2e6, 0.003, 0.004)
    seen = fleet.fleet([0])
    assert seen.fed_uplink_s[0] == pytest.approx(0.04 + 0.08 + 0.01)
    assert seen.fed_downlink_s[0] == pytest.approx(0.04 + 0.08 + 0.02)
    assert (seen.server.to_fed_s, seen.server.from_fed_s) == pytest.approx((0.007, 0.007))
    assert seen.server.averaging_s == pytest.approx(0.014)


def test_a_link_that_was_not_probed_gets_its_rate_from_the_first_transfer() -> None:
    """1 Mbit in 2 s over a link of which nothing is known: 1.9 s of it were the bits, says who received them."""
    fleet = measured()
    fleet.ready(0, ready(rates=Rates()))
    fleet.transferred(0, "fed_downlink_bps", 1e6, 2.0)
    fleet.device(0, 1e6, fed_downlink_bps=1e6 / 1.9)
    link = fleet.devices[0]["fed_downlink_bps"]
    assert link.rate == pytest.approx(1e6 / 1.9, rel=0.1)
    assert link.predict_s(1e6) == pytest.approx(2.0, rel=0.1)
    assert link.predict_s(1e3) < 0.3


def test_a_device_that_joins_again_keeps_what_its_rounds_have_measured() -> None:
    fleet = measured()
    fleet.ready(0, ready())
    for _ in range(50):
        fleet.transferred(0, "uplink_bps", 1e6, 10.0)
    fleet.ready(0, ready())
    assert fleet.devices[0]["uplink_bps"].rate < 0.2e6


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_rate_changes_nothing(wrong: float) -> None:
    fleet = measured()
    fleet.ready(0, ready())
    fleet.device(0, 1e6, uplink_bps=wrong)
    assert fleet.devices[0]["uplink_bps"].rate == pytest.approx(1e6, rel=1e-6)


def test_averaging_is_measured_with_its_fixed_seconds() -> None:
    fleet = measured()
    for bits in (1e6, 4e6) * 40:
        fleet.averaging.add(bits, 0.01 + bits / 1e9)
    server = fleet.servers()
    assert server.averaging_s == pytest.approx(0.01, rel=0.3)
    for bits in (1e6, 4e6):
        assert server.averaging_s + bits / server.averaging_bps == pytest.approx(0.01 + bits / 1e9, rel=0.1)


# --- what devices tell ---


def test_rates_come_from_ready() -> None:
    fleet = measured()
    fleet.ready(1, ready())
    seen = fleet.fleet([1])
    assert seen.names == ("device-2",)
    assert (seen.uplink_bps[0], seen.downlink_bps[0]) == pytest.approx((1e6, 2e6))
    assert (seen.fed_uplink_bps[0], seen.fed_downlink_bps[0]) == pytest.approx((3e6, 4e6))


def test_an_unknown_rate_is_fast() -> None:
    fleet = measured()
    for number in (0, 1):
        fleet.ready(number, ready(rates=Rates()))
    assert fleet.fleet([0, 1]).uplink_bps.tolist() == pytest.approx([FASTEST, FASTEST])


def test_rates_that_no_link_has_are_not_believed() -> None:
    fleet = measured()
    fleet.ready(0, ready(rates=Rates(uplink=1e300, downlink=1e-300, fed_uplink=math.nan, fed_downlink=-1)))
    seen = fleet.fleet([0])
    assert seen.uplink_bps[0] == pytest.approx(FASTEST)
    assert seen.downlink_bps[0] == pytest.approx(FASTEST)  # as if nothing had been said
    assert seen.fed_uplink_bps[0] == pytest.approx(FASTEST)
    assert seen.fed_downlink_bps[0] == pytest.approx(FASTEST)


@pytest.mark.parametrize(
    "wrong",
    [
        {"forward_s": [0.1, 0.2]},
        {"backward_s": []},
        {"forward_s": [0.1, math.nan, 0.1]},
        {"backward_s": [0.1, math.inf, 0.1]},
        {"forward_s": [-0.1, 0.2, 0.1]},
    ],
)
def test_layers_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    fleet = measured()
    with pytest.raises(BadMessage, match="measured its layers"):
        fleet.ready(0, ready(**wrong))
    assert not fleet.devices


# --- layers ---


def test_predicted_times_are_those_that_were_measured() -> None:
    """One device: its own forward and backward seconds come out again, at every cut."""
    fleet = measured()
    fleet.ready(0, ready())
    for cut, (forward_s, backward_s) in enumerate([(0.1, 0.2), (0.3, 0.4), (0.4, 0.8)], start=1):
        cuts = np.array([cut])
        assert latency.client_forward_s(fleet.costs, fleet.fleet([0]), cuts, BATCH) == pytest.approx([forward_s])
        assert latency.client_backward_s(fleet.costs, fleet.fleet([0]), cuts, BATCH) == pytest.approx([backward_s])


def test_a_device_twice_as_slow_takes_twice_as_long() -> None:
    fleet = measured()
    fleet.ready(0, ready())
    fleet.ready(1, ready(forward_s=[0.2, 0.4, 0.2], backward_s=[0.4, 0.4, 0.8]))
    forward = latency.client_forward_s(fleet.costs, fleet.fleet([0, 1]), np.array([2, 2]), BATCH)
    assert forward == pytest.approx([0.3, 0.6])


def test_layers_before_anybody_measured_them_are_counted() -> None:
    assert measured().costs.forward_flops.tolist() == COSTS.forward_flops.tolist()


def test_rounds_correct_what_was_measured_before() -> None:
    fleet = measured()
    fleet.ready(0, ready())
    for _ in range(10 * MEMORY_ROUNDS):
        fleet.computed(0, 2, 0.6, 0.8)  # twice as long
    forward = latency.client_forward_s(fleet.costs, fleet.fleet([0]), np.array([1]), BATCH)
    assert forward == pytest.approx([0.2], rel=0.01)


def test_a_server_turn_is_predicted_from_the_last_ones() -> None:
    fleet = measured()
    fleet.ready(0, ready())
    fleet.ready(1, ready())
    fleet.server_took([1, 2], 0.5)
    assert latency.server_turn_s(fleet.costs, fleet.fleet([0, 1]), np.array([1, 2]), BATCH) == pytest.approx(
        0.5, rel=0.1
    )
    for _ in range(50):
        fleet.server_took([3, 3], 0.2)  # no work is left to it: what it takes all the same
        fleet.server_took([1, 2], 0.5)
    assert latency.server_turn_s(fleet.costs, fleet.fleet([0, 1]), np.array([3, 3]), BATCH) == pytest.approx(
        0.2, rel=0.1
    )
    assert latency.server_turn_s(fleet.costs, fleet.fleet([0, 1]), np.array([1, 2]), BATCH) == pytest.approx(
        0.5, rel=0.1
    )


@pytest.mark.parametrize(
    ("settings", "times"),
    [
        ({}, 1),
        ({"name": "momentum"}, 2),
        ({"name": "adam"}, 3),
        ({"name": "adam", "at_averaging": "reset"}, 1),
    ],
)
def test_what_the_optimiser_keeps_travels_too(settings: dict[str, object], times: int) -> None:
    assert measured(**settings).costs.client_model_bits.tolist() == (times * COSTS.client_model_bits).tolist()


# --- the clock ---


def test_phases_get_what_passed_and_no_more() -> None:
    clock = BlockClock(10.0)
    assert clock.passed(12.0, "a", a1=0.5, a2=1.0) == {"a1": 0.5, "a2": 1.0}
    assert clock.other_s == pytest.approx(0.5)
    assert clock.passed(13.0, "b", a4=1e9, a5=1.0) == {"a4": 1.0, "a5": 0.0}
    assert clock.passed(13.5, "c", a3=ALL) == {"a3": 0.5}
    assert clock.passed(14.0, "d", a1=math.nan, a2=-1.0) == {"a1": 0.0, "a2": 0.0}
    assert sum(clock.seconds.values()) + clock.other_s == pytest.approx(clock.wall_s) == pytest.approx(4.0)
    assert clock.bottleneck in {("a", "a2"), ("b", "a4")}


def test_time_does_not_run_back() -> None:
    clock = BlockClock(10.0)
    assert clock.passed(9.0, "a", a1=1.0) == {"a1": 0.0}
    assert clock.wall_s == 0.0


def test_rounds_are_timed_from_answer_to_answer() -> None:
    clock = BlockClock(0.0)
    clock.begin_rounds(1.0)
    assert clock.answered(3.0, first=True) == pytest.approx(2.0)
    assert clock.answered(4.5, first=False) == pytest.approx(1.5)
    clock.passed(5.0, "fed server", b2=ALL)
    assert clock.data() == {"wall_s": 5.0, "rounds_s": [1.5], "averaging_s": 5.0, "other_s": 0.0}


# --- what travels ---


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_layers_travel_in_as_many_bits_as_are_predicted(name: str) -> None:
    """Beside the numbers themselves there are a few hundred bytes of names and shapes."""
    settings = OptimizerSettings(name=name)
    built = build("vgg_digits")
    model = split(built.module, built.example_input)
    predicted = MeasuredFleet(
        profile(model, built.example_input, batch_size=BATCH), ["device-1"], BATCH, settings
    ).costs
    for at_averaging, times in (("average", None), ("reset", 1)):
        layer = Layer(model.pieces[1], replace(settings, at_averaging=at_averaging))
        layer.update([torch.zeros_like(tensor) for tensor in layer.parameters], 0.1)
        state = layer.state() if times is None else without_optimizer(layer.state())
        bits = predicted.client_model_bits[1] - predicted.client_model_bits[0]
        whole = times or TRAVELLING[name]
        assert 8 * len(to_bytes({2: state})) == pytest.approx(bits / TRAVELLING[name] * whole, rel=0.05)


@pytest.mark.parametrize("edge_link_changes", [True, False])
def test_a_link_to_the_fed_server_is_believed_to_change_with_the_one_to_the_edge_server(
    edge_link_changes: bool,
) -> None:
    """It is used once per block: three surprises, as others need, would be three blocks."""
    fleet = measured()
    fleet.ready(0, ready(rates=Rates(uplink=1e7, downlink=1e7, fed_uplink=1e7, fed_downlink=1e7)))
    for _ in range(5):
        for link in ("uplink_bps", "fed_uplink_bps"):
            fleet.transferred(0, link, 1e6, 0.1)
    for _ in range(5):
        fleet.transferred(0, "uplink_bps", 1e6, 1.0 if edge_link_changes else 0.1)
    fleet.transferred(0, "fed_uplink_bps", 1e6, 1.0)
    seconds = fleet.transfer_s(0, "fed_uplink_bps", 1e6)
    assert seconds == pytest.approx(1.0, rel=0.1) if edge_link_changes else seconds < 0.2


def test_a_first_guess_of_fixed_seconds_leaves_a_pass_as_long_as_it_was() -> None:
    """Of 30 ms at 1 GFLOP/s 10 ms are fixed: the rest is that much faster; and never more than half is believed."""
    for fixed_s, expected_s in ((0.010, 0.010), (0.0, 0.0), (-1.0, 0.0), (float("nan"), 0.0), (float("inf"), 0.015)):
        guess = passes(1e9, 0.030, fixed_s)
        assert guess.fixed_s == pytest.approx(expected_s)
        assert guess.predict_s(0.030 * 1e9) == pytest.approx(0.030)
