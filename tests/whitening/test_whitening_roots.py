"""Roots: each form against its dense matrix, also where eigenvalues lie far apart."""

import math
from itertools import pairwise

import pytest
import torch

from curvedp.curvature import SecondMoment
from curvedp.errors import ConfigurationError
from curvedp.whitening import Damping, FloorSchedule, damped_root, matched_floor
from curvedp.whitening.damping import diagonal_root
from curvedp.whitening.roots import (
    DiagonalRoot,
    FullRoot,
    IdentityRoot,
    LowRankRoot,
    ProductRoot,
)

N = 12


def moment(spread, rows=40, groups=2):
    """Eigenvalues from 1 down to ``1 / spread``."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(groups, rows, N, generator=generator, dtype=torch.float64)
    return SecondMoment.of(x * torch.logspace(0, -math.log10(spread) / 2, N), rows)


def dense(root, groups=2):
    return root.times(torch.eye(N, dtype=torch.float64).expand(groups, N, N))


@pytest.mark.parametrize("spread", [1.0, 1e4, 1e8])
@pytest.mark.parametrize("exponent", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("rows", [5, 40])
def test_a_full_root_is_the_power_of_the_damped_moment(spread, exponent, rows):
    m = moment(spread, rows)
    root = damped_root(m, exponent, Damping(0.01))
    assert isinstance(root, LowRankRoot if rows < N else FullRoot)
    mean = m.mean()
    scaled = mean / (mean.diagonal(dim1=1, dim2=2).sum(1) / N)[:, None, None]
    values, vectors = torch.linalg.eigh(scaled + 0.01 * torch.eye(N))
    expected = (vectors * values.unsqueeze(1) ** -exponent) @ vectors.mT
    assert (dense(root) - expected).norm() <= 1e-6 * expected.norm()


def test_a_low_rank_root_flattens_the_tail_to_its_mean():
    m = moment(1e3)
    root = damped_root(m, 0.5, Damping(0.05), rank=4)
    assert isinstance(root, LowRankRoot)
    values = torch.linalg.eigvalsh(m.mean()).flip(-1)
    mean = values.sum(1) / N
    tail = values[:, 4:].mean(1) / mean + 0.05
    assert torch.allclose(root.tail, tail**-0.5)
    assert torch.allclose(root.values, (values[:, :4] / mean[:, None] + 0.05) ** -0.5)
    # at least as many as there are: all of them
    assert isinstance(damped_root(m, 0.5, Damping(0.05), rank=N), FullRoot)


def test_exponent_zero_does_nothing():
    root = damped_root(moment(1e4), 0.0, Damping(0.05), rank=3)
    assert torch.allclose(dense(root), torch.eye(N, dtype=torch.float64))


def roots():
    m = moment(1e6)
    return [
        IdentityRoot(),
        damped_root(m, 0.5, Damping(1e-6)),
        damped_root(m, 0.5, Damping(1e-6), rank=3),
        DiagonalRoot(torch.logspace(-3, 3, N, dtype=torch.float64)),
        ProductRoot(
            *(damped_root(normal(n), 0.5, Damping()) for n in (4, 3)), 3, None
        ),
    ]  # fmt: skip


def normal(n):
    return SecondMoment.of(torch.randn(2, 9, n, dtype=torch.float64), 9.0)


@pytest.mark.parametrize("root", roots(), ids=lambda r: type(r).__name__)
def test_norms_are_those_of_the_mapped_rows_and_never_below(root):
    matrix = dense(root)
    assert torch.allclose(matrix, matrix.mT, atol=1e-9)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 2, 5, N, generator=generator, dtype=torch.float64)
    # rows inside the steepest directions, where a difference of squares would cancel
    _, _, right = torch.linalg.svd(matrix)
    x[0] = right[:, -1:].expand(2, 5, N)
    true = (x @ matrix).square().sum((-2, -1))
    found = root.sq_norms(x)
    assert torch.all(found >= true * (1 - 1e-12))
    assert torch.allclose(found, true, rtol=1e-6)
    assert torch.allclose(root.inverse_times(root.times(x)), x, atol=1e-6)
    singular = torch.linalg.svdvals(matrix)
    assert root.condition >= float((singular[:, 0] / singular[:, -1]).max()) * (
        1 - 1e-6
    )


def test_a_moment_that_no_probe_reached_has_a_root():
    nothing = SecondMoment.of(torch.zeros(1, 3, N), 3.0)
    root = damped_root(nothing, 0.5, Damping(0.25))
    image = root.times(torch.eye(N, dtype=torch.float64).unsqueeze(0))
    assert torch.allclose(image, 2 * torch.eye(N, dtype=torch.float64))
    assert torch.all(diagonal_root(torch.zeros(4), 0.5, Damping(0.25)).values == 2)


# -- DP-NGD's floor --------------------------------------------------------------------


def test_the_matched_floor_bounds_the_noise_and_no_more_than_that():
    products = [(torch.logspace(-9, 1, 200, dtype=torch.float64), 50)]
    for ratio in (0.05, 0.5, 5.0):
        floor = matched_floor(products, ratio)

        def mean(f):
            known = (1 / products[0][0].clamp_min(f)).sum()
            return float(known + 50 / f) / 250

        assert mean(floor) <= ratio**-2 * (1 + 1e-9)
        assert mean(floor * 0.999) > ratio**-2
        # never above the printed floor, which takes every direction at its worst
        assert floor <= ratio**2 * (1 + 1e-9)


def test_the_floor_falls_rests_and_rises():
    schedule = FloorSchedule(1000)
    shares = [schedule.share(t) for t in range(1001)]
    assert shares[0] == 1
    assert shares[100] == pytest.approx(0.01)
    assert shares[500] < 0.012
    assert shares[1000] == pytest.approx(1)
    assert all(a > b for a, b in pairwise(shares[:101]))
    assert all(a <= b for a, b in pairwise(shares[100:]))
    assert FloorSchedule(10, base=1.0).share(5) == 1
    with pytest.raises(ConfigurationError):
        FloorSchedule(10, base=0.0)
