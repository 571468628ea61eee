"""Buffered strategies, designed by poles and residues."""

import math

import numpy as np
import pytest

from curvedp.noise.strategies import BufferedToeplitz, PrefixSums, optimise_blt


@pytest.mark.parametrize(
    ("steps", "buffers", "least"),
    [
        (1000, 2, 9460.9),
        (1000, 4, 9301.5),
        pytest.param(10_000, 4, 143_200, marks=pytest.mark.slow),
        pytest.param(10_000, 6, 143_062, marks=pytest.mark.slow),
    ],
)
def test_buffers_reach_the_least_error(steps, buffers, least):
    """9,309 with 3 buffers at 1,000 steps was all that polynomials reached."""
    found = optimise_blt(PrefixSums(), steps, buffers)
    # of a Toeplitz matrix the first column is all there is, and all but its head is
    # negative
    column = -np.sqrt(np.diff(found.inverse_row_norms() ** 2, prepend=0))
    column[0] *= -1
    error = np.arange(steps, 0, -1) @ np.cumsum(column) ** 2
    assert 0.999 * least < error <= least


@pytest.mark.parametrize(
    ("steps", "most"), [(60, 5), pytest.param(1000, 8, marks=pytest.mark.slow)]
)
def test_more_buffers_never_raise_the_error(steps, most):
    last = math.inf
    for buffers in range(1, most + 1):
        found = optimise_blt(PrefixSums(), steps, buffers)
        error = PrefixSums().error(found.inverse())
        assert error <= last * (1 + 1e-6), buffers
        last = error


def test_many_buffers_lose_no_digits():
    """Roots of a polynomial of 12 decays made an inverse with rows of 6e21."""
    spans = np.geomspace(2, 2000, 12)
    own = BufferedToeplitz(0.04 / spans**0.5, np.exp(-1 / spans), 2000)
    assert own.inverse_row_norms()[-1] < 2
    dense = BufferedToeplitz(own.weights, own.decays, 300)
    norms = np.linalg.norm(np.linalg.inv(dense.materialize()), axis=1)
    assert dense.inverse_row_norms() == pytest.approx(norms, rel=1e-12)
