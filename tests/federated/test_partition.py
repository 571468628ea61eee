"""Splits for simulations: every record in one part, skewed as asked."""

import numpy as np
import pytest

from curvedp.errors import ConfigurationError
from curvedp.federated.partition import dirichlet_partition, iid_partition

LABELS = np.repeat(np.arange(5), 200)


def assert_split(parts, size):
    assert sorted(np.concatenate(parts).tolist()) == list(range(size))


def test_an_even_split():
    parts = iid_partition(103, 10, seed=3)
    assert_split(parts, 103)
    assert {len(p) for p in parts} == {10, 11}
    again, other = iid_partition(103, 10, seed=3), iid_partition(103, 10, seed=4)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(parts, other, strict=True))


def skew(parts):
    """Mean distance of a part's classes from even ones."""
    shares = [np.bincount(LABELS[p], minlength=5) / len(p) for p in parts]
    return float(np.mean([np.abs(s - 0.2).sum() for s in shares]))


@pytest.mark.parametrize("seed", range(3))
def test_a_dirichlet_split_is_as_uneven_as_its_alpha(seed):
    found = {a: dirichlet_partition(LABELS, 8, a, seed) for a in (0.1, 1.0, 1000.0)}
    for parts in found.values():
        assert_split(parts, 1000)
        assert min(map(len, parts)) >= 1
    assert skew(found[0.1]) > skew(found[1.0]) > skew(found[1000.0])
    assert skew(found[1000.0]) < 0.15


def test_every_client_has_the_least():
    parts = dirichlet_partition(LABELS, 20, 0.05, seed=1, least=10)
    assert_split(parts, 1000)
    assert min(map(len, parts)) >= 10


@pytest.mark.parametrize(
    "make",
    [
        lambda: iid_partition(3, 4),
        lambda: iid_partition(3, 0),
        lambda: dirichlet_partition(LABELS, 4, 0.0),
        lambda: dirichlet_partition(LABELS, 4, 1.0, least=251),
    ],
)
def test_refusals(make):
    with pytest.raises(ConfigurationError):
        make()
