import dataclasses

import numpy as np
import pytest

from adaptsfl.config import FleetConfig, NoiseConfig, parse
from adaptsfl.errors import InvalidInput
from adaptsfl.fleet import (
    FIXED,
    FLEETS,
    RATES,
    ConstantResources,
    Device,
    Fleet,
    FleetRanges,
    MeasurementNoise,
    RedrawnResources,
    Server,
    noise_from,
    read_trace,
    resources_from,
    write_trace,
)

SERVER = Server(2e13, 4e8, 4e8)


def same(one: Fleet, other: Fleet) -> bool:
    return one.server == other.server and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in (*RATES, *FIXED)
    )


def test_paper_fleet_is_table_ii():
    fleet = FLEETS["paper"].sample(1000, np.random.default_rng(0))
    assert fleet.size == 1000
    assert fleet.server == Server(20e12, 400e6, 400e6)
    for rate, low, high in [
        ("flops", 1e12, 2e12),
        ("uplink_bps", 75e6, 80e6),
        ("downlink_bps", 370e6, 370e6),
        ("fed_uplink_bps", 75e6, 80e6),
        ("fed_downlink_bps", 370e6, 370e6),
    ]:
        values = getattr(fleet, rate)
        assert values.min() >= low
        assert values.max() <= high
        # Uniform: the extremes of a thousand draws are within 2 % of the range's ends.
        assert values.max() - values.min() >= 0.98 * (high - low)


def test_the_two_uplinks_are_drawn_independently():
    fleet = FLEETS["paper"].sample(1000, np.random.default_rng(0))
    assert abs(np.corrcoef(fleet.uplink_bps, fleet.fed_uplink_bps)[0, 1]) < 0.1


def test_log_uniform_spreads_evenly_over_decades():
    ranges = FleetRanges(flops=(1e10, 1e12), logarithmic=True)
    flops = ranges.sample(4000, np.random.default_rng(1)).flops
    assert 1e10 <= flops.min() <= flops.max() <= 1e12
    assert np.mean(flops < 1e11) == pytest.approx(0.5, abs=0.03)


def test_same_seed_and_round_give_the_same_fleet_in_any_order():
    one, other = (RedrawnResources(FLEETS["paper"], 20, seed=7) for _ in range(2))
    forwards = [one.at(round_) for round_ in range(5)]
    backwards = [other.at(round_) for round_ in reversed(range(5))][::-1]
    assert all(same(a, b) for a, b in zip(forwards, backwards, strict=True))
    assert not same(one.at(0), RedrawnResources(FLEETS["paper"], 20, seed=8).at(0))


def test_each_round_redraws_what_the_paper_redraws_and_nothing_else():
    ranges = dataclasses.replace(FLEETS["heterogeneous"], server=SERVER)
    resources = RedrawnResources(ranges, 20, seed=0)
    first, second = resources.at(1), resources.at(2)
    changed = {rate for rate in RATES if not np.array_equal(getattr(first, rate), getattr(second, rate))}
    assert changed == {"flops", "uplink_bps", "fed_uplink_bps"}
    assert first.server == second.server


def test_constant_resources_never_change():
    fleet = FLEETS["paper"].sample(3, np.random.default_rng(0))
    assert ConstantResources(fleet).at(0) is ConstantResources(fleet).at(99)


def test_measurement_noise_has_the_asked_coefficient_of_variation():
    fleet = FleetRanges(flops=(1e12, 1e12), uplink_bps=(1e7, 1e7)).sample(20_000, np.random.default_rng(0))
    measured = MeasurementNoise(compute_cv=0.1, uplink_cv=0.2, seed=3).measure(fleet, 5)
    assert measured.flops.mean() == pytest.approx(1e12, rel=0.01)
    assert measured.flops.std() / measured.flops.mean() == pytest.approx(0.1, rel=0.03)
    assert measured.uplink_bps.std() / measured.uplink_bps.mean() == pytest.approx(0.2, rel=0.03)
    assert np.array_equal(measured.downlink_bps, fleet.downlink_bps)


def test_measurement_noise_is_seeded_and_differs_by_round():
    fleet = FLEETS["paper"].sample(20, np.random.default_rng(0))
    noise = MeasurementNoise(compute_cv=0.3, seed=1)
    assert same(noise.measure(fleet, 4), noise.measure(fleet, 4))
    assert not same(noise.measure(fleet, 4), noise.measure(fleet, 5))


