"""Runs by policy, their labels and colours, and means over seeds."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from adaptsfl.errors import InvalidInput
from adaptsfl.report.series import COLOURS, curve, group, spread, thinned
from adaptsfl.runs.folder import Run


def evaluated(run: Run, *evaluations: tuple[int, float, float]) -> Run:
    rows = tuple((round_, time_s, accuracy, 1.0) for round_, time_s, accuracy in evaluations)
    return dataclasses.replace(run, blocks=(dataclasses.replace(run.blocks[0], evaluations=rows),))


def moved(run: Run, folder: str) -> Run:
    return dataclasses.replace(run, folder=Path(folder))


def test_ours_comes_first_and_the_rest_as_given(runs):
    members = group(list(reversed(runs)))
    assert [series.label for series in members] == ["AdaptSFL", "RMA+RMS", "RMA+MS", "MA+RMS"]
    assert [series.colour for series in members] == list(COLOURS[:4])
    assert all(len(series.runs) == 2 for series in members)


def test_more_policies_than_colours_differ_in_their_dash(runs):
    many = [dataclasses.replace(runs[0], policy=f"p{k}", title=f"P{k}") for k in range(2 * len(COLOURS))]
    assert len({(series.colour, series.dash) for series in group(many)}) == len(many)


def test_other_fleets_and_other_experiments_are_kept_apart(runs):
    run = runs[0]
    both = group([moved(run, "one/adaptsfl-slow-seed0"), moved(run, "one/adaptsfl-fast-seed0")])
    assert [series.label for series in both] == ["AdaptSFL (adaptsfl-slow)", "AdaptSFL (adaptsfl-fast)"]
    both = group([moved(run, "/x/one/adaptsfl-seed0"), moved(run, "/x/two/adaptsfl-seed0")])
    assert [series.label for series in both] == ["AdaptSFL (one)", "AdaptSFL (two)"]
    folders = ["/x/one/a-seed0", "/x/one/b-seed0", "/x/two/a-seed0"]
    labels = [series.label for series in group([moved(run, folder) for folder in folders])]
    assert len(set(labels)) == 3


def test_no_runs():
    with pytest.raises(InvalidInput, match="Give at least one run"):
        group([])


def test_the_spread_is_the_sample_standard_deviation():
    assert spread([1.0, 3.0]) == (2.0, pytest.approx(math.sqrt(2)))
    assert spread([5.0]) == (5.0, None)


def test_a_mean_goes_as_far_as_all_seeds_do(runs):
    """At 10 s: 0.2 and, halfway from 0.0 to 0.4, 0.2. At 20 s: 0.6 and 0.4."""
    one = evaluated(runs[0], (1, 10.0, 0.2), (2, 20.0, 0.6))
    two = evaluated(runs[0], (1, 5.0, 0.0), (2, 15.0, 0.4), (3, 25.0, 0.4))
    line = curve([one, two], "seconds", "accuracies")
    assert line.x.tolist() == [10.0, 15.0, 20.0]
    assert line.mean == pytest.approx([0.2, 0.4, 0.5])
    assert line.spread == pytest.approx([0.0, 0.0, 0.2 / math.sqrt(2)])


def test_one_seed_has_no_spread_and_what_is_no_number_is_left_out(runs):
    line = curve([evaluated(runs[0], (1, 10.0, 0.2), (2, 20.0, math.nan), (3, 30.0, 0.3))], "rounds", "accuracies")
    assert line.x.tolist() == [1.0, 3.0]
    assert line.spread is None
    assert curve([evaluated(runs[0])], "rounds", "accuracies").x.size == 0


def test_seeds_that_never_overlap_have_no_mean(runs):
    one, two = evaluated(runs[0], (1, 1.0, 0.1)), evaluated(runs[0], (1, 2.0, 0.1))
    assert curve([one, two], "seconds", "accuracies").x.size == 0


def test_thinning_keeps_the_ends():
    kept = np.arange(1000)[thinned(1000, 7)]
    assert (kept.size, kept[0], kept[-1]) == (7, 0, 999)
    assert np.arange(5)[thinned(5, 7)].size == 5
