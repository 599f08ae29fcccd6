"""Where the seconds of a deployed round go, and what they say about links: clocks are told the time."""

import numpy as np
import pytest
import torch

from adaptsfl import latency
from adaptsfl.costs import CutCosts
from adaptsfl.deploy import wire_pb2 as wire
from adaptsfl.deploy.parties.edge.accounts import Accounts, TrainedPart
from adaptsfl.deploy.parties.edge.clock import ALL, BlockClock
from adaptsfl.deploy.parties.edge.ledger import Ledger
from adaptsfl.deploy.parties.edge.resources import MeasuredFleet
from adaptsfl.deploy.parties.edge.sessions import WHOLE, Arrival, Shapes
from adaptsfl.deploy.sending import Sending
from adaptsfl.runs.backend import Scene
from adaptsfl.training import OptimizerSettings

BATCH, UNITS = 4, 25  # activations of 4 · 25 · 4 bytes: 3,200 bits; one layer of 8,000 bits on devices
COSTS = CutCosts([1e6, 2e6], [2e6, 4e6], [800.0, 800.0], [800.0, 800.0], [8e3, 9e3])
LATENCY_S, RATE = 0.04, 1e5  # of each direction: a message of activations takes 40 + 32 ms
FORWARD_S, BACKWARD_S, TURN_S = 0.010, 0.020, 0.005
TRANSFER_S = 8 * BATCH * UNITS * 4 / RATE
FETCH_S = 0.150


@pytest.fixture
def accounts() -> Accounts:
    measured = MeasuredFleet(COSTS, ["device-1"], BATCH, OptimizerSettings())
    rates = wire.Rates(uplink=RATE, downlink=RATE, fed_uplink=RATE, fed_downlink=RATE)  # nothing is known of latency
    measured.ready(0, wire.Ready(samples=9, forward_s=[0.01, 0.01], backward_s=[0.02, 0.02], rates=rates))
    shapes = Shapes(((UNITS,), (UNITS,)), (), 10, BATCH)
    return Accounts(["device-1"], shapes, measured)


def opened(accounts: Accounts, now: float, sending: Sending = WHOLE) -> Ledger:
    scene = Scene((0,), accounts.measured.fleet([0]), accounts.measured.costs, 1)
    predicted = accounts.predicted(scene, [1], sending)
    ledger = Ledger(1, 1, 1, 60, 60, (1,), wire.Opening(), {}, scene, 1, predicted, BlockClock(now), sending)
    ledger.clock.begin_rounds(now)
    return ledger


def arrival(came: float) -> Arrival:
    header = wire.Activations(forward_s=FORWARD_S, backward_s=BACKWARD_S, downlink=RATE, fetch_s=FETCH_S)
    return Arrival(header, torch.zeros(1), torch.zeros(1), RATE, TRANSFER_S, came)


def whole(arrived: Arrival, answered: float) -> list[TrainedPart]:
    """A round of one device whose mini-batch is not divided."""
    return [TrainedPart({0: arrived}, answered, ALL, 1.0)]


def trained(accounts: Accounts, rounds: int) -> tuple[Ledger, dict[str, float], float]:
    """Play a block of one device over links with latency; return its ledger, the last round's phases and the time."""
    now = 100.0
    ledger = opened(accounts, now)
    phases: dict[str, float] = {}
    for number in range(1, rounds + 1):
        before = LATENCY_S + FETCH_S if number == 1 else LATENCY_S + TRANSFER_S + BACKWARD_S
        came = now + before + FORWARD_S + LATENCY_S + TRANSFER_S
        now = came + TURN_S
        phases, _ = accounts.note_round(ledger, number, whole(arrival(came), now))
    return ledger, phases, now


def test_latency_is_charged_to_transfers_and_nothing_is_left_over(accounts: Accounts) -> None:
    ledger, phases, now = trained(accounts, 2)
    way_s = LATENCY_S + TRANSFER_S
    expected = {"a1": FORWARD_S, "a2": way_s, "a3": TURN_S, "a4": way_s, "a5": BACKWARD_S}
    assert phases == pytest.approx(expected)
    assert ledger.clock.other_s == pytest.approx(0.0, abs=1e-9)
    assert sum(ledger.clock.seconds.values()) == pytest.approx(now - 100.0)


def test_rounds_are_predicted_once_latency_was_seen(accounts: Accounts) -> None:
    """At first nothing is known of it: 80 of 179 ms are missing. The rates stay what they are."""
    round_s = FORWARD_S + BACKWARD_S + TURN_S + 2 * (LATENCY_S + TRANSFER_S)

    def predicted_s() -> float:
        fleet = accounts.measured.fleet([0])
        return float(latency.round_s(accounts.measured.costs, fleet, np.array([1]), BATCH))

    assert predicted_s() < 0.7 * round_s
    trained(accounts, 60)
    assert predicted_s() == pytest.approx(round_s, rel=0.1)
    fleet = accounts.measured.fleet([0])
    assert fleet.uplink_bps[0] == pytest.approx(RATE, rel=0.2)
    assert fleet.downlink_s[0] == pytest.approx(LATENCY_S, rel=0.2)


