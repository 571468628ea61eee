"""Sums over pairs of positions, in one piece and in tiles."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from curvedp.layers.gram import THIN, TILE, gram_sum
from curvedp.layers.precision import NormPrecision, norms_in


def rows(t, p, dtype, seed=0):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(3, 2, t, p, generator=random, dtype=torch.float64).to(dtype)


def dense(a, d, ones):
    """Of every example by itself, over all pairs, in float64."""
    a, d = a.double(), d.double()
    found = torch.zeros(len(a), dtype=torch.float64)
    for b in range(len(a)):
        for group in range(a.shape[1]):
            for t in range(a.shape[2]):
                for s in range(a.shape[2]):
                    k = a[b, group, t] @ a[b, group, s] + ones
                    found[b] += k * (d[b, group, t] @ d[b, group, s])
    return found


@given(
    t=st.sampled_from([2, 3, 7, 8, 9, 11, 12, 13, 16, 17, 20]),
    tile=st.sampled_from([0, 4, 8]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    ones=st.sampled_from([0.0, 1.0]),
)
def test_is_the_sum_over_all_pairs_however_it_is_cut(t, tile, dtype, ones):
    a, d = rows(t, 5, dtype), rows(t, 3, dtype, 1)
    seen = []

    def kernel(products, i, j):
        seen.append((i, j))
        return products + ones

    total, in_a, in_d = gram_sum(a, d, kernel, tile=tile)
    scale = (in_a * in_d).sum(1)
    error = (total.double() - dense(a, d, ones)).abs() / scale
    assert error.max() < (1e-5 if dtype == torch.float32 else 1e-13)
    cut = tile > 0 and t > tile and 0 < t % tile <= THIN
    assert len(seen) == (3 if cut else 1)
    for lengths, x in ((in_a, a), (in_d, d)):
        true = x.double().square().sum((2, 3))
        assert (lengths >= true * (1 - 1e-15)).all()
        assert torch.allclose(lengths, true, rtol=1e-5)


def test_a_class_token_beside_patches_is_cut_off():
    seen = []
    a, d = rows(65, 4, torch.float64), rows(65, 4, torch.float64, 1)
    gram_sum(a, d, lambda k, i, j: seen.append((i, j)) or k, tile=TILE)
    most, last = slice(0, 64), slice(64, 65)
    assert seen == [(most, most), (most, last), (last, last)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lengths_beside_short_products_have_all_digits(dtype):
    a, d = rows(6, 5, dtype), rows(6, 3, dtype, 1)
    with norms_in(NormPrecision.BF16):
        _, in_a, _ = gram_sum(a, d, lambda k, i, j: k)
    true = a.double().square().sum((2, 3))
    assert (in_a >= true).all() and torch.allclose(in_a, true, rtol=1e-5)