def test_huge_measurement_noise_leaves_rates_positive():
    fleet = FLEETS["paper"].sample(5000, np.random.default_rng(0))
    measured = MeasurementNoise(compute_cv=2.0, uplink_cv=2.0, seed=0).measure(fleet, 0)
    for rate in ("flops", "uplink_bps", "fed_uplink_bps"):
        factors = getattr(measured, rate) / getattr(fleet, rate)
        assert 0.05 <= factors.min() < 0.06  # cut off there, and not far above it


def test_measurement_errors_have_nothing_to_do_with_the_truth():
    """With one seed for both, errors are drawn from another stream than the resources."""
    resources = RedrawnResources(FLEETS["paper"], 2000, seed=5)
    truth = resources.at(3).flops
    errors = MeasurementNoise(compute_cv=0.1, seed=5).measure(resources.at(3), 3).flops / truth
    assert abs(np.corrcoef(truth, errors)[0, 1]) < 0.08


def test_no_noise_measures_the_truth():
    fleet = FLEETS["paper"].sample(5, np.random.default_rng(0))
    assert same(MeasurementNoise().measure(fleet, 0), fleet)


def test_fleet_of_single_devices_gives_them_back():
    devices = [Device("a", 1.0, 2.0, 3.0, 4.0, 5.0, memory_bytes=6.0), Device("b", 2.0, 3.0, 4.0, 5.0, 6.0)]
    fleet = Fleet.of(devices, SERVER)
    assert list(fleet) == devices


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flops": [1.0, -2.0]}, r"flops\[1\]: is -2"),
        ({"flops": [1.0, float("nan")]}, r"flops\[1\]: is nan"),
        ({"uplink_bps": [1.0, 0.0]}, r"uplink_bps\[1\]: is 0\. Give a number above zero"),
        ({"uplink_bps": [1.0, 1e-60]}, r"uplink_bps\[1\]: is 1e-60\. Give a number between 1e-50 and 1e\+50"),
        ({"downlink_bps": [1.0]}, r"downlink_bps: has 1 entries, expected 2"),
        ({"memory_bytes": [1.0, -1.0]}, r"memory_bytes\[1\]: is -1"),
        ({"flops": []}, r"flops: is empty"),
        ({"flops": [[1.0], [2.0]]}, r"flops: is of shape \(2, 1\)"),
        ({"names": ("a",)}, r"names: has 1 entries"),
        ({"names": ("a", "")}, r"names\[1\]: is ''"),
        ({"names": ("a", "b\n")}, r"names\[1\]: is 'b\\n'. Give a name of printable characters"),
    ],
)
def test_bad_values_are_explained(change, message):
    good = {rate: [1.0, 2.0] for rate in RATES}
    with pytest.raises(InvalidInput, match=message):
        Fleet(**{**good, "server": SERVER, **change})


def test_arrays_cannot_be_changed_by_accident():
    fleet = FLEETS["paper"].sample(2, np.random.default_rng(0))
    with pytest.raises(ValueError, match="read-only"):
        fleet.flops[0] = 1.0


# ── Traces ──────────────────────────────────────────────────────────────────────────────────────────────────────────

HEADER = "round,device,flops,uplink_bps,downlink_bps,fed_uplink_bps,fed_downlink_bps\n"
ROUND_0 = "0,server,1000,,,16,32\n0,phone,100,10,20,4,8\n0,board,200,5,10,8,16\n"


def trace(tmp_path, text, **options):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return read_trace(path, **options)


def test_trace_replays_what_was_written(tmp_path):
    resources = RedrawnResources(FLEETS["paper"], 4, seed=0)
    write_trace(tmp_path / "t.csv", [resources.at(round_) for round_ in range(3)])
    replayed = read_trace(tmp_path / "t.csv")
    assert all(same(replayed.at(round_), resources.at(round_)) for round_ in range(3))


def test_trace_keeps_values_until_they_change(tmp_path):
    replayed = trace(tmp_path, HEADER + ROUND_0 + "3,phone,,7,,,\n5,server,500,,,,\n")
    assert [replayed.at(round_).uplink_bps[0] for round_ in (0, 2, 3, 100)] == [10, 10, 7, 7]
    assert [replayed.at(round_).server.flops for round_ in (4, 5)] == [1000, 500]
    assert replayed.at(4).server == Server(1000, 16, 32)
    assert replayed.at(4).names == ("phone", "board")


def test_trace_may_give_memory(tmp_path):
    header, rows = HEADER.strip() + ",memory_bytes\n", ROUND_0.replace("\n", ",\n").replace("4,8,\n", "4,8,5000\n")
    fleet = trace(tmp_path, header + rows).at(0)
    assert fleet.memory_bytes.tolist() == [5000.0, np.inf]
    write_trace(tmp_path / "again.csv", [fleet])
    assert read_trace(tmp_path / "again.csv").at(0).memory_bytes.tolist() == [5000.0, np.inf]