def test_fetching_and_delivering_layers_are_measured_with_their_latency(accounts: Accounts) -> None:
    delivered = wire.Delivered(backward_s=BACKWARD_S, upload_s=0.2)
    fetch_s, upload_s = FETCH_S + LATENCY_S, 0.2 + LATENCY_S  # with the plan, and the word that all is delivered
    for _ in range(30):
        ledger, _, now = trained(accounts, 2)
        accounts.note_delivery(ledger, 0, delivered, now + LATENCY_S + TRANSFER_S + BACKWARD_S + upload_s)
        accounts.note_deliveries(ledger)
    assert accounts.measured.transfer_s(0, "fed_downlink_bps", 8e3) == pytest.approx(fetch_s, rel=0.15)
    assert accounts.measured.transfer_s(0, "fed_uplink_bps", 8e3) == pytest.approx(upload_s, rel=0.15)
    assert ledger.clock.seconds["b3"] == pytest.approx(fetch_s, rel=0.15)
    assert ledger.clock.seconds["b1"] == pytest.approx(upload_s, rel=0.15)
    assert ledger.clock.seconds["a4"] == pytest.approx(2 * (LATENCY_S + TRANSFER_S), rel=0.15)


def test_a_round_that_waited_for_test_samples_takes_its_latency_and_no_more(accounts: Accounts) -> None:
    """Test samples were in the way for 0.3 s: that is no phase of a round, and says nothing about links."""
    trained(accounts, 60)
    ledger, _, now = trained(accounts, 2)
    ledger.tested.add(0)
    before, way_s = accounts.measured.transfer_s(0, "uplink_bps", 3200), LATENCY_S + TRANSFER_S
    came = now + 2 * way_s + FORWARD_S + BACKWARD_S + 0.3
    phases, _ = accounts.note_round(ledger, 3, whole(arrival(came), came + TURN_S))
    assert (phases["a2"], phases["a4"]) == pytest.approx((way_s, way_s), rel=0.1)
    assert ledger.clock.other_s == pytest.approx(0.3, abs=0.02)
    assert accounts.measured.transfer_s(0, "uplink_bps", 3200) == before


def test_a_device_that_was_away_says_nothing_about_its_links(accounts: Accounts) -> None:
    """Its last gradients are of an earlier round: how long they were on their way is not known."""
    ledger, _, now = trained(accounts, 2)
    before = accounts.measured.transfer_s(0, "uplink_bps", 3200)
    ledger.present.append(())
    accounts.note_round(ledger, 4, whole(arrival(now + 50.0), now + 50.1))
    assert accounts.measured.transfer_s(0, "uplink_bps", 3200) == before


@pytest.mark.parametrize("rate", [1e-300, float("inf"), float("nan"), -1.0])
def test_rates_that_cannot_be_do_no_harm(accounts: Accounts, rate: float) -> None:
    ledger, _, now = trained(accounts, 2)
    lying = arrival(now + 0.2)
    lying.header.downlink = rate
    phases, _ = accounts.note_round(ledger, 3, whole(lying, now + 0.21))
    assert sum(phases.values()) == pytest.approx(0.21)
    assert np.isfinite(accounts.measured.transfer_s(0, "downlink_bps", 3200))


@pytest.mark.parametrize("later_s", [-0.05, 0.3])
def test_the_begin_of_a_block_is_charged_to_whose_layers_came_last(accounts: Accounts, later_s: float) -> None:
    """Until the first activations could be used: b3 is the device's way, or the edge server's own download."""
    ledger = opened(accounts, 100.0)
    came = 100.0 + FETCH_S + FORWARD_S + LATENCY_S + TRANSFER_S
    ledger.placed_at = came + later_s
    used = max(came, ledger.placed_at)
    phases, _ = accounts.note_round(ledger, 1, whole(arrival(came), used + TURN_S))
    assert phases["a3"] == pytest.approx(TURN_S)
    assert phases["a1"] == (pytest.approx(FORWARD_S) if later_s < 0 else 0.0)
    assert ledger.clock.bottleneck == (latency.EDGE_SERVER if later_s > 0 else "device-1", "b3")
    assert sum(ledger.clock.seconds.values()) == pytest.approx(used + TURN_S - 100.0)
    assert ledger.clock.other_s == pytest.approx(0.0, abs=1e-9)


# --- parts ---

PARTS = 4


