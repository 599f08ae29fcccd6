"""The estimator of fixed seconds and rates: what moves it, what does not, and how fast."""

import itertools
import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptsfl.errors import InvalidInput
from adaptsfl.fleet.affine_time import AffineSettings, AffineTime
from adaptsfl.runs.beliefs import MEMORY_ROUNDS

RATE, FIXED_S = 1e7, 1e-3
LARGE, SMALL = 1e6, 5120.0  # bits: 0.1 s, and mostly latency
SCATTER = 0.1  # of observations, relative


class Link:
    """A link whose seconds scatter."""

    def __init__(self, rate: float = RATE, fixed_s: float = FIXED_S, scatter: float = SCATTER, seed: int = 0) -> None:
        self.rate, self.fixed_s, self.scatter = rate, fixed_s, scatter
        self._rng = np.random.default_rng(seed)

    def true_s(self, amount: float) -> float:
        return self.fixed_s + amount / self.rate

    def observed_s(self, amount: float) -> float:
        return self.true_s(amount) * float(np.exp(self.scatter * self._rng.standard_normal()))


def observe(found: AffineTime, link: Link, amounts: Iterable[float]) -> AffineTime:
    for amount in amounts:
        found.add(amount, link.observed_s(amount))
    return found


def steady(link: Link, *amounts: float, count: int = 60) -> AffineTime:
    return observe(AffineTime(link.rate, link.fixed_s), link, itertools.islice(itertools.cycle(amounts), count))


def test_nothing_observed_leaves_the_guess() -> None:
    found = AffineTime(RATE, FIXED_S)
    assert (found.rate, found.fixed_s) == (RATE, FIXED_S)
    assert found.predict_s(LARGE) == pytest.approx(0.101)
    assert found.uncertainty_s(LARGE) == pytest.approx(math.hypot(0.01, 3 * 0.1))
    assert found.uncertainty_s(0) == pytest.approx(0.01)


def test_memory_is_that_of_other_averages() -> None:
    assert AffineSettings().memory == MEMORY_ROUNDS


# --- sizes ---


@pytest.mark.parametrize("scale", [1e2, 1e4, 1e6, 1e9, 1e12])
@pytest.mark.parametrize("wrong", [0.1, 1.0, 10.0])
def test_both_parts_are_found_from_two_sizes(scale: float, wrong: float) -> None:
    """Amounts from 100 to 1e12, initial rates wrong by 10 both ways."""
    link = Link(rate=10 * scale, fixed_s=5e-3)
    found = observe(AffineTime(link.rate * wrong, 1e-3), link, [scale / 100, scale] * 30)
    assert found.rate == pytest.approx(link.rate, rel=0.15)
    assert found.fixed_s == pytest.approx(link.fixed_s, rel=0.15)


@pytest.mark.parametrize("scale", [2.0**-20, 2.0**20])
def test_the_unit_of_amounts_does_not_matter(scale: float) -> None:
    one, other = AffineTime(RATE, FIXED_S), AffineTime(RATE * scale, FIXED_S)
    link = Link()
    for amount in [SMALL, LARGE, LARGE / 3] * 20:
        seconds = link.observed_s(amount)
        one.add(amount, seconds)
        other.add(amount * scale, seconds)
    assert other.rate == one.rate * scale
    assert other.fixed_s == one.fixed_s
    assert other.uncertainty_s(LARGE * scale) == one.uncertainty_s(LARGE)


@pytest.mark.parametrize("guess_s", [0.0, 1e-3, 1e-2])
@pytest.mark.parametrize("rate", [1e7, 1e8, 1e11])
def test_small_messages_say_nothing_about_the_rate(rate: float, guess_s: float) -> None:
    """Booked as rate, 5120 bits in 1.3 ms would be 4 Mbit/s."""
    found, link = AffineTime(rate, guess_s), Link(rate, 1.28e-3)
    for _ in range(3000):
        observe(found, link, [SMALL])
        assert found.rate == pytest.approx(rate, rel=0.7)
    assert found.predict_s(SMALL) == pytest.approx(link.true_s(SMALL), rel=0.1)


