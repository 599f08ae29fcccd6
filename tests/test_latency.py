import dataclasses
import heapq
import itertools
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptsfl import latency
from adaptsfl.errors import InvalidInput
from adaptsfl.fleet import FIXED, RATES
from problems import Small, by_hand, small_problems

CUTS = np.array([1, 2])


def of(function, cuts=CUTS):
    """Call a per-device latency function on the problem worked by hand."""
    problem = by_hand()
    if "batch_size" in function.__code__.co_varnames:
        return function(problem.costs, problem.fleet, np.asarray(cuts), problem.batch_size)
    return function(problem.costs, problem.fleet, np.asarray(cuts))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (latency.client_forward_s, [2.0, 3.0]),
        (latency.activation_upload_s, [10.0, 8.0]),
        (latency.server_turn_s, 4.8),
        (latency.gradient_download_s, [5.0, 4.0]),
        (latency.client_backward_s, [4.0, 6.0]),
        (latency.to_server_s, [12.0, 11.0]),
        (latency.from_server_s, [9.0, 10.0]),
        (latency.client_model_upload_s, [4.0, 6.0]),
        (latency.client_model_download_s, [2.0, 3.0]),
        (latency.server_model_upload_s, 2.0),
        (latency.server_model_download_s, 1.0),
        (latency.round_s, 26.8),
        (latency.aggregation_s, 9.0),
    ],
)
def test_terms_worked_by_hand(function, expected):
    """Device 1 (100 FLOPS) is cut after layer 1, device 2 (200 FLOPS) after layer 2; batches of 2.

    a1: 2·100/100 = 2 and 2·300/200 = 3.            a2: 2·50/10 = 10 and 2·20/5 = 8.
    a3: of 600+1200 = 1800 FLOPs a sample, 1500 and 900 are left to the server: 2·2400/1000 = 4.8.
    a4: 2·50/20 = 5 and 2·20/10 = 4.                a5: 2·200/100 = 4 and 2·600/200 = 6.
    b1: 16/4 = 4 and 48/8 = 6; the server exchanges 2·48 − (16+48) = 32 bits: 32/16 = 2.
    b3: 16/8 = 2 and 48/16 = 3; 32/32 = 1.
    Round: max(2+10, 3+8) + 4.8 + max(5+4, 4+6) = 12 + 4.8 + 10 = 26.8. Aggregation: max(6, 2) + max(3, 1) = 9.
    """
    np.testing.assert_allclose(of(function), expected, rtol=1e-15)


def with_fixed_costs():
    """The problem worked by hand, with fixed seconds that are powers of ten, each with its own."""
    problem = by_hand()
    server = dataclasses.replace(
        problem.fleet.server, turn_s=10.0, to_fed_s=20.0, from_fed_s=30.0, averaging_s=40.0, averaging_bps=12.0
    )
    fixed = {name: [100.0 + 10 * k, 200.0 + 10 * k] for k, name in enumerate(FIXED)}
    return dataclasses.replace(problem, fleet=dataclasses.replace(problem.fleet, server=server, **fixed))


def test_fixed_seconds_worked_by_hand():
    """The times of above, and fixed seconds: 100, 110, …, 150 of device 1 and 200, 210, …, 250 of device 2.

    a1: 102 and 203. a2: 120+10 and 220+8. a3: 10+4.8. a4: 130+5 and 230+4. a5: 110+4 and 210+6. b1: 140+4 and 240+6,
    server 20+2. b2: 40 and 2·48/12 = 8. b3: 150+2 and 250+3, server 30+1.
    Round: 203+228 + 14.8 + 234+216 = 895.8. Aggregation: 246 + 48 + 253 = 547.
    """
    problem = with_fixed_costs()
    moment = problem.costs, problem.fleet, CUTS
    assert problem.round_s(CUTS) == pytest.approx(895.8, rel=1e-15)
    assert problem.aggregation_s(CUTS) == pytest.approx(547.0, rel=1e-15)
    phases = [phase.seconds for phase in latency.phase_times(*moment, problem.batch_size)]
    assert phases == pytest.approx([203.0, 228.0, 14.8, 234.0, 216.0, 246.0, 48.0, 253.0], rel=1e-15)
    assert latency.server_model_upload_s(*moment) == 22.0
    assert latency.server_model_download_s(*moment) == 31.0
    assert latency.server_turns_s(*moment, problem.batch_size) == pytest.approx(24.8)  # devices in turn: two turns


