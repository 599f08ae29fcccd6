"""The numbers of the panels are those of the runs."""

import dataclasses

import numpy as np
import pytest

from adaptsfl.costs import CutCosts
from adaptsfl.reproduce import numbers, panels
from adaptsfl.reproduce.numbers import Evidence
from adaptsfl.runs.folder import Run
from reproduced import evaluated_as, evidence_of

NAN = float("nan")


def with_runs(evidence: Evidence, runs: dict[str, tuple[Run, ...]]) -> Evidence:
    return Evidence(evidence.studies, {**evidence.runs, **runs})


def changed(evidence: Evidence, key: str, change) -> Evidence:
    """The same evidence with every run of a panel as `change` returns it, without those for which it returns None."""
    runs = tuple(new for run in evidence.runs[key] if (new := change(run)) is not None)
    return with_runs(evidence, {key: runs})


def panel(evidence: Evidence, key: str):
    found = evidence.panel(key)
    assert found is not None
    return found


def column(table: panels.Table, name: str, **where: object) -> list[object]:
    keep = {table.columns.index(key): value for key, value in where.items()}
    place = table.columns.index(name)
    return [row[place] for row in table.rows if all(row[k] == value for k, value in keep.items())]


@pytest.mark.parametrize(
    ("key", "x_of"),
    [
        ("motivation-interval/epochs", numbers.epochs),
        ("ablation-cut/iid", lambda run: run.evaluations.seconds),
    ],
)
def test_one_seed_is_its_own_mean(key, x_of):
    evidence = evidence_of([key.partition("/")[0]], seeds=1)
    for line, run in zip(panels.lines(evidence, panel(evidence, key)), evidence.of(key), strict=True):
        assert line.policy == run.policy
        assert line.label == numbers.label_of(run)
        np.testing.assert_allclose(line.curve.x, x_of(run))
        np.testing.assert_allclose(line.curve.mean[4:], numbers.smoothed(run)[1])
        np.testing.assert_allclose(line.curve.mean[1], run.evaluations.accuracies[:2].mean())
        assert line.curve.spread is None


def test_two_seeds_have_a_mean_and_a_spread():
    evidence = evidence_of(["motivation-interval"], seeds=2)
    key = "motivation-interval/epochs"
    first, second = (numbers.smoothed(run)[1] for run in evidence.of(key, policy="fixed@I=5"))
    line = next(line for line in panels.lines(evidence, panel(evidence, key)) if line.policy == "fixed@I=5")
    np.testing.assert_allclose(line.curve.mean[4:], (first + second) / 2)
    np.testing.assert_allclose(line.curve.spread[4:], np.abs(first - second) / np.sqrt(2))
    table = panels.table(evidence, panel(evidence, key))
    assert column(table, "smoothed_accuracy", policy="fixed@I=5", seed="mean") == line.curve.mean.tolist()
    assert column(table, "spread", policy="fixed@I=5", seed="mean") == line.curve.spread.tolist()


def test_seeds_of_different_speed_meet_in_time_not_in_rounds():
    """At 150 s one seed is half-way from 0.2 to 0.4 and the other, twice as slow, a quarter of the way."""
    evidence = evidence_of(["ablation-cut"], seeds=1)
    run = evidence.runs["ablation-cut/iid"][0]
    fast, slow = evaluated_as(run, [(100, 0.2), (200, 0.4)]), evaluated_as(run, [(100, 0.2), (300, 0.4)], seed=1)
    evidence = with_runs(evidence, {"ablation-cut/iid": (fast, slow)})
    (line,) = panels.lines(evidence, panel(evidence, "ablation-cut/iid"))
    assert line.curve.x.tolist() == [100, 200]  # as far as both go
    assert line.curve.mean.tolist() == pytest.approx([0.2, (0.3 + 0.25) / 2])


def test_of_several_evaluations_after_one_aggregation_the_last_is_drawn():
    """Evaluated every 5 rounds and averaged every 25, four evaluations come before the first aggregation."""
    evidence = evidence_of(["motivation-interval"], "laptop", seeds=1)
    key = "motivation-interval/aggregations"
    lines = {line.policy: line.curve for line in panels.lines(evidence, panel(evidence, key))}
    assert lines["fixed@I=25"].x.tolist() == [0, 1, 2, 3, 4, 5, 6]
    run = evidence.of(key, policy="fixed@I=25")[0]
    assert lines["fixed@I=25"].mean[1] == pytest.approx(run.evaluations.accuracies[4:9].mean())
    assert lines["fixed@I=1"].x.tolist() == list(range(5, 151, 5))
    table = panels.table(evidence, panel(evidence, key))
    assert column(table, "accuracy", policy="fixed@I=25") == run.evaluations.accuracies.tolist()  # all, raw


