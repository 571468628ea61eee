"""Cyclic Poisson sampling: who may be in which step, and how often."""

import math

import numpy as np
import pytest

from curvedp.errors import ConfigurationError
from curvedp.sampling import CyclicSampler, PoissonSampler

GROUPS = 5


def sampler(rate=0.3, *, equal=False, seed=0, groups=GROUPS):
    return CyclicSampler(
        PoissonSampler(rate, lambda step: np.random.default_rng([seed, 1, step])),
        groups,
        lambda: np.random.default_rng([seed, 2]),
        equal,
    )


@pytest.mark.parametrize("equal", [False, True])
class TestTurns:
    def test_an_example_takes_part_only_in_its_group_s_steps(self, equal):
        own = sampler(equal=equal)
        seen = {}
        for step in range(200):
            for i in own.draw(step, 100).tolist():
                assert seen.setdefault(i, step % GROUPS) == step % GROUPS
        assert len(seen) == 100
        assert set(seen.values()) == set(range(GROUPS))

    def test_the_rate_is_that_of_a_member(self, equal):
        own, steps = sampler(0.3, equal=equal), 2000
        counts = np.zeros(100)
        for step in range(steps):
            drawn = own.draw(step, 100)
            assert len(set(drawn.tolist())) == len(drawn)
            counts[drawn] += 1
        turns = steps / GROUPS
        error = 5 * math.sqrt(0.3 * 0.7 / turns)
        assert np.abs(counts / turns - 0.3).max() < error
        assert np.var(counts) == pytest.approx(turns * 0.21, rel=0.6)

    def test_groups_stay_when_it_is_made_again(self, equal):
        one, other = sampler(equal=equal), sampler(equal=equal)
        assert np.array_equal(one.draw(3, 100), other.draw(3, 100))

    def test_an_empty_dataset_or_group(self, equal):
        assert len(sampler(equal=equal).draw(0, 0)) == 0
        assert len(sampler(0.9, equal=equal, groups=50).draw(49, 2)) == 0


def sizes(own, population):
    counts = np.zeros(GROUPS)
    for step in range(GROUPS):
        counts[step] = len(own.draw(step, population))
    return counts


def test_equal_groups_are_equal():
    assert sorted(sizes(sampler(1.0, equal=True), 103)) == [20, 20, 21, 21, 21]


def test_independent_groups_are_binomial():
    drawn = np.concatenate([sizes(sampler(1.0, seed=s), 100) for s in range(200)])
    assert drawn.var() == pytest.approx(100 * 0.2 * 0.8, rel=0.2)


def test_an_example_less_leaves_the_law_of_the_others_as_it_is():
    # independently drawn: the chance that two given ones share a group is 1 / b,
    # whatever the number of examples; in equal groups it is not
    def together(population, equal):
        shared = 0
        for seed in range(3000):
            own = sampler(1.0, seed=seed, equal=equal, groups=2)
            group = own.draw(0, population).tolist()
            shared += (0 in group) == (1 in group)
        return shared / 3000

    assert together(4, False) == pytest.approx(0.5, abs=0.04)
    assert together(3, False) == pytest.approx(0.5, abs=0.04)
    assert together(4, True) == pytest.approx(1 / 3, abs=0.04)


def test_one_group_is_poisson():
    plain = PoissonSampler(0.3, lambda step: np.random.default_rng([0, 1, step]))
    own = sampler(0.3, groups=1)
    assert np.array_equal(own.draw(7, 50), plain.draw(7, 50))


def test_nothing_secret_is_printed():
    own = sampler()
    own.draw(0, 10)
    assert "generator" not in repr(own) and "_members" not in repr(own)


def test_refusals():
    with pytest.raises(ConfigurationError, match="groups"):
        sampler(groups=0)
