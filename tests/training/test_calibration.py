"""From measured drift to a model to plan with: properties that hold whatever the constants of the fit."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptsfl.training.calibration import FIRST_INTERVAL, REACH, Calibration
from adaptsfl.training.estimate import DriftSample

LAYERS = 6
EQUAL = np.ones(LAYERS)
ANY = st.floats(-1e100, 1e100)


def measured(
    age: int, share: float, deepest: int = LAYERS, spread: np.ndarray = EQUAL, noise: float = 1.0
) -> DriftSample:
    """Return a measurement of a gradient of length 1 that loses `share` of it, with so much noise to its signal."""
    lost = share * EQUAL / LAYERS
    return DriftSample(age, deepest, EQUAL / LAYERS, lost, np.zeros(LAYERS), spread, noise_to_signal=noise)


def after(*samples: DriftSample) -> Calibration:
    calibration = Calibration(LAYERS)
    for sample in samples:
        calibration = calibration.with_sample(sample)
    return calibration


def planned(calibration: Calibration, deepest: int = LAYERS) -> int:
    """Return the I ≤ the longest trusted one with the least (1 + 20/I)/(1 − D): an averaging takes 20 rounds."""
    model = calibration.model(0.1)
    intervals = np.arange(1, calibration.longest_interval + 1)
    progress = np.asarray(model.progress(intervals, deepest))
    cost = np.where(progress > 0, (1 + 20 / intervals) / np.maximum(progress, 1e-300), np.inf)
    return int(intervals[np.argmin(cost)])


samples = st.builds(
    DriftSample,
    age=st.integers(0, 1000),
    deepest=st.integers(1, LAYERS),
    squared_norm=st.lists(ANY, min_size=LAYERS, max_size=LAYERS).map(np.array),
    lost=st.lists(ANY, min_size=LAYERS, max_size=LAYERS).map(np.array),
    drift=st.just(np.zeros(LAYERS)),
    spread=st.lists(ANY, min_size=LAYERS, max_size=LAYERS).map(np.array),
)


@given(st.lists(samples, max_size=15))
def test_any_measurements_give_a_model(given_samples: list[DriftSample]) -> None:
    """Whatever finite numbers were measured: drift is finite and never negative, grows with I and with depth."""
    calibration = after(*given_samples)
    scale, power = calibration.fit()
    assert np.isfinite(scale)
    assert scale > 0
    assert np.isfinite(power)
    assert calibration.shape.sum() == pytest.approx(1)
    assert (calibration.shape >= 0).all()
    model = calibration.model(0.1)
    drift = model.drift(np.arange(1, 50)[:, None], np.arange(1, LAYERS + 1)[None, :])
    assert np.isfinite(drift).all()
    assert (drift >= 0).all()
    assert (drift[0] == 0).all()  # I = 1
    assert (np.diff(drift, axis=0) >= 0).all()
    assert (np.diff(drift, axis=1) >= 0).all()
    assert planned(calibration) >= 1


@pytest.mark.parametrize(("scale", "power"), [(0.03, 1.0), (0.01, 1.3)])
def test_consistent_measurements_are_believed(scale: float, power: float) -> None:
    """Shares of a t^p far below 1: the fit gives the shares between 4 and 10 rounds to within a factor of 2."""
    ages = [4, 6, 8, 10] * 6
    fitted, exponent = after(*(measured(age, scale * age**power) for age in ages)).fit()
    for age in (4, 7, 10):
        assert 1 / 2 < fitted * age**exponent / (scale * age**power) < 2


def test_more_drift_plans_shorter_intervals() -> None:
    intervals = [planned(after(*[measured(9, share)] * 12)) for share in (0.01, 0.1, 0.3, 0.9)]
    assert intervals == sorted(intervals, reverse=True)
    assert intervals[0] > intervals[-1]


def test_noisier_gradients_plan_shorter_intervals() -> None:
    intervals = [planned(after(*[measured(9, 0.6, noise=noise)] * 6)) for noise in (0.1, 1.0, 10.0)]
    assert intervals == sorted(intervals, reverse=True)
    assert intervals[0] > intervals[-1]


def test_an_unreliable_measurement_hardly_counts() -> None:
    """The same share, drowned in noise: the fit stays where the prior is."""
    sample = measured(9, 0.02)
    clear, drowned = after(sample).fit()[0], after(replace(sample, norm_error=100.0)).fit()[0]
    prior = Calibration(LAYERS).fit()[0]
    assert abs(np.log(drowned / prior)) < 0.2 < abs(np.log(clear / prior))


def test_drift_far_beyond_what_was_measured_is_new_ground() -> None:
    calibration = after(measured(9, 0.3, deepest=3))
    assert Calibration(LAYERS).is_new_ground(2, 1)
    assert not calibration.is_new_ground(10, 3)
    assert calibration.is_new_ground(20, 3)
    assert calibration.is_new_ground(10, LAYERS)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
@pytest.mark.parametrize("outlier", [1e6, 1.0, 0.0, -1.0, -1e6])
def test_one_outlier_does_not_throw_the_plan_over(share: float, outlier: float) -> None:
    """Upwards the reach holds it, twice what was measured; downwards eleven measurements against one."""
    usual = [measured(9, share)] * 11
    before, with_it = planned(after(*usual)), planned(after(*usual, measured(9, outlier)))
    assert 1 / 3 <= with_it / before <= 3


def test_the_longest_interval_follows_what_was_measured() -> None:
    """At first a guess; then `REACH` times the rounds of a block that was measured in its last round, age + 1."""
    assert Calibration(LAYERS).longest_interval == FIRST_INTERVAL
    assert after(measured(FIRST_INTERVAL - 1, 0.1)).longest_interval == REACH * FIRST_INTERVAL
    assert after(measured(1, 0.1)).longest_interval == FIRST_INTERVAL
    assert after(measured(19, 0.1), measured(4, 0.1)).longest_interval == REACH * 20


@pytest.mark.parametrize("lost", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_ignored(lost: float) -> None:
    """Neither a share that is no number, nor one of a gradient that is lost in noise, changes the fit."""
    usual = after(*[measured(9, 0.3)] * 4)
    broken = measured(9, lost)
    assert broken.lost_share is None
    assert usual.with_sample(broken).fit() == pytest.approx(usual.fit(), rel=0.3)
    noise = DriftSample(9, LAYERS, -EQUAL, EQUAL, EQUAL, EQUAL)
    assert noise.lost_share is None
    assert usual.with_sample(noise).fit() == pytest.approx(usual.fit(), rel=0.3)
    nothing = np.full(LAYERS, np.nan)
    assert usual.with_sample(measured(9, 0.3, spread=nothing)).shape == pytest.approx(usual.shape)


def test_the_spread_gives_the_shape() -> None:
    """Shares of the spread; negative parts, which only noise has, count as none; a new measurement counts half."""
    first = after(measured(9, 0.3, spread=np.array([1.0, 3.0, 0, 0, 0, -2.0])))
    assert first.shape == pytest.approx([0.25, 0.75, 0, 0, 0, 0])
    assert first.with_sample(measured(9, 0.3)).shape == pytest.approx((first.shape + 1 / 6) / 2)