def test_the_papers_order_and_only_runs_that_ended():
    evidence = evidence_of(["accuracy"], seeds=1)
    key = "accuracy/cifar10-iid"
    backwards = with_runs(evidence, {key: evidence.runs[key][::-1]})
    assert list(panels.runs_shown(backwards, panel(evidence, key))) == list(panels.PAPER_ORDER)
    ended = changed(
        evidence, key, lambda run: dataclasses.replace(run, status="failed" if "rms" in run.policy else "done")
    )
    assert list(panels.runs_shown(ended, panel(evidence, key))) == ["adaptsfl", "rma+ms", "rma+ams"]
    assert "21 of 24 runs" in panels.caption(ended.studies[0], ended)[0]
    assert "runs" not in panels.caption(evidence.studies[0], evidence)[0]
    fewer_asked = evidence_of(["accuracy"], "laptop", seeds=1)
    assert "runs" not in panels.caption(fewer_asked.studies[0], fewer_asked)[0]
    more = evidence_of(["accuracy"], seeds=3)
    fewer = with_runs(more, {key: more.runs[key][1:]})
    assert "71 of 72 runs" in panels.caption(fewer.studies[0], fewer)[0]


def test_what_is_missing_is_said():
    evidence = evidence_of(["accuracy"], seeds=1)
    key = "accuracy/cifar10-iid"
    assert panels.missing(evidence, panel(evidence, key)) == ""
    assert panels.missing(with_runs(evidence, {key: ()}), panel(evidence, key)) == f"{key} was not run"
    failed = changed(evidence, key, lambda run: dataclasses.replace(run, status="failed"))
    assert panels.missing(failed, panel(evidence, key)) == f"{key}: none of 6 runs finished, 6 failed"


def at_pace(paces: dict[str, float]):
    """Runs of so many times 1000 s, converged at the end."""

    def change(run: Run) -> Run | None:
        if run.policy not in paces:
            return None
        length = 1000 * paces[run.policy]
        return evaluated_as(run, [(length * k / 10, 0.05 * k) for k in range(1, 11)])

    return change


@pytest.mark.parametrize(
    ("paces", "end", "logarithmic", "whole"),
    [
        ({"adaptsfl": 1, "rma+ms": 2}, 2 * panels.ROOM, False, True),
        ({"adaptsfl": 1, "rma+ms": 10}, 10 * panels.ROOM, False, True),  # 8 times would hide little
        ({"adaptsfl": 1, "rma+ms": 11}, 11, True, True),
        ({"rma+ms": 1, "rma+rms": 3}, 3 * panels.ROOM, False, True),
    ],
)
def test_time_axes(paces, end, logarithmic, whole):
    key = "accuracy/cifar10-iid"
    evidence = changed(evidence_of(["accuracy"], seeds=1), key, at_pace(paces))
    axis = panels.time_axis(evidence, panel(evidence, key))
    assert axis == (pytest.approx(1000 * end), logarithmic, whole)
    beside = panels.time_axis(evidence, panel(evidence, "accuracy/cifar100-iid"))
    assert beside.logarithmic == logarithmic  # one figure, one kind of axis


def test_a_time_axis_ends_where_all_have_converged():
    """RMA+MS is done with learning after 1.2 of its 9 thousand seconds."""
    key = "accuracy/cifar10-iid"
    evidence = changed(evidence_of(["accuracy"], seeds=1), key, at_pace({"adaptsfl": 1, "rma+ms": 9}))
    ours, other = evidence.runs[key]
    flat = [(200.0 * k, 0.5) for k in range(1, 7)]
    evidence = with_runs(evidence, {key: (ours, evaluated_as(other, [*flat, (9000, 0.5)]))})
    axis = panels.time_axis(evidence, panel(evidence, key))
    assert axis == (1000, False, False)
    assert any("slower runs go on" in line for line in panels.caption(evidence.studies[0], evidence))