def test_a_transfer_of_nothing_takes_no_time():
    """Equal cuts leave the server nothing to exchange; a layer without parameters or outputs has nothing to send."""
    problem = with_fixed_costs()
    assert latency.server_model_upload_s(problem.costs, problem.fleet, np.array([2, 2])) == 0
    assert latency.server_model_download_s(problem.costs, problem.fleet, np.array([2, 2])) == 0
    nothing = {key: [0.0, 0.0, 0.0] for key in ("activation_bits", "gradient_bits", "client_model_bits")}
    costs = dataclasses.replace(problem.costs, **nothing)
    for function in (latency.client_model_upload_s, latency.client_model_download_s):
        np.testing.assert_array_equal(function(costs, problem.fleet, CUTS), [0.0, 0.0])
    for function in (latency.activation_upload_s, latency.gradient_download_s):
        np.testing.assert_array_equal(function(costs, problem.fleet, CUTS, 2), [0.0, 0.0])


def with_statistics():
    """The problem worked by hand, with 8, 24 and 24 bits of batch-norm's statistics in layers 1, 1..2 and 1..3."""
    problem = by_hand()
    return dataclasses.replace(problem, costs=dataclasses.replace(problem.costs, statistics_bits=[8.0, 24.0, 24.0]))


def test_a_reestimation_by_hand():
    """One mini-batch forward, and the statistics to the fed server and back.

    a1 and a2 as above: max(2+10, 3+8) = 12. a3: 500 and 300 FLOPs a sample are left to the server: 2·800/1000 = 1.6.
    b1: 8/4 = 2 and 24/8 = 3; the server has those of layer 2 of device 1, 16 bits: 16/16 = 1. b3: 8/8 = 1 and
    24/16 = 1.5; 16/32 = 0.5. In all 12 + 1.6 + 3 + 1.5 = 18.1, less than a round.
    """
    problem = with_statistics()
    moment = problem.costs, problem.fleet, CUTS, problem.batch_size
    assert latency.reestimation_s(*moment) == pytest.approx(18.1, rel=1e-15)
    phases = {time.phase: (time.seconds, time.bottleneck) for time in latency.reestimation_times(*moment)}
    assert phases == {
        "a1": (2.0, "device 1"),
        "a2": (10.0, "device 1"),
        "a3": (1.6, "edge server"),
        "b1": (3.0, "device 2"),
        "b3": (1.5, "device 2"),
    }
    without = latency.reestimation_s(by_hand().costs, *moment[1:])
    assert without == pytest.approx(13.6, rel=1e-15)


def test_the_phases_of_a_reestimation_add_up_also_where_the_server_is_slowest():
    problem = with_statistics()
    slow = dataclasses.replace(problem.fleet.server, to_fed_bps=1.0, from_fed_bps=1.0)
    moment = problem.costs, dataclasses.replace(problem.fleet, server=slow), np.array([1, 3]), problem.batch_size
    times = latency.reestimation_times(*moment)
    assert sum(time.seconds for time in times) == pytest.approx(float(latency.reestimation_s(*moment)), rel=1e-15)
    assert [time.bottleneck for time in times if time.phase in ("b1", "b3")] == ["edge server"] * 2


def test_block_is_interval_rounds_and_one_aggregation():
    """T(I, μ) = 5 · 26.8 + 9 = 143."""
    problem = by_hand()
    block = latency.block_s(problem.costs, problem.fleet, CUTS, problem.batch_size, interval=5)
    assert block == pytest.approx(143.0, rel=1e-15)


def test_phases_name_their_bottlenecks():
    """Device 1 is last to reach the server (12 s), device 2 last to finish (10 s) and slowest to aggregate."""
    problem = by_hand()
    phases = latency.phase_times(problem.costs, problem.fleet, CUTS, problem.batch_size)
    assert [(phase.phase, phase.seconds, phase.bottleneck) for phase in phases] == [
        ("a1", 2.0, "device 1"),
        ("a2", 10.0, "device 1"),
        ("a3", pytest.approx(4.8), "edge server"),
        ("a4", 4.0, "device 2"),
        ("a5", 6.0, "device 2"),
        ("b1", 6.0, "device 2"),
        ("b2", 0.0, "fed server"),
        ("b3", 3.0, "device 2"),
    ]


def test_edge_server_is_the_bottleneck_of_an_aggregation_when_it_exchanges_most():
    """Cuts 1 and 3: Λ = 2·160 − 176 = 144 bits, 144/16 = 9 s up against 160/8 = 20; with a 4 bit/s link, 36 s."""
    problem = by_hand()
    slow = problem.fleet.scaled(0.25, "server.to_fed_bps")
    upload = latency.phase_times(problem.costs, slow, np.array([1, 3]), 2)[5]
    assert (upload.seconds, upload.bottleneck) == (36.0, latency.EDGE_SERVER)


