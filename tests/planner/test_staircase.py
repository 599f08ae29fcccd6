import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from adaptsfl.planner.staircase import climbs, grid_sums, merged, own_sums


@given(st.integers(0, 2**32 - 1))
def test_sums_equal_a_plain_loop(seed):
    """At each grid point, look for each device's deepest available cut, and add its weights up."""
    rng = np.random.default_rng(seed)
    cuts, devices = rng.integers(1, 7), rng.integers(1, 6)
    height, width = shape = tuple(int(size) for size in rng.integers(1, 6, 2))
    rows, columns = rng.integers(0, height, (cuts, devices)), rng.integers(0, width, (cuts, devices))
    useful = rng.random((cuts, devices)) < 0.7
    base = rng.integers(0, cuts + 1, devices)
    useful &= np.arange(1, cuts + 1)[:, None] > base
    useful[-1, ~useful.any(axis=0)] = True
    weights = np.hstack((np.zeros((2, 1)), rng.integers(0, 100, (2, cuts)))).astype(float)
    own = rng.integers(0, 100, (cuts + 1, devices)).astype(float)
    steps = list(climbs(rows, columns, useful, base, never=width))
    sums, own_totals = grid_sums(steps, base, weights, shape), own_sums(steps, base, own, shape)
    np.testing.assert_array_equal(grid_sums([merged(steps)], base, weights, shape).totals, sums.totals)
    for row in range(height):
        for column in range(width):
            available = useful & (rows <= row) & (columns <= column)
            deepest = [
                max([int(base[i]), *(int(j) + 1 for j in np.flatnonzero(available[:, i]))]) for i in range(devices)
            ]
            np.testing.assert_array_equal(sums.totals[:, row, column], weights[:, deepest].sum(axis=1))
            assert own_totals[row, column] == own[deepest, range(devices)].sum()
            assert sums.complete[row, column] == all(deepest)