def test_converged_numbers_are_those_of_the_runs():
    evidence = evidence_of(["accuracy", "converged"], seeds=2)
    key = "converged/cifar100-noniid"
    target, found = panels.target(evidence, panel(evidence, key)), panels.converged(evidence, panel(evidence, key))
    assert target == numbers.common_target(panels.runs_shown(evidence, panel(evidence, key)).values())
    table = panels.table(evidence, panel(evidence, key))
    for one in found:
        runs = evidence.of("accuracy/cifar100-noniid", policy=one.policy)
        assert one.accuracy.mean == pytest.approx(np.mean([numbers.converged_accuracy(run) for run in runs]))
        assert one.time_s.mean == pytest.approx(np.mean([numbers.converged_s(run) for run in runs]))
        assert column(table, "converged_s", policy=one.policy)[:2] == [numbers.converged_s(run) for run in runs]
        times = [numbers.time_to(run, target) for run in runs]
        assert column(table, "time_to_target_s", policy=one.policy)[:2] == ["" if t is None else t for t in times]
        assert column(table, "converged_accuracy_spread", policy=one.policy, seed="mean") == [one.accuracy.spread]
        expected = "" if None in times else pytest.approx(np.mean(times))
        assert column(table, "time_to_target_s", policy=one.policy, seed="mean") == [expected]


@pytest.mark.parametrize("seeds", [1, 2])
def test_sweeps_are_times_to_one_accuracy(seeds):
    evidence = evidence_of(["devices"], seeds=seeds)
    one = panel(evidence, "devices/noniid")
    target, found = panels.target(evidence, one), panels.lines(evidence, one)
    assert target == numbers.common_target(panels.runs_shown(evidence, one).values(), panels.SWEEPS_FROM)
    table = panels.table(evidence, one)
    for line in found:
        assert line.curve.x.tolist() == list(one.sweep.xs)
        for fleet, x, time in zip(one.sweep.fleets, one.sweep.xs, line.curve.mean, strict=True):
            times = [numbers.time_to(run, target) for run in evidence.of(one.key, policy=line.policy, fleet=fleet)]
            assert np.isnan(time) if None in times else time == pytest.approx(np.mean(times))
            at = {"policy": line.policy, "x": x, "fleet": fleet}
            assert column(table, "time_to_target_s", **at)[:seeds] == ["" if t is None else t for t in times]
            assert len(column(table, "time_to_target_s", **at)) == (1 if seeds == 1 else 3)


def test_a_policy_that_gets_nowhere_takes_nothing_from_the_others():
    """A run whose accuracies are no numbers has no time, and is not among those whose lowest is the target."""
    evidence = evidence_of(["devices"], seeds=1)
    key, lost = "devices/iid", ("rma+rms", "10")
    before = panels.target(evidence, panel(evidence, key))

    def change(run: Run) -> Run:
        return evaluated_as(run, [(10, NAN), (20, NAN)]) if (run.policy, run.fleet) == lost else run

    evidence = changed(evidence, key, change)
    found = panels.lines(evidence, panel(evidence, key))
    assert panels.target(evidence, panel(evidence, key)) >= before > 0.3
    assert [bool(np.isnan(line.curve.mean[0])) for line in found] == [False, False, False, True]
    notes = panels.caption(evidence.studies[0], evidence)[1:]
    assert any(note == "CIFAR-10 under IID setting: never reached by RMA+RMS at 10." for note in notes)
    assert "15 of 16 runs" in panels.caption(evidence.studies[0], evidence)[0]


def test_overhead_by_hand():
    """Batch 4: 4·(1+2) GFLOP; 4·8 Mbit are 4 MB up, 4·16 Mbit are 8 MB down; a model of 24 Mbit is 3 MB."""
    costs = CutCosts(
        forward_flops=np.array([1e9]),
        backward_flops=np.array([2e9]),
        activation_bits=np.array([8e6]),
        gradient_bits=np.array([16e6]),
        client_model_bits=np.array([24e6]),
        names=("conv",),
    )
    assert panels.overhead_table(costs, 4).rows == [(1, "conv", 12, 4, 8, 3)]


def test_the_scale_in_words():
    evidence = evidence_of(["accuracy"], "laptop", seeds=2)
    assert panels.caption(evidence.studies[0], evidence)[0] == (
        "Scale: laptop · 2 seeds · 150 rounds · vgg16 and resnet18 at width 0.125, charged at width 1.0 · "
        "cifar10 and cifar100"
    )