def test_at_cut_l_the_server_has_nothing_to_do():
    problem = by_hand()
    assert latency.server_turn_s(problem.costs, problem.fleet, np.array([3, 3]), 2) == 0


def test_equal_cuts_leave_nothing_for_the_server_to_exchange():
    problem = by_hand()
    assert latency.non_common_bits(problem.costs, np.array([2, 2])) == 0


@given(small_problems(Small(restricted=False)), st.data())
def test_phases_add_up_to_the_round_and_the_aggregation(problem, data):
    layers = st.integers(1, problem.layers)
    cuts = np.array(data.draw(st.lists(layers, min_size=problem.devices, max_size=problem.devices)))
    phases = latency.phase_times(problem.costs, problem.fleet, cuts, problem.batch_size)
    assert sum(phase.seconds for phase in phases if phase.every_round) == pytest.approx(float(problem.round_s(cuts)))
    assert sum(phase.seconds for phase in phases if not phase.every_round) == pytest.approx(
        float(problem.aggregation_s(cuts))
    )


@given(small_problems(Small(restricted=False)), st.data())
def test_more_of_any_resource_is_never_slower(problem, data):
    """For one device's rate, or one of the server's, raised by any factor, with the cuts kept."""
    layers = st.integers(1, problem.layers)
    cuts = np.array(data.draw(st.lists(layers, min_size=problem.devices, max_size=problem.devices)))
    factor = data.draw(st.floats(1, 100))
    resource = data.draw(st.sampled_from([*RATES, "server.flops", "server.to_fed_bps", "server.from_fed_bps"]))
    if "." in resource:
        better = problem.fleet.scaled(factor, resource)
    else:
        device = data.draw(st.integers(0, problem.devices - 1))
        rates = getattr(problem.fleet, resource).copy()
        rates[device] *= factor
        better = problem.fleet.with_rates({resource: rates})
    improved = dataclasses.replace(problem, fleet=better)
    assert improved.round_s(cuts) <= problem.round_s(cuts) * (1 + 1e-12)
    assert improved.aggregation_s(cuts) <= problem.aggregation_s(cuts) * (1 + 1e-12)


def test_small_work_beside_large_work_is_not_lost():
    """What a cut leaves to the server is the difference of each pass by itself: 0 + 0.5, beside 1e17 forward."""
    costs = dataclasses.replace(by_hand().costs, forward_flops=[1e17] * 3, backward_flops=[1.0, 1.5, 2.0])
    np.testing.assert_array_equal(latency.remaining_flops(costs), [1.0, 0.5, 0.0])


def test_many_plans_at_once_equal_one_at_a_time():
    problem = by_hand()
    every = np.array([[j, k] for j in (1, 2, 3) for k in (1, 2, 3)])
    one_by_one = [float(problem.round_s(cuts) + problem.aggregation_s(cuts)) for cuts in every]
    np.testing.assert_array_equal(problem.round_s(every) + problem.aggregation_s(every), one_by_one)


def simulated_round_s(forward, upload, download, backward, turn_s, parts, sending=None):
    """Run k parts through every device's processor and links and the server, each of which takes one part at a time.

    Args:
        sending: how long an upload and a download occupy each link; if they take longer, the rest is latency.
    """
    up, down = sending or (upload, download)
    devices = range(len(forward))
    processor = [parts * forward[i] for i in devices]  # free again after all forward passes
    uplink, downlink = [0.0 for _ in devices], [0.0 for _ in devices]
    server = 0.0
    for part in range(1, parts + 1):
        for i in devices:
            uplink[i] = max(uplink[i], part * forward[i]) + up[i]
        server = max(server, *(uplink[i] + upload[i] - up[i] for i in devices)) + turn_s
        for i in devices:
            downlink[i] = max(downlink[i], server) + down[i]
            processor[i] = max(processor[i], downlink[i] + download[i] - down[i]) + backward[i]
    return max(processor)


class Queue:
    """A processor, a link or the server: does one job at a time, that of the lowest rank first."""

    def __init__(self, world):
        self.world, self.busy, self.waiting = world, False, []

    def add(self, rank, seconds, then):
        heapq.heappush(self.waiting, (rank, next(self.world.ticket), seconds, then))
        self.world.at(self.world.now, self.start)

    def start(self):
        if not self.busy and self.waiting:
            self.busy, (_, _, seconds, then) = True, heapq.heappop(self.waiting)
            self.world.at(self.world.now + seconds, lambda: self.end(then))

    def end(self, then):
        self.busy = False
        then()
        self.start()