def in_parts(accounts: Accounts, rounds: int) -> tuple[Ledger, list[float]]:
    """Play a block of one device that sends its mini-batches in parts; return its ledger, and when rounds ended."""
    sending = Sending(PARTS)
    ledger = opened(accounts, 100.0, sending)
    up_s = down_s = TRANSFER_S / PARTS
    forward_s, backward_s, turn_s = FORWARD_S / PARTS, BACKWARD_S / PARTS, TURN_S / PARTS
    free, ends, update_s = 100.0 + LATENCY_S + FETCH_S, [], 0.0
    for number in range(1, rounds + 1):
        uplink = downlink = server = 0.0
        parts, passes = [], free + PARTS * forward_s
        for part in range(PARTS):
            uplink = max(uplink, free + (part + 1) * forward_s) + up_s
            came = uplink + LATENCY_S
            server = max(server, came) + turn_s
            downlink = max(downlink, server) + down_s
            passes = max(passes, downlink + LATENCY_S) + backward_s
            header = wire.Activations(forward_s=forward_s, backward_s=backward_s, downlink=RATE, fetch_s=FETCH_S)
            header.update_s = update_s
            arrived = Arrival(header, torch.zeros(1), torch.zeros(1), RATE, up_s, came)
            parts.append(TrainedPart({0: arrived}, server, ALL, 1.0))
        update_s, free = passes - downlink - LATENCY_S, passes
        accounts.note_round(ledger, number, parts)
        accounts.measured.computed(0, 1, forward_s, backward_s, PARTS)
        ends.append(server)
    return ledger, ends


def test_rounds_in_parts_are_predicted_once_latency_was_seen(accounts: Accounts) -> None:
    """Latency is learned from the first part of a round and the last one of the round before, rates from all."""
    _, ends = in_parts(accounts, 80)
    fleet, costs = accounts.measured.fleet([0]), accounts.measured.costs
    predicted_s = float(latency.round_s(costs, fleet, np.array([1]), BATCH, PARTS))
    assert predicted_s == pytest.approx(ends[-1] - ends[-2], rel=0.1)
    assert fleet.uplink_bps[0] == pytest.approx(RATE, rel=0.2)
    assert fleet.downlink_bps[0] == pytest.approx(RATE, rel=0.2)
    assert fleet.uplink_s[0] == pytest.approx(LATENCY_S, rel=0.25)
    whole_s = float(latency.round_s(costs, fleet, np.array([1]), BATCH))
    assert predicted_s < 0.9 * whole_s


def test_the_phases_of_rounds_in_parts_add_up(accounts: Accounts) -> None:
    ledger, ends = in_parts(accounts, 20)
    assert sum(ledger.clock.seconds.values()) + ledger.clock.other_s == pytest.approx(ends[-1] - 100.0)
    assert ledger.clock.other_s < 0.02 * (ends[-1] - 100.0)
    assert ledger.bits == 20 * 2 * 8 * BATCH * UNITS * 4
    assert ledger.clock.seconds["a3"] / 20 < 2 * TURN_S


def test_the_comparison_of_types_is_no_phase(accounts: Accounts) -> None:
    ledger = opened(accounts, 100.0)
    came = 100.0 + LATENCY_S + FETCH_S + FORWARD_S + LATENCY_S + TRANSFER_S
    part = TrainedPart({0: arrival(came)}, came + 3.0 + TURN_S, ALL, 1.0, compared_s=3.0)
    phases, _ = accounts.note_round(ledger, 1, [part])
    assert phases["a3"] == pytest.approx(TURN_S)
    assert ledger.clock.other_s == pytest.approx(3.0)


def test_the_first_round_of_a_comparing_block_is_predicted_whole_and_exact(accounts: Accounts) -> None:
    ledger = opened(accounts, 100.0, Sending(PARTS, "int8", exact_round=1))
    plain = ledger.predicted_s
    ledger.predicted_first = accounts.predicted(ledger.scene, [1], Sending())
    first, each = (
        sum(seconds for phase, seconds in predicted.items() if phase.startswith("a"))
        for predicted in (ledger.predicted_first, ledger.predicted)
    )
    assert ledger.predicted_s - plain == pytest.approx(first - each)
    assert first > 2 * each


def test_devices_that_missed_a_part_take_no_part_in_the_round(accounts: Accounts) -> None:
    ledger = opened(accounts, 100.0, Sending(2))
    now, parts = 101.0, []
    for devices in ((0, 1), (0,)):
        now += 1.0
        arrivals = {device: arrival(now) for device in devices}
        parts.append(TrainedPart(arrivals, now + TURN_S, ALL, 1.0))
    accounts.names, ledger.cuts = ["device-1", "device-2"], (1, 1)  # type: ignore[assignment]
    accounts.measured.devices[1] = accounts.measured.devices[0]
    accounts.note_round(ledger, 1, parts)
    assert ledger.present == [(0,)]
    assert ledger.bits == 2 * 3 * 8 * BATCH * UNITS * 4 / 2
