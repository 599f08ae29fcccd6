"""Rounds from training losses: by hand, on losses made for it, and on curves that were measured."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptsfl.config import CalibrationConfig
from adaptsfl.convergence import GrowthRounds, RoundsEstimator
from adaptsfl.convergence.estimator import MOST_ROUNDS

LAYERS = 4
CURVES = Path(__file__).parents[1] / "docs" / "results" / "calibration.jsonl"


def after(losses: list[float], interval: int, deepest: int, layers: int = LAYERS, **settings: float) -> RoundsEstimator:
    estimator = RoundsEstimator(layers, CalibrationConfig(**settings))
    for start in range(0, len(losses), interval):
        estimator.learn(losses[start : start + interval], interval, deepest)
    return estimator


def with_jumps(jump: float, interval: int, rounds: int, noise: float = 0.0, seed: int = 0) -> list[float]:
    """Losses of a mean model that falls as t^-½; copies go on from it by `jump` times its loss less at their end."""
    rng = np.random.default_rng(seed)
    losses = []
    for t in range(1, rounds + 1):
        mean, age = t**-0.5, (t - 1) % interval
        losses.append(mean * (1 - jump * age / (interval - 1)) * (1 + noise * float(rng.normal())))
    return losses


def test_before_anything_is_seen_the_prior_holds() -> None:
    estimate = RoundsEstimator(LAYERS).estimate()
    assert estimate.averagings == 0
    assert estimate.kappa == pytest.approx(0.15, rel=0.01)
    assert estimate.quantile(0.1) < 0.03
    assert estimate.quantile(0.9) > 0.8
    assert (np.diff(estimate.model.factors) > 0).all()
    assert estimate.model.factors[-1] == pytest.approx(0.15, rel=0.01)


def test_a_given_growth_is_where_it_begins() -> None:
    """κ = 1 at every depth; only rounds of another run could say more."""
    given = GrowthRounds(np.arange(1, LAYERS + 1) / LAYERS, 0.6)
    estimate = RoundsEstimator(LAYERS, given=given).estimate()
    assert estimate.model.factors == pytest.approx(given.factors, rel=1e-3)
    assert estimate.model.power == given.power
    assert estimate.quantile(0.9) / estimate.quantile(0.1) < 7


def test_a_given_growth_keeps_its_shape() -> None:
    """All drift is in the last layer, the recipe says; a jump changes how much that is, not where."""
    estimator = RoundsEstimator(LAYERS, given=GrowthRounds([0.1, 0.1, 0.1, 0.9], 0.8))
    assert estimator.estimate().model.factors == pytest.approx([0.1, 0.1, 0.1, 0.9], rel=0.01)
    for _ in range(6):
        estimator.learn([1.0, 1.01] * 4, 8, LAYERS)  # nothing jumps
    less = estimator.estimate().model.factors
    assert less == pytest.approx(less[0] * np.array([1, 1, 1, 9]), rel=0.01)
    assert less[0] < 0.05


def test_a_growth_of_nothing_can_be_overruled() -> None:
    """A recipe says that longer intervals cost nothing; copies that lose all they gained say otherwise."""
    estimator = RoundsEstimator(LAYERS, given=GrowthRounds(np.zeros(LAYERS), 0.8))
    before = float(estimator.estimate().model.rounds(16, LAYERS))
    for _ in range(6):
        estimator.learn([2.0, 1.0, 0.5, 0.2, 0.1, 0.1, 0.1, 0.1], 8, LAYERS)
    assert float(estimator.estimate().model.rounds(16, LAYERS)) > before


def test_a_jump_by_hand() -> None:
    """The mean model falls as t^-½, so β = ½; copies with 0.7 times its loss jump by y = ln(1/0.7) = 0.357.

    So R − 1 = 0.33·0.357/0.5 = 0.235 at I = 16, where (2/4)^1.25·(16^0.8 − 1) = 3.45: κ = 0.068. The line through the
    losses of the mean model is exact where the prior's fall is the same.
    """
    losses = with_jumps(0.3, 16, 16 * 12 + 1)
    estimator = after(losses, 16, 2, prior_fall=0.5, prior_deviation=10.0, long_error=0.01)
    wanted = 0.33 * np.log(1 / 0.7) / 0.5 / (0.5**1.25 * (16**0.8 - 1))
    # The last round before an averaging is one round older than the first after it.
    assert estimator.estimate().kappa == pytest.approx(wanted, rel=0.06)
    assert estimator.estimate().averagings == estimator.long_blocks == 8  # of 12, those in the last two thirds


def test_a_block_that_fills_the_window_leaves_the_last_ones_known() -> None:
    """What it led to is seen one round later; the two long blocks before it are more than the prior."""
    estimator = after(with_jumps(0.3, 8, 24), 8, 2)
    before = estimator.estimate()
    assert before.averagings == 2
    estimator.learn([0.1] * 200, 200, 2)
    assert estimator.estimate().averagings == 2
    estimator.learn([0.2], 8, 2)
    assert estimator.estimate().averagings == 2  # the last two: one of 8 rounds, and the one of 200


@pytest.mark.parametrize("sign", [1, -1])
def test_larger_jumps_mean_more_rounds_whatever_their_sign(sign: int) -> None:
    rounds = [
        float(after(with_jumps(sign * jump, 16, 97), 16, 2).estimate().model.rounds(16, 2)) for jump in (0.05, 0.2, 0.6)
    ]
    assert rounds[0] < rounds[1] < rounds[2]


def test_the_same_jump_of_fewer_layers_means_more_for_all() -> None:
    losses = with_jumps(0.3, 16, 97)
    kappas = [after(losses, 16, deepest).estimate().kappa for deepest in (1, 2, 4)]
    assert kappas[0] > kappas[1] > kappas[2]


def test_noise_leaves_more_to_the_prior() -> None:
    """Without jumps: quiet losses say that averaging costs nothing, noisy ones say little."""
    quiet, noisy = (after(with_jumps(0.0, 16, 97, noise), 16, 2).estimate() for noise in (0.001, 0.3))
    assert quiet.kappa < 0.02
    assert noisy.quantile(0.9) > 1.5 * quiet.quantile(0.9)


def test_one_averaging_is_enough_to_react() -> None:
    """Copies that specialised lose nine tenths of what they gained: by the first loss after it, plans are careful."""
    before = after([2.0, 1.2, 0.8, 0.5, 0.4, 0.3, 0.25, 0.2], 8, LAYERS)
    prior = before.estimate().kappa
    before.learn([2.0], 8, LAYERS)
    estimate = before.estimate()
    assert estimate.averagings == 1
    assert estimate.kappa > 1.5 * prior


def test_short_blocks_count_less_and_the_shortest_not_at_all() -> None:
    estimators = [after(with_jumps(0.02, interval, 97), interval, 2) for interval in (8, 4, 3)]
    assert [estimator.long_blocks for estimator in estimators] == [8, 0, 0]
    long, short, shortest = (estimator.estimate() for estimator in estimators)
    assert long.quantile(0.9) < short.quantile(0.9) < shortest.quantile(0.9)
    assert short.averagings > 0 == shortest.averagings


@pytest.mark.parametrize("loss", [0.0, -1.0, float("nan"), float("inf")])
def test_losses_without_a_logarithm_say_nothing(loss: float) -> None:
    """A loss function of the user's own may fall below zero."""
    prior = RoundsEstimator(LAYERS).estimate()
    estimator = after(with_jumps(0.3, 16, 97), 16, 2)
    assert estimator.estimate().averagings > 0
    estimator.learn([loss], 16, 2)
    assert estimator.estimate().averagings == 0
    assert estimator.estimate().kappa == prior.kappa