class PlayedRound:
    """A round in parts, event by event. Every queue decides by itself; nothing here knows any formula.

    The processor of a device takes forward passes before backward passes. A link is busy while it sends; what it sent
    arrives after the link's latency. The server's turn of a part begins when that part of every device has arrived.
    """

    def __init__(self, forward, sending, backward, latency_s, turn_s, parts):
        self.now, self.ticket, self.events = 0.0, itertools.count(), []
        (self.up, self.down), (self.up_latency, self.down_latency) = sending, latency_s
        self.backward, self.turn_s, self.devices = backward, turn_s, range(len(forward))
        self.processors, self.uplinks, self.downlinks = ([Queue(self) for _ in self.devices] for _ in range(3))
        self.server, self.missing = Queue(self), dict.fromkeys(range(parts), len(forward))
        for part, i in itertools.product(range(parts), self.devices):
            self.processors[i].add((0, part), forward[i], partial(self.computed, i, part))

    def at(self, time, act):
        heapq.heappush(self.events, (time, next(self.ticket), act))

    def after(self, seconds, act):
        self.at(self.now + seconds, act)

    def computed(self, i, part):
        self.uplinks[i].add(part, self.up[i], lambda: self.after(self.up_latency[i], partial(self.arrived, part)))

    def arrived(self, part):
        self.missing[part] -= 1
        if not self.missing[part]:
            self.server.add(part, self.turn_s, partial(self.trained, part))

    def trained(self, part):
        for i in self.devices:
            self.downlinks[i].add(part, self.down[i], partial(self.sent_back, i, part))

    def sent_back(self, i, part):
        self.after(self.down_latency[i], partial(self.processors[i].add, (1, part), self.backward[i], lambda: None))

    def seconds(self):
        while self.events:
            self.now, _, act = heapq.heappop(self.events)
            act()
        return self.now


@given(st.integers(0, 2**32 - 1))
def test_the_formula_is_exact_for_devices_that_differ(seed):
    """Devices, links and the server of any speed, up to five devices: the maxima over devices lose nothing."""
    rng = np.random.default_rng(seed)
    devices, parts = int(rng.integers(1, 6)), int(rng.integers(2, 9))
    spread = rng.choice([0.1, 1.0, 3.0])
    times = forward, up, down, backward, up_latency, down_latency = np.exp(rng.normal(0, spread, (6, devices)))
    times[rng.random((6, devices)) < 0.2] = 0.0  # a cut that sends nothing or leaves no work, a link without latency
    turn_s = float(rng.choice([0.0, np.exp(rng.normal(0, spread))]))
    first, last, more = forward + up + up_latency, down + down_latency + backward, parts - 1
    own = (
        first,
        first + more * np.maximum(forward, up),
        last,
        last + more * np.maximum(down, backward),
        parts * (forward + backward),
    )
    played = PlayedRound(forward, (up, down), backward, (up_latency, down_latency), turn_s, parts).seconds()
    assert latency.pipelined_s(np.max(own, axis=1), turn_s, parts) == pytest.approx(played, rel=1e-12)
    phases = forward, up + up_latency, down + down_latency, backward
    assert simulated_round_s(*phases, turn_s, parts, (up, down)) == pytest.approx(played, rel=1e-12)


@given(small_problems(Small(restricted=False, slow_server=True)), st.data())
def test_one_part_takes_as_long_as_a_whole_mini_batch(problem, data):
    """The formula for parts, with one part, against that of the paper."""
    cuts = any_cuts(problem, data)
    moment = (problem.costs, problem.fleet, cuts, problem.batch_size)
    terms = np.max(latency.part_terms(*moment, 1), axis=-1)
    whole_s = float(problem.round_s(cuts))
    assert float(latency.pipelined_s(terms, latency.server_turn_s(*moment), 1)) == pytest.approx(whole_s, rel=1e-12)


@given(small_problems(Small(restricted=False, slow_server=True)), st.data())
def test_where_passes_and_turns_have_no_fixed_seconds_more_parts_are_never_slower(problem, data):
    """Of any two numbers of parts, not only of multiples, and whatever the latency of the links."""
    cuts = any_cuts(problem, data)
    nothing = {name: np.zeros(problem.devices) for name in ("forward_s", "backward_s")}
    server = dataclasses.replace(problem.fleet.server, turn_s=0.0)
    fleet = dataclasses.replace(problem.fleet, server=server, **nothing)
    times = [float(latency.round_s(problem.costs, fleet, cuts, 12, k)) for k in (1, 2, 3, 4, 6, 12)]
    assert (np.diff(times) <= 1e-12 * times[0]).all()


