import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from adaptsfl.planner.grid import _summable
from problems import whole_if_tiny


@given(st.lists(st.floats(0, 1e15).map(whole_if_tiny), min_size=1, max_size=20), st.integers(1, 1000))
def test_summable_values_have_exact_sums_in_any_order(values, devices):
    rounded = _summable(np.array(values), devices)
    several = np.resize(rounded, devices)
    assert np.cumsum(several)[-1] == math.fsum(several)
    assert np.cumsum(np.concatenate((several, -several[::-1])))[-1] == 0
    assert (rounded <= values).all()
    assert (np.array(values) - rounded).max() <= devices * max(values) * 2.0**-51


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=20), st.integers(1, 100_000))
def test_whole_numbers_stay_as_they_are(values, devices):
    np.testing.assert_array_equal(_summable(np.array(values, dtype=float), devices), values)