def test_the_rate_stays_when_messages_become_smaller() -> None:
    link = Link()
    found = steady(link, LARGE)
    for amount in (LARGE / 10, LARGE / 100, SMALL, 8.0):
        observe(found, link, [amount] * 1000)
        assert found.rate == pytest.approx(RATE, rel=0.2)


@pytest.mark.parametrize("count", [3, 20, 60])
def test_small_messages_that_pass_at_once_say_nothing_about_the_rate(count: int) -> None:
    """A token bucket lets the first kilobytes pass at once: 5,120 bits at 1 Mbit/s take 1 ms instead of 5."""
    found = steady(Link(1e6, 0.0), LARGE)
    observe(found, Link(5e6, 0.0), [SMALL] * count)
    assert found.rate == pytest.approx(1e6, rel=0.2)


def test_large_messages_say_little_about_fixed_seconds() -> None:
    found = steady(Link(), LARGE, count=3000)
    assert found.fixed_s == pytest.approx(FIXED_S, rel=0.5)
    assert found.rate == pytest.approx(RATE, rel=0.1)


@pytest.mark.parametrize("rate", [1e6, 1e8, 1e10])
@pytest.mark.parametrize("fixed_s", [2e-4, 5e-3, 5e-2])
@pytest.mark.parametrize("guess_s", [0.0, 1e-3])
def test_three_sizes_replace_a_guess_that_is_far_off(rate: float, fixed_s: float, guess_s: float) -> None:
    link = Link(rate, fixed_s, scatter=0.02)
    found = observe(AffineTime(1e11, guess_s), link, [8.0, 8 * 2**15, 8 * 2**22])
    assert found.fixed_s == pytest.approx(fixed_s, rel=0.25)
    for amount in (1e6, 8 * 2**22):
        assert found.predict_s(amount) == pytest.approx(link.true_s(amount), rel=0.25)


def test_a_rate_that_only_small_messages_could_tell_is_found_by_large_ones() -> None:
    """The initial rate is 1000 times too high, which 100 small messages did not show."""
    link = Link(1e8, 1.28e-3)
    found = observe(AffineTime(1e11, FIXED_S), link, [SMALL] * 100 + [3e7] * 3)
    assert found.rate == pytest.approx(1e8, rel=0.2)
    assert found.fixed_s == pytest.approx(1.28e-3, rel=0.2)


def test_a_wrong_explanation_does_not_last() -> None:
    """With one size only, slow transfers look like fixed seconds; other sizes correct that."""
    link = Link(1e6)
    found = observe(AffineTime(1e11, FIXED_S), link, [LARGE] * 30)
    assert found.predict_s(LARGE) == pytest.approx(1.0, rel=0.1)
    observe(found, link, [1e4] * 5 + [LARGE] * 5 + [1e4] * 20)
    assert 0.6e6 < found.rate < 1.6e6
    assert found.predict_s(1e4) == pytest.approx(link.true_s(1e4), rel=0.25)


# --- changes ---


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scatter", [0.0, 0.1, 0.2])
@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_rate_that_changes_by_10_is_followed(factor: float, scatter: float, seed: int) -> None:
    link = Link(scatter=scatter, seed=seed)
    found = steady(link, LARGE)
    link.rate *= factor
    observe(found, link, [LARGE] * 5)
    assert found.predict_s(LARGE) == pytest.approx(link.true_s(LARGE), rel=0.35)
    observe(found, link, [LARGE] * 5)
    assert found.predict_s(LARGE) == pytest.approx(link.true_s(LARGE), rel=0.25)
    assert found.fixed_s == pytest.approx(FIXED_S, rel=0.25)


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_small_messages_in_between_do_not_hide_a_change_of_the_rate(factor: float) -> None:
    link = Link()
    found = steady(link, SMALL, LARGE)
    link.rate *= factor
    observe(found, link, [SMALL, LARGE] * 6)
    assert found.rate == pytest.approx(link.rate, rel=0.25)