def any_cuts(problem, data):
    layers = st.integers(1, problem.layers)
    return np.array(data.draw(st.lists(layers, min_size=problem.devices, max_size=problem.devices)))


@given(small_problems(Small(restricted=False, slow_server=True)), st.data())
def test_a_round_in_parts_takes_as_long_as_its_simulation(problem, data):
    parts, part = data.draw(st.sampled_from([1, 2, 3, 4, 7])), data.draw(st.integers(1, 3))
    cuts = any_cuts(problem, data)
    moment = (problem.costs, problem.fleet, cuts, part)
    phases = (
        latency.client_forward_s(*moment),
        latency.activation_upload_s(*moment),
        latency.gradient_download_s(*moment),
        latency.client_backward_s(*moment),
    )
    sending = [latency.activation_sending_s(*moment).tolist(), latency.gradient_sending_s(*moment).tolist()]
    turn_s = float(latency.server_turn_s(*moment))
    simulated = simulated_round_s(*(phase.tolist() for phase in phases), turn_s, parts, sending)
    predicted = float(latency.round_s(problem.costs, problem.fleet, cuts, parts * part, parts))
    assert predicted == pytest.approx(simulated, rel=1e-12)


def test_every_path_of_the_pipeline_is_critical_for_some_times():
    """Random times: X_1 + ks + Y_1, X_k + s + Y_1, X_1 + s + Y_k and Z are each the longest in some of the cases."""
    rng, critical = np.random.default_rng(0), set()
    for _ in range(1000):
        forward, upload, download, backward = np.exp(rng.normal(0, 2, (4, 3)))
        turn_s, parts = float(np.exp(rng.normal(0, 2))), int(rng.integers(2, 6))
        first, last, more = forward + upload, download + backward, parts - 1
        own = (
            first,
            first + more * np.maximum(forward, upload),
            last,
            last + more * np.maximum(download, backward),
            parts * (forward + backward),
        )
        x_1, x_k, y_1, y_k, z = terms = np.max(own, axis=1)
        critical.add(int(np.argmax([x_1 + parts * turn_s + y_1, x_k + turn_s + y_1, x_1 + turn_s + y_k, z])))
        simulated = simulated_round_s(forward, upload, download, backward, turn_s, parts)
        assert latency.pipelined_s(terms, turn_s, parts) == pytest.approx(simulated, rel=1e-12)
    assert critical == {0, 1, 2, 3}


@given(small_problems(Small(restricted=False, slow_server=True)), st.data())
def test_phases_of_a_round_in_parts_add_up(problem, data):
    parts, cuts = data.draw(st.sampled_from([2, 3, 5])), any_cuts(problem, data)
    moment = (problem.costs, problem.fleet, cuts, problem.batch_size * parts, parts)
    phases = [phase.seconds for phase in latency.phase_times(*moment) if phase.every_round]
    assert sum(phases) == pytest.approx(float(latency.round_s(*moment)), rel=1e-12)


def test_two_parts_worked_by_hand():
    """Batches of 2 in two parts of 1, with half the seconds of above for each.

    f: 1 and 1.5. u: 5 and 4. s: 2.4. d: 2.5 and 2. g: 2 and 3.
    X_1 = 6, 5.5. X_2 = 11, 9.5. Y_1 = 4.5, 5. Y_2 = 7, 8. Z = 6, 9.
    6 + 4.8 + 5 = 15.8; 11 + 2.4 + 5 = 18.4; 6 + 2.4 + 8 = 16.4; 9: the uploads of device 1 decide.
    """
    problem = by_hand()
    moment = (problem.costs, problem.fleet, CUTS, 2, 2)
    assert latency.round_s(*moment) == pytest.approx(18.4)
    phases = [(phase.seconds, phase.bottleneck) for phase in latency.phase_times(*moment)][:5]
    names = problem.fleet.name(0), problem.fleet.name(1)
    owners = [names[0], names[0], latency.EDGE_SERVER, names[1], names[1]]
    assert phases == [(pytest.approx(s), who) for s, who in zip([1.0, 10.0, 2.4, 2.0, 3.0], owners, strict=True)]


def test_parts_must_be_equal():
    problem = by_hand()
    with pytest.raises(InvalidInput, match=r"micro_batches: is 3, which does not divide the batch size 2"):
        latency.round_s(problem.costs, problem.fleet, CUTS, 2, 3)