def test_trace_may_give_fixed_seconds(tmp_path):
    rates = {rate: [1.0, 2.0] for rate in RATES}
    fixed = {name: [0.0, 0.25 * k] for k, name in enumerate(FIXED)}
    server = Server(1.0, 2.0, 3.0, turn_s=4.0, to_fed_s=5.0, from_fed_s=6.0, averaging_s=7.0, averaging_bps=8.0)
    fleet = Fleet(**rates, **fixed, server=server, names=("phone", "board"))
    write_trace(tmp_path / "t.csv", [fleet])
    assert same(read_trace(tmp_path / "t.csv").at(0), fleet)
    header, rows = HEADER.strip() + ",uplink_s\n", ROUND_0.replace("\n", ",\n")
    replayed = trace(tmp_path, header + rows + "2,phone,,,,,,0.5\n")
    assert [replayed.at(round_).uplink_s[0] for round_ in (0, 2)] == [0.0, 0.5]
    with pytest.raises(InvalidInput, match=r"line 5: uplink_s: is -0.5. Give a number ≥ 0"):
        trace(tmp_path, header + rows + "2,phone,,,,,,-0.5\n")


def test_trace_can_start_again(tmp_path):
    replayed = trace(tmp_path, HEADER + ROUND_0 + "2,phone,,7,,,\n", repeats=True)
    assert [replayed.at(round_).uplink_bps[0] for round_ in range(7)] == [10, 10, 7, 10, 10, 7, 10]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("round,device\n", r"flops: is missing from the header"),
        (HEADER, r"has no rows"),
        (HEADER + "1,server,1,,,1,1\n", r"line 2: round: starts at 1"),
        (HEADER + ROUND_0 + "2,phone,,7,,,\n1,phone,,8,,,\n", r"line 6: round: is 1 after 2"),
        (
            HEADER + ROUND_0 + "0,phone,,7,,,\n",
            r"line 5: device: 'phone' has two rows of round 0. Make one row of them",
        ),
        (
            HEADER + ROUND_0 + "2,board,,7,,,\n2,phone,,7,,,\n2,board,,,7,,\n",
            r"line 7: device: 'board' has two rows of",
        ),
        (HEADER + ROUND_0 + "3,server,7,,,,\n3,server,7,,,,\n", r"line 6: device: 'server' has two rows of round 3"),
        (HEADER + ROUND_0 + "1,laptop,,7,,,\n", r"line 5: device: 'laptop' is not in round 0"),
        (HEADER + ROUND_0 + "1,phone,,-7,,,\n", r"line 5: uplink_bps: is -7"),
        (HEADER + ROUND_0 + "1,phone,,fast,,,\n", r"line 5: is not a number: .*'fast'"),
        (HEADER + "0,phone,100,10,20,4,8\n", r"round 0 has no server"),
        (HEADER + "0,,100,10,20,4,8\n", r"line 2: device: is empty"),
        (HEADER + "0,phone," + "1" * 200_000, r"is not a CSV text in UTF-8: field larger than field limit"),
        (HEADER + "0,server,1000,,,16,32\n", r"round 0 has no device"),
        (HEADER + "0,server,1000,,,16,32\n0,phone,100,,20,4,8\n", r"uplink_bps: is empty for 'phone' in round 0"),
    ],
)
def test_bad_traces_are_explained(tmp_path, text, message):
    with pytest.raises(InvalidInput, match=message):
        trace(tmp_path, text)


def test_trace_in_another_encoding_is_explained(tmp_path):
    (tmp_path / "t.csv").write_bytes(HEADER.encode() + b"0,b\xfcro,1,1,1,1,1\n")
    with pytest.raises(InvalidInput, match=r"t.csv: is not a CSV text in UTF-8"):
        read_trace(tmp_path / "t.csv")


def test_missing_trace_is_explained(tmp_path):
    with pytest.raises(InvalidInput, match=r"nowhere.csv: cannot be read"):
        read_trace(tmp_path / "nowhere.csv")


# ── From recipes ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_recipe_replaces_parts_of_a_built_in_fleet():
    config = FleetConfig(
        base="paper", devices=5, seed=3, uplink_mbps=[1.0, 2.0], server_tflops=5.0, memory_mb=100.0, redraw=[]
    )
    fleet = resources_from(config).at(9)
    assert fleet.size == 5
    assert fleet.uplink_bps.min() >= 1e6
    assert fleet.uplink_bps.max() <= 2e6
    assert fleet.flops.min() >= 1e12
    assert fleet.server == Server(5e12, 400e6, 400e6)
    assert fleet.memory_bytes.tolist() == [100e6] * 5
    assert same(fleet, resources_from(config).at(0))