@pytest.mark.parametrize("factor", [0.1, 50.0])
def test_latency_that_changes_is_no_change_of_the_rate(factor: float) -> None:
    link = Link(fixed_s=1e-2, rate=1e8)
    found = steady(link, SMALL, LARGE)
    link.fixed_s *= factor
    observe(found, link, [SMALL] * 5)
    assert found.fixed_s == pytest.approx(link.fixed_s, rel=0.2)
    assert found.rate == pytest.approx(1e8, rel=0.2)


def test_latency_and_rate_may_change_at_once() -> None:
    link = Link(fixed_s=1e-3, rate=1e9)
    found = steady(link, SMALL, 1e7)
    link.fixed_s, link.rate = 5e-2, 1e7
    observe(found, link, [SMALL, 1e7] * 8)
    assert found.fixed_s == pytest.approx(5e-2, rel=0.3)
    assert found.rate == pytest.approx(1e7, rel=0.3)


def test_noise_is_averaged_over_the_memory() -> None:
    """An average over n observations scatters by about 1/√(2n) of their scatter if old ones fade out."""
    found, link, seen = AffineTime(RATE, FIXED_S), Link(), []
    for _ in range(2000):
        observe(found, link, [LARGE])
        seen.append(found.predict_s(LARGE) / link.true_s(LARGE))
    expected = SCATTER / math.sqrt(2 * MEMORY_ROUNDS)
    assert expected / 2 < np.std(seen[100:]) < 2 * expected
    assert np.mean(seen[100:]) == pytest.approx(1, abs=0.02)


def test_more_observations_are_more_certain() -> None:
    found = AffineTime(RATE, FIXED_S)
    before = found.uncertainty_s(LARGE)
    observe(found, Link(), [LARGE] * 60)
    assert found.uncertainty_s(LARGE) < before / 20
    assert found.uncertainty_s(LARGE) == pytest.approx(0.2 * 0.1 / math.sqrt(MEMORY_ROUNDS), rel=0.3)


# --- stalls ---


@pytest.mark.parametrize("amount", [SMALL, LARGE])
@pytest.mark.parametrize("times", [2.0, 10.0, 50.0, 1e5])
def test_one_stall_moves_little(amount: float, times: float) -> None:
    found = steady(Link(scatter=0.0), SMALL, LARGE)
    before = found.predict_s(amount)
    found.add(amount, times * before)
    assert before < found.predict_s(amount) < 1.05 * before


def test_stalls_that_are_not_consecutive_move_little() -> None:
    link = Link(scatter=0.0)
    found = steady(link, LARGE)
    for _ in range(50):
        found.add(LARGE, 50 * link.true_s(LARGE))
        observe(found, link, [LARGE] * 3)
    assert found.predict_s(LARGE) == pytest.approx(link.true_s(LARGE), rel=0.05)


def test_surprises_in_both_directions_are_no_change() -> None:
    link = Link(scatter=0.0)
    found = steady(link, LARGE)
    for times in [50, 0.4] * 3:
        found.add(LARGE, times * link.true_s(LARGE))
    assert found.predict_s(LARGE) == pytest.approx(link.true_s(LARGE), rel=0.15)


def test_three_stalls_in_a_row_are_believed_and_forgotten_again() -> None:
    link = Link(scatter=0.0)
    found = steady(link, LARGE)
    for _ in range(3):
        found.add(LARGE, 50 * link.true_s(LARGE))
    assert found.predict_s(LARGE) == pytest.approx(50 * link.true_s(LARGE), rel=0.1)
    observe(found, link, [LARGE] * 5)
    assert found.predict_s(LARGE) == pytest.approx(link.true_s(LARGE), rel=0.1)


def test_a_change_that_did_not_come_is_no_longer_expected() -> None:
    """A small message does not tell whether the rate has changed; a large one that takes as long as ever does."""
    link = Link()
    for amount, seconds in ((LARGE, link.true_s(LARGE)), (SMALL, 60.0)):
        found = steady(link, LARGE)
        found.expect_change()
        found.add(amount, link.true_s(amount))
        found.add(LARGE, 60.0)
        assert found.predict_s(LARGE) == pytest.approx(seconds, rel=0.2)