def test_blocks_without_losses_are_skipped() -> None:
    """As in records of older versions: what comes after counts as late as it is, and nothing jumps over the gap."""
    estimator = RoundsEstimator(LAYERS)
    estimator.learn([5.0] * 8, 8, 2)
    estimator.skip(100)
    estimator.learn([1.0] * 8, 8, 2)
    assert estimator.estimate().averagings == 0
    estimator.learn([1.0], 8, 2)
    assert estimator.estimate().averagings == 1


def test_layers_that_are_not_averaged_together_say_nothing() -> None:
    estimator = RoundsEstimator(LAYERS)
    for _ in range(8):
        estimator.learn([1.0] * 8, None, 2)
    assert estimator.estimate().averagings == 0


def test_a_block_that_was_cut_short_has_no_averaging() -> None:
    estimator = RoundsEstimator(LAYERS)
    estimator.learn([1.0] * 8, 8, 2)
    estimator.learn([1.0] * 5, 8, 2)  # a run's last block
    estimator.learn([1.0] * 8, 8, 2)
    estimator.learn([1.0], 8, 2)
    assert estimator.estimate().averagings == 2


def test_what_is_long_ago_is_forgotten() -> None:
    """A run of many thousand rounds takes no more memory, and estimates what one that began later would."""
    estimator = RoundsEstimator(LAYERS)
    for start in range(0, 2 * MOST_ROUNDS, 10):
        estimator.learn([1 / (start + k + 1) for k in range(10)], 10, 2)
    assert len(estimator._losses) == MOST_ROUNDS
    estimate = estimator.estimate()
    assert 0 < estimate.averagings <= MOST_ROUNDS // 10
    assert estimate.kappa < 0.05  # nothing ever jumped


@given(
    st.lists(st.tuples(st.lists(st.floats(0, 1e30), min_size=1, max_size=20), st.integers(1, 20), st.integers(1, 4))),
)
def test_any_losses_give_a_model(blocks: list[tuple[list[float], int, int]]) -> None:
    estimator = RoundsEstimator(LAYERS)
    for losses, interval, deepest in blocks:
        estimator.learn(losses, interval, deepest)
    estimate = estimator.estimate()
    factors = estimate.model.factors
    assert np.isfinite(factors).all()
    assert (factors >= 0).all()
    assert (np.diff(factors) >= 0).all()
    assert estimate.quantile(0.1) <= estimate.kappa <= estimate.quantile(0.9)


def measured() -> list[dict]:
    return [json.loads(line) for line in CURVES.read_text().splitlines()]


def test_measured_curves() -> None:
    """Fixed plans with I = 16, beside the rounds that their test losses gave against I = 1 (docs/calibration.md)."""
    wanted = {
        ("digits-iid", 2): 1.17,
        ("digits-iid", 4): 1.28,
        ("digits-iid", 6): 1.46,
        ("digits-shards", 2): 2.09,
        ("digits-shards", 4): 3.05,
        ("digits-shards", 6): 5.50,
        ("cifar10-iid", 2): 1.29,
        ("cifar10-iid", 4): 1.43,
        ("cifar10-iid", 8): 2.20,
        ("cifar10-shards-batchnorm", 4): 6.94,
        ("cifar10-iid-lr.03", 4): 1.22,
    }
    errors = []
    for curve in measured():
        key = curve["setting"], curve["cut"]
        if curve["kind"] == "full" and curve["interval"] == 16 and key in wanted and not curve["seed"]:
            estimate = after(curve["losses"], 16, curve["cut"], curve["layers"]).estimate()
            errors.append(abs(np.log(estimate.rounds(16, curve["cut"], 0.5) / wanted[key])))
    assert len(errors) == len(wanted)
    assert np.mean(errors) < 0.35
    assert max(errors) < 1.0