def test_recipe_chooses_what_is_redrawn():
    resources = resources_from(FleetConfig(redraw=["downlink_mbps"], downlink_mbps=[100.0, 200.0]))
    assert not np.array_equal(resources.at(0).downlink_bps, resources.at(1).downlink_bps)
    assert np.array_equal(resources.at(0).flops, resources.at(1).flops)


def test_recipe_gives_fixed_times_in_milliseconds_and_draws_rates_as_without_them():
    plain = {"devices": 5, "seed": 3}
    fixed = {"uplink_ms": [20.0, 80.0], "forward_ms": 3.0, "server_turn_ms": 2.0, "averaging_ms": 1.0}
    more = {"averaging_mbps": 100.0, "redraw": ["device_tflops", "uplink_ms"]}
    resources = resources_from(parse(FleetConfig, plain | fixed | more))
    fleet, without = resources.at(0), resources_from(parse(FleetConfig, plain | {"redraw": ["device_tflops"]})).at(0)
    assert all(np.array_equal(getattr(fleet, rate), getattr(without, rate)) for rate in RATES)
    assert 0.02 <= fleet.uplink_s.min() < fleet.uplink_s.max() <= 0.08
    assert not np.array_equal(fleet.uplink_s, resources.at(1).uplink_s)
    assert fleet.forward_s.tolist() == [0.003] * 5
    assert fleet.downlink_s.tolist() == [0.0] * 5
    assert fleet.server == dataclasses.replace(without.server, turn_s=0.002, averaging_s=0.001, averaging_bps=1e8)


def test_recipe_noise():
    assert noise_from(NoiseConfig(uplink_cv=0.2), seed=4) == MeasurementNoise(uplink_cv=0.2, seed=4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"base": "papr"}, r"base: is 'papr'. Choose one of: paper, heterogeneous"),
        ({"devices": 0}, r"devices: is 0"),
        ({"devices": 10**12}, r"devices: is 1000000000000. Give a whole number from 1 to 10,000,000"),
        ({"seed": -1}, r"seed: is -1"),
        ({"seed": -1, "trace": "t.csv"}, r"seed: is -1"),
        ({"memory_mb": 100.0, "trace": "t.csv"}, r"memory_mb: is given beside trace"),
        ({"uplink_mbps": [2.0, 1.0]}, r"uplink_mbps: is \[2, 1\]. Give the lower bound first"),
        ({"uplink_mbps": [1.0, 2.0, 3.0]}, r"uplink_mbps: has 3 entries"),
        ({"uplink_mbps": -1.0}, r"uplink_mbps\[0\]: is -1"),
        ({"server_tflops": 0.0}, r"server_tflops: is 0"),
        ({"uplink_ms": [-1.0, 1.0]}, r"uplink_ms\[0\]: is -1. Give a number ≥ 0"),
        ({"averaging_mbps": 0.0}, r"averaging_mbps: is 0. Give a number above zero"),
        ({"uplink_ms": 1.0, "trace": "t.csv"}, r"uplink_ms: is given beside trace"),
        ({"redraw": ["uplink"]}, r"redraw\[0\]: is 'uplink'"),
    ],
)
def test_bad_recipes_are_explained(config, message):
    with pytest.raises(InvalidInput, match=message):
        resources_from(parse(FleetConfig, config))


def test_negative_noise_is_explained():
    with pytest.raises(InvalidInput, match="compute_cv: is -1"):
        noise_from(parse(NoiseConfig, {"compute_cv": -1.0}), 0)


def test_a_subset_keeps_resources_memory_and_names():
    fleet = dataclasses.replace(FLEETS["paper"].sample(4, np.random.default_rng(0)), memory_bytes=[1.0, 2.0, 3.0, 4.0])
    some = fleet.subset([3, 1])
    assert [some.device(k) for k in range(2)] == [fleet.device(3), fleet.device(1)]
    assert some.names == ("device 4", "device 2")
    assert some.server == fleet.server


def test_a_subset_of_all_is_the_fleet_itself_and_of_none_is_refused():
    fleet = FLEETS["paper"].sample(3, np.random.default_rng(0))
    assert fleet.subset(range(3)) is fleet
    with pytest.raises(InvalidInput, match="flops: is empty"):
        fleet.subset([])
    with pytest.raises(InvalidInput, match="indices: is -1"):
        fleet.subset([-1])