@pytest.mark.parametrize("scatter", [0.2, 0.5])
def test_stalls_of_one_amount_do_not_make_all_seconds_fixed(scatter: float) -> None:
    """Every fourth pass of one cut stalls: neither part can be told from the other, so both keep their shares."""
    for seed in range(10):
        link, rng = Link(scatter=scatter, seed=seed), np.random.default_rng(seed)
        found = AffineTime(RATE, FIXED_S)
        for _ in range(500):
            found.add(LARGE, link.observed_s(LARGE) * (10.0 if rng.random() < 0.25 else 1.0))
        assert 0.03 * RATE < found.rate < 10 * RATE, seed


@pytest.mark.parametrize("seed", range(10))
def test_small_messages_that_scatter_say_nothing_about_the_rate(seed: int) -> None:
    """Messages of 0 and 5,120 bits over loopback, beside other work: every second one takes three times as long."""
    rng, found = np.random.default_rng(seed), AffineTime(1e9, 1e-3)
    observe(found, Link(1e9, 1e-3), [LARGE] * 3)
    for amount in itertools.islice(itertools.cycle([0.0, SMALL]), 600):
        found.add(amount, 1e-3 * float(rng.choice([1.0, 3.0])) * float(np.exp(0.3 * rng.standard_normal())))
    assert found.predict_s(LARGE) < 10e-3


# --- whatever comes ---


@pytest.mark.parametrize("wrong", [(math.nan, 1.0), (1.0, math.nan), (-1.0, 1.0), (1.0, -1.0), (math.inf, 1.0)])
def test_what_is_no_measurement_changes_nothing(wrong: tuple[float, float]) -> None:
    found = steady(Link(), LARGE)
    before = found.rate, found.fixed_s, found.uncertainty_s(LARGE)
    found.add(*wrong)
    found.add(wrong[0], math.inf)
    assert (found.rate, found.fixed_s, found.uncertainty_s(LARGE)) == before


@pytest.mark.parametrize(("rate", "fixed_s"), [(0.0, 0.0), (-1.0, 0.0), (math.nan, 0.0), (1.0, -1.0), (1.0, math.inf)])
def test_a_guess_has_to_be_a_number(rate: float, fixed_s: float) -> None:
    with pytest.raises(InvalidInput, match=r"rate|fixed_s"):
        AffineTime(rate, fixed_s)


FINITE = st.one_of(
    st.sampled_from([0.0, 5e-324, 1e-300, 1e-9, 1.0, 8.0, 1e6, 1e12, 1e300, 1.7e308]),
    st.floats(min_value=0, allow_nan=False, allow_infinity=False),
)


@given(
    rate=st.sampled_from([1e-50, 1.0, 1e7, 1e11, 1e50]),
    fixed_s=st.sampled_from([0.0, 1e-3, 1e6]),
    observations=st.lists(st.tuples(FINITE, FINITE, st.integers(1, 4)), max_size=30),
    asked=FINITE,
)
def test_states_are_finite_and_positive_whatever_comes(
    rate: float, fixed_s: float, observations: list[tuple[float, float, int]], asked: float
) -> None:
    found = AffineTime(rate, fixed_s)
    for amount, seconds, times in observations:
        for _ in range(times):
            found.add(amount, seconds)
        assert 0 <= found.fixed_s < math.inf
        assert 0 < found.rate < math.inf
        for size in (0.0, amount, asked):
            assert 0 <= found.predict_s(size) < math.inf
            assert 0 <= found.uncertainty_s(size) < math.inf


@given(observations=st.lists(st.tuples(FINITE, FINITE), max_size=20))
def test_a_link_is_found_again_after_whatever_came(observations: list[tuple[float, float]]) -> None:
    found = AffineTime(RATE, FIXED_S)
    for amount, seconds in observations:
        found.add(amount, seconds)
    link = Link(scatter=0.0)
    observe(found, link, [SMALL, LARGE] * 200)
    for amount in (SMALL, LARGE):
        assert 0.5 < found.predict_s(amount) / link.true_s(amount) < 2
