"""Gaussian noise: its law, on every coordinate, always, and never the same twice."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from curvedp.accounting.events import PoissonGaussianEvent
from curvedp.barrier import IDENTITY_FRAME, ClippedSum
from curvedp.errors import ConfigurationError, CurvedpError
from curvedp.noise import (
    GaussianMechanism,
    NoiseState,
    RandomStreams,
    restore_release,
)
from curvedp.testing import check_mechanism

DRAWS = 1_000_000

#: The noise is seeded, so these tests are deterministic. A p-value below this would
#: come once in a thousand seeds if the law is right.
SIGNIFICANCE = 1e-3

#: Two-sided normal quantile of that significance, for means, variances, correlations.
QUANTILE = float(stats.norm.isf(SIGNIFICANCE / 2))

SHAPES = {"conv.weight": (4, 3, 2), "bias": (5,), "scalar": (), "matrix": (7, 9)}


def zeros(shapes=SHAPES, dtype=torch.float32):
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}


def released(mechanism, streams, step=0, attempt=0, values=None, bound=None):
    clipped = ClippedSum(
        zeros() if values is None else values,
        mechanism.bound if bound is None else bound,
        IDENTITY_FRAME,
        step,
    )
    return mechanism.update(clipped, NoiseState(streams, attempt))[0]


def flat(release):
    return torch.cat([v.double().flatten() for v in release.values.values()]).numpy()


@pytest.fixture(scope="module")
def many():
    """A million standard normals, as the mechanism draws them."""
    mechanism = GaussianMechanism(2.0, 0.75)
    streams = RandomStreams(0, unsafe_reproducible_noise=11)
    values = zeros({"w": (1000, DRAWS // 1000)})
    release = released(mechanism, streams, values=values)
    return release.values["w"].double().numpy() / (2.0 * 0.75)


def test_the_law_is_normal(many):
    assert stats.kstest(many.ravel(), "norm").pvalue > SIGNIFICANCE


def test_mean_and_variance(many):
    assert abs(many.mean()) <= QUANTILE / math.sqrt(DRAWS)
    # the variance of the sample variance of a normal is 2 / n
    assert abs(many.var() - 1) <= QUANTILE * math.sqrt(2 / DRAWS)


def test_the_tails_are_not_cut(many):
    for threshold in (3.0, 4.0):
        expected = DRAWS * 2 * stats.norm.sf(threshold)
        seen = int((np.abs(many) > threshold).sum())
        assert abs(seen - expected) <= QUANTILE * math.sqrt(expected)


def test_coordinates_are_independent(many):
    error = QUANTILE / math.sqrt(DRAWS)
    flat_noise = many.ravel()
    for lag in (1, 2, 1000):
        assert abs((flat_noise[lag:] * flat_noise[:-lag]).mean()) <= error
    # squares too: a scale that varies from row to row would show here
    squares = (flat_noise**2 - 1) / math.sqrt(2)
    assert abs((squares[1:] * squares[:-1]).mean()) <= error


def test_steps_attempts_and_parameters_are_independent():
    mechanism = GaussianMechanism(1.0, 1.0)
    streams = RandomStreams(0, unsafe_reproducible_noise=5)
    n = 50_000
    shapes = {"a": (n,), "b": (n,)}
    drawn = {}
    for step, attempt in ((0, 0), (0, 1), (1, 0), (1, 1)):
        release = released(mechanism, streams, step, attempt, zeros(shapes))
        for name, value in release.values.items():
            drawn[step, attempt, name] = value.double().numpy()
    keys = list(drawn)
    pairs = [(x, y) for i, x in enumerate(keys) for y in keys[:i]]
    # so many comparisons: share the significance among them
    limit = float(stats.norm.isf(SIGNIFICANCE / 2 / len(pairs))) / math.sqrt(n)
    for x, y in pairs:
        assert abs((drawn[x] * drawn[y]).mean()) <= limit, (x, y)


def test_the_noise_scales_with_multiplier_and_bound():
    for multiplier, bound in ((0.5, 1.0), (3.0, 0.1), (1.0, 40.0)):
        mechanism = GaussianMechanism(multiplier, bound)
        streams = RandomStreams(0, unsafe_reproducible_noise=3)
        release = released(mechanism, streams, values=zeros({"w": (100_000,)}))
        assert release.noise_std == mechanism.noise_std == multiplier * bound
        std = float(release.values["w"].double().std())
        error = QUANTILE / math.sqrt(2 * 100_000)
        assert abs(std / (multiplier * bound) - 1) <= error


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_coordinate_of_every_parameter_is_noised_also_for_an_empty_batch(dtype):
    release = released(
        GaussianMechanism(1.0, 1.0), RandomStreams(0), values=zeros(dtype=dtype)
    )
    assert release.values.keys() == SHAPES.keys()
    for name, value in release.values.items():
        assert value.shape == SHAPES[name]
        assert value.dtype == dtype
        assert bool((value != 0).all())
    # no two coordinates share a draw
    assert len(set(flat(release))) == sum(math.prod(s) for s in SHAPES.values())
    assert release.is_finite()


def test_the_noise_does_not_depend_on_the_sum():
    mechanism = GaussianMechanism(1.0, 1.0)
    values = {name: torch.full(shape, 64.0) for name, shape in SHAPES.items()}
    empty = released(mechanism, RandomStreams(0, unsafe_reproducible_noise=1))
    full = released(
        mechanism, RandomStreams(0, unsafe_reproducible_noise=1), values=values
    )
    assert np.allclose(flat(full) - flat(empty), 64.0, atol=1e-4)
    assert all(bool((v == 64).all()) for v in values.values()), "the sum was changed"


def test_one_address_is_never_drawn_twice():
    mechanism = GaussianMechanism(1.0, 1.0)
    streams = RandomStreams(0)
    released(mechanism, streams, step=4)
    with pytest.raises(CurvedpError, match="drawn before"):
        released(mechanism, streams, step=4)
    released(mechanism, streams, step=4, attempt=1)  # paid for again
    released(mechanism, streams, step=5)


def test_two_runs_have_different_noise_unless_asked_otherwise():
    mechanism = GaussianMechanism(1.0, 1.0)
    first, second = (flat(released(mechanism, RandomStreams(0))) for _ in range(2))
    assert not np.any(first == second)
    same = [
        flat(released(mechanism, RandomStreams(k, unsafe_reproducible_noise=9)))
        for k in range(2)
    ]
    assert np.array_equal(*same)
    other = released(mechanism, RandomStreams(0, unsafe_reproducible_noise=10))
    assert not np.any(flat(other) == same[0])


def test_torch_and_numpy_seeds_do_not_reach_the_noise():
    mechanism = GaussianMechanism(1.0, 1.0)
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        drawn.append(flat(released(mechanism, RandomStreams(0))))
    assert not np.any(drawn[0] == drawn[1])


def test_noise_leaves_the_global_generators_alone():
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    released(GaussianMechanism(1.0, 1.0), RandomStreams(0))
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)


def test_a_sum_with_a_larger_bound_is_refused():
    mechanism = GaussianMechanism(1.0, 1.0)
    streams = RandomStreams(0)
    with pytest.raises(ConfigurationError, match="one Plan"):
        released(mechanism, streams, bound=1.0 + 1e-12)
    released(mechanism, streams, bound=0.5)  # more noise than needed is fine


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_impossible_settings_are_refused(value):
    with pytest.raises(ConfigurationError, match="noise_multiplier"):
        GaussianMechanism(value, 1.0)
    with pytest.raises(ConfigurationError, match="bound"):
        GaussianMechanism(1.0, value)


def test_the_event_says_what_was_done():
    event = GaussianMechanism(1.25, 3.0).event(0.01)
    assert event == PoissonGaussianEvent(noise_multiplier=1.25, sample_rate=0.01)


def test_the_mechanism_conforms():
    check_mechanism(GaussianMechanism(1.5, 2.0), bound=2.0, noise_std=3.0)


class _Broken(GaussianMechanism):
    """Adds noise to all but the last parameter."""

    def update(self, clipped, state):
        release, state = super().update(clipped, state)
        values = dict(release.values)
        last = list(values)[-1]
        values[last] = clipped.values[last]
        return restore_release(
            values, release.frame, release.step, noise_std=release.noise_std
        ), state


def test_a_mechanism_that_forgets_a_parameter_does_not_conform():
    with pytest.raises(AssertionError, match="got no noise"):
        check_mechanism(_Broken(1.0, 1.0), bound=1.0, noise_std=1.0)


def test_a_mechanism_that_claims_more_noise_does_not_conform():
    with pytest.raises(AssertionError, match="instead of"):
        check_mechanism(GaussianMechanism(1.0, 1.0), bound=1.0, noise_std=1.05)


def test_a_release_that_is_read_back_is_the_same():
    release = released(GaussianMechanism(1.0, 1.0), RandomStreams(0))
    again = restore_release(
        release.values, release.frame, release.step, noise_std=release.noise_std
    )
    assert again == release
