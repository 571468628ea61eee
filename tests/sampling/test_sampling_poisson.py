"""Poisson sampling: each example on its own, with the declared probability."""

import math

import numpy as np
import pytest
from scipy import stats

from curvedp.errors import ConfigurationError
from curvedp.noise import RandomStreams, Stream
from curvedp.sampling import PoissonSampler

#: The draws are seeded, so the tests are deterministic; a right sampler would fail one
#: of them for one seed in a thousand.
SIGNIFICANCE = 1e-3

N, RATE, STEPS = 12, 0.3, 20_000


def sampler(rate, seed=3):
    streams = RandomStreams(0, unsafe_reproducible_noise=seed)
    return PoissonSampler(rate, lambda step: streams.generator(Stream.SAMPLING, step))


@pytest.fixture(scope="module")
def inclusion():
    """``[STEPS, N]``: who was drawn in which step."""
    drawn = np.zeros((STEPS, N))
    source = sampler(RATE)
    for step in range(STEPS):
        drawn[step, source.draw(step, N)] = 1
    return drawn


def limit(comparisons):
    return float(stats.norm.isf(SIGNIFICANCE / 2 / comparisons))


def test_everybody_is_drawn_at_the_declared_rate(inclusion):
    error = math.sqrt(RATE * (1 - RATE) / STEPS)
    assert np.abs(inclusion.mean(0) - RATE).max() <= limit(N) * error


def test_pairs_are_drawn_independently(inclusion):
    # shuffled batches of a fixed size would give a covariance of -q (1 - q) / (N - 1)
    centred = inclusion - RATE
    covariance = centred.T @ centred / STEPS
    pairs = covariance[np.triu_indices(N, 1)]
    error = RATE * (1 - RATE) / math.sqrt(STEPS)
    assert np.abs(pairs).max() <= limit(len(pairs)) * error
    fixed_size = RATE * (1 - RATE) / (N - 1)
    assert fixed_size > 2 * limit(len(pairs)) * error, "the test could not tell"


def test_the_size_of_a_batch_is_binomial(inclusion):
    counts = np.bincount(inclusion.sum(1).astype(int), minlength=N + 1)
    expected = STEPS * stats.binom.pmf(np.arange(N + 1), N, RATE)
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    assert stats.chisquare(observed, wanted).pvalue > SIGNIFICANCE


def test_steps_are_independent(inclusion):
    centred = inclusion - RATE
    error = RATE * (1 - RATE) / math.sqrt(STEPS)
    for lag in (1, 2):
        covariance = centred[lag:].T @ centred[:-lag] / STEPS
        assert np.abs(covariance).max() <= limit(N * N) * error


def test_the_order_within_a_batch_is_random():
    firsts = [sampler(1.0).draw(step, 10)[0] for step in range(500)]
    assert stats.chisquare(np.bincount(firsts, minlength=10)).pvalue > SIGNIFICANCE


def test_nobody_is_drawn_twice_in_a_step():
    source = sampler(0.8)
    for step in range(200):
        drawn = source.draw(step, 30)
        assert len(set(drawn.tolist())) == len(drawn)
        assert drawn.dtype == np.int64
        assert all(0 <= i < 30 for i in drawn)


def test_empty_draws_happen():
    sizes = [len(sampler(0.05).draw(step, 5)) for step in range(200)]
    assert min(sizes) == 0
    assert max(sizes) > 0


def test_rate_one_takes_everybody():
    assert sorted(sampler(1.0).draw(0, 7).tolist()) == list(range(7))


def test_a_step_has_one_draw_and_runs_differ():
    assert sampler(0.5).draw(4, 50).tolist() == sampler(0.5).draw(4, 50).tolist()
    assert sampler(0.5).draw(4, 50).tolist() != sampler(0.5).draw(5, 50).tolist()
    safe = [RandomStreams(0) for _ in range(2)]
    draws = [
        PoissonSampler(0.5, lambda step, s=s: s.generator(Stream.SAMPLING, step))
        .draw(0, 200)
        .tolist()
        for s in safe
    ]
    assert draws[0] != draws[1]


def test_a_large_population_costs_what_its_batch_costs():
    drawn = sampler(1e-8).draw(0, 10**9)
    assert len(drawn) < 100


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, math.nan, math.inf])
def test_impossible_rates_are_refused(rate):
    with pytest.raises(ConfigurationError, match="sample_rate"):
        PoissonSampler(rate, np.random.default_rng)


def test_the_repr_shows_no_generator():
    assert repr(sampler(0.5)) == "PoissonSampler(sample_rate=0.5)"
