"""Secure noise: its law to the tails, its grid, and that no draw is used twice."""

import copy
import math
import os
import pickle
from decimal import Decimal

import numpy as np
import pytest
import torch
from scipy import stats

from curvedp.barrier import IDENTITY_FRAME, ClippedSum
from curvedp.errors import ConfigurationError, CurvedpError
from curvedp.noise import GaussianMechanism, Grid, NoiseState, SecureStreams, Stream
from curvedp.noise import grid as grid_module
from curvedp.noise.grid import exact_normals, float64_normals, rounded_normals
from curvedp.noise.keystream import Keystream

KEY = bytes(range(32))
DRAWS = 6_000_000

#: The key is fixed, so these tests are deterministic; see test_noise_gaussian.py.
SIGNIFICANCE = 1e-3
QUANTILE = float(stats.norm.isf(SIGNIFICANCE / 2))
TOP = 2**64 - 1


def streams_with_key(key=KEY):
    streams = SecureStreams(0)
    streams._keystream = Keystream(key)
    return streams


def released(mechanism, streams, values, step=0, attempt=0):
    clipped = ClippedSum(values, mechanism.bound, IDENTITY_FRAME, step)
    return mechanism.update(clipped, NoiseState(streams, attempt))[0]


@pytest.fixture(scope="module")
def many():
    """Standard normals as the mechanism draws them, in the float64 of a release."""
    mechanism = GaussianMechanism(1.7, 0.3)
    values = {"w": torch.zeros(DRAWS, dtype=torch.float64)}
    release = released(mechanism, streams_with_key(), values)
    return release.values["w"].numpy() / release.noise_std


def test_the_law_is_normal(many):
    assert stats.kstest(many, "norm").pvalue > SIGNIFICANCE


def test_moments(many):
    # the variances of the first four sample moments of a normal
    for power, variance in ((1, 1), (2, 2), (3, 15), (4, 96)):
        expected = (0, 1, 0, 3)[power - 1]
        error = QUANTILE * math.sqrt(variance / DRAWS)
        assert abs((many**power).mean() - expected) <= error, power


def test_tails(many):
    for threshold in (2.0, 3.0, 4.0, 4.5, 5.0):
        for tail in (many > threshold, many < -threshold):
            seen = int(tail.sum())
            expected = DRAWS * stats.norm.sf(threshold)
            outside = (
                stats.poisson.cdf(seen, expected),
                stats.poisson.sf(seen - 1, expected),
            )
            assert min(outside) > SIGNIFICANCE / 2, (threshold, seen, expected)


def test_both_normals_of_a_pair_and_neighbours_are_independent(many):
    lags = (1, 2, grid_module.CHUNK, 2 * grid_module.CHUNK)
    # so many comparisons: share the significance among them
    error = stats.norm.isf(SIGNIFICANCE / 2 / (2 * len(lags))) / math.sqrt(DRAWS)
    squares = (many**2 - 1) / math.sqrt(2)
    for lag in lags:
        assert abs((many[lag:] * many[:-lag]).mean()) <= error, lag
        # the two of a pair share their radius: squares would show it
        assert abs((squares[lag:] * squares[:-lag]).mean()) <= error, lag


def words_of(uniforms):
    return np.array(uniforms, dtype=np.uint64)


def test_tails_reach_thirteen_standard_deviations():
    # (u, its normal): the smallest uniform, and ones for 5 to 9 standard deviations
    extreme = exact_normals(0, 0, 0, 0)[0]
    assert 13.3 < extreme < grid_module.LARGEST_NORMAL
    assert extreme * 2**27 < 2**31
    for z in (5.0, 6.5, 8.0, 9.0):
        number = int(math.exp(-z * z / 2) * 2**128) - 1
        high, low = number >> 64, number & TOP
        uniforms = words_of([[high], [low], [0], [0]])
        drawn = rounded_normals(lambda n, u=uniforms: u.reshape(-1), 2, 2.0**26)
        assert abs(float(drawn[0]) / 2**26 - z) < 1e-7
        assert drawn[1] == 0


def test_exact_normals_are_exact():
    half = 2**63
    for turn, direction in (
        (0, (1, 0)),
        (half // 2, (0, 1)),
        (half, (-1, 0)),
        (half + half // 2, (0, -1)),
    ):
        pair = exact_normals(half - 1, TOP, turn, 0)  # u = 1/2
        radius = (2 * Decimal(2).ln()).sqrt()
        for value, part in zip(pair, direction, strict=True):
            # the default context gives 28 digits of the expected value
            assert abs(value - part * radius) < Decimal("1e-26")
    eighth = exact_normals(half - 1, TOP, half // 4, 0)
    assert abs(eighth[0] - eighth[1]) < Decimal("1e-55")
    assert exact_normals(TOP, TOP, 123, 0) == (0, 0)  # u = 1


def uniforms_of_all_sizes(n=1500):
    words = Keystream(KEY).reader(9, 0).words(4 * n).reshape(4, n).copy()
    shift = (np.arange(n) % 64).astype(np.uint64)
    words[0, : n // 3] >>= shift[: n // 3]  # tiny: far tails
    words[0, n // 3 : n // 2] = TOP - (words[0] >> shift)[n // 3 : n // 2]  # near 1
    words[0, n // 2 : n // 2 + 3] = (0, TOP, TOP)
    words[1, n // 2 : n // 2 + 3] = (0, TOP, 0)
    words[2, -64:] = 2**63 + (words[2, -64:] >> np.arange(64).astype(np.uint64))
    return words


def test_the_float64_error_is_well_inside_its_bound():
    words = uniforms_of_all_sizes()
    normals, error = float64_normals(words)
    for column in range(words.shape[1]):
        exact = exact_normals(*(int(w) for w in words[:, column]))
        for row in range(2):
            off = abs(Decimal(float(normals[row, column])) - exact[row])
            assert off <= error[column].item() / 4, words[:, column]


def test_doubtful_numbers_are_rounded_as_exact_arithmetic_does(monkeypatch):
    words = uniforms_of_all_sizes(300)
    scale = 1.37 * 2**26
    usual = rounded_normals(lambda n: words.reshape(-1), 600, scale)
    monkeypatch.setattr(grid_module, "FLOAT64_ERROR", 1.0)  # all are in doubt
    asked = []
    monkeypatch.setattr(
        grid_module,
        "exact_normals",
        lambda *w: asked.append(w) or exact_normals(*w),
    )
    exact = rounded_normals(lambda n: words.reshape(-1), 600, scale)
    assert len(asked) == 600
    assert torch.equal(usual, exact)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 2 * grid_module.CHUNK + 1])
def test_any_number_of_normals(count):
    drawn = rounded_normals(Keystream(KEY).reader(1, 0).words, count, 2.0**26)
    assert drawn.shape == (count,)
    assert drawn.dtype == torch.int32
    assert len(torch.unique(drawn)) >= count * 0.999


@pytest.mark.parametrize("std", [1e-12, 0.3, 1.0, 1.5, 4.0, 12345.6])
def test_the_grid_follows_from_the_planned_noise_alone(std):
    grid = Grid.of(std)
    assert 2**26 <= std / grid.spacing < 2**27
    assert math.log2(grid.spacing) == grid.exponent


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_releases_stand_on_the_grid_whatever_the_sum(dtype):
    mechanism = GaussianMechanism(0.8, 1.3)
    spacing = Grid.of(0.8 * 1.3).spacing
    generator = torch.Generator().manual_seed(0)
    for scale in (0.0, 1e-9, 1.0, 1000.0):
        values = {
            "w": scale * torch.randn(999, generator=generator, dtype=dtype),
            "scalar": torch.tensor(scale / 3, dtype=dtype),
        }
        release = released(mechanism, SecureStreams(0), values)
        for name, value in release.values.items():
            assert value.dtype == dtype
            assert value.shape == values[name].shape
            steps = value.double() / spacing
            assert torch.equal(steps, steps.round())


def test_the_noise_is_added_exactly_and_does_not_depend_on_the_sum():
    mechanism = GaussianMechanism(1.0, 1.0)
    spacing = Grid.of(1.0).spacing
    generator = torch.Generator().manual_seed(0)
    sums = torch.randn(10_000, generator=generator, dtype=torch.float64) * 300
    zero = {"w": torch.zeros_like(sums)}
    noise = released(mechanism, streams_with_key(), zero).values["w"]
    noisy = released(mechanism, streams_with_key(), {"w": sums}).values["w"]
    on_grid = (sums / spacing).round() * spacing
    assert torch.equal(noisy - noise, on_grid)
    assert float((on_grid - sums).abs().max()) <= spacing / 2


def test_an_absurd_sum_is_held_where_the_noise_still_counts():
    mechanism = GaussianMechanism(1.0, 1.0)
    values = {"w": torch.tensor([1e300, -1e300, math.inf], dtype=torch.float64)}
    release = released(mechanism, streams_with_key(), values).values["w"]
    noise = released(mechanism, streams_with_key(), {"w": torch.zeros(3).double()})
    limit = grid_module.LARGEST_SUM * Grid.of(1.0).spacing
    held = torch.tensor([limit, -limit, limit], dtype=torch.float64)
    assert torch.equal(release - noise.values["w"], held)


def test_the_noise_pays_for_the_rounding_of_the_sum():
    for multiplier, bound, d in ((1.0, 1.0, 10), (0.5, 3.0, 10**6), (8.0, 0.1, 10**9)):
        grid = Grid.of(multiplier * bound)
        std = grid.widened(multiplier, bound, d)
        distance = bound + grid.spacing * math.sqrt(d)
        assert std >= multiplier * distance
        assert std <= multiplier * distance * (1 + 1e-6)
        assert std <= multiplier * bound * 1.005
    values = {"a": torch.zeros(5, 7), "b": torch.zeros(())}
    release = released(GaussianMechanism(2.0, 1.5), SecureStreams(0), values)
    assert release.noise_std == Grid.of(3.0).widened(2.0, 1.5, 36)


def test_two_neighbours_stay_as_close_as_is_paid_for():
    """Adversarial: every coordinate sits at a rounding boundary."""
    d, bound = 4096, 1.0
    grid = Grid.of(1.0)
    nearly = (0.5 - 1e-9) * grid.spacing
    first = torch.full((d,), nearly, dtype=torch.float64)
    second = first + bound / math.sqrt(d) + 2e-9 * grid.spacing
    none = torch.zeros(d, dtype=torch.int32)
    distance = float((grid.add(first, none) - grid.add(second, none)).norm())
    assert distance > bound + 0.9 * grid.spacing * math.sqrt(d)
    assert distance <= grid.widened(1.0, bound, d)


def test_more_coordinates_than_the_grid_can_pay_for_are_refused():
    with pytest.raises(ConfigurationError, match="does not fit its grid"):
        Grid.of(1e3).widened(1e3, 1.0, 10**12)


def test_steps_attempts_and_parameters_are_independent():
    mechanism = GaussianMechanism(1.0, 1.0)
    streams = streams_with_key()
    n = 100_000
    drawn = {}
    for step, attempt in ((0, 0), (0, 1), (1, 0), (1, 1), (2**33, 0)):
        values = {"a": torch.zeros(n), "b": torch.zeros(n)}
        release = released(mechanism, streams, values, step, attempt)
        for name, value in release.values.items():
            drawn[step, attempt, name] = value.double().numpy()
    keys = list(drawn)
    pairs = [(x, y) for i, x in enumerate(keys) for y in keys[:i]]
    limit = float(stats.norm.isf(SIGNIFICANCE / 2 / len(pairs))) / math.sqrt(n)
    for x, y in pairs:
        assert abs((drawn[x] * drawn[y]).mean()) <= limit, (x, y)
        assert (drawn[x] == drawn[y]).mean() < 1e-3


def test_one_address_is_never_drawn_twice():
    mechanism = GaussianMechanism(1.0, 1.0)
    streams = SecureStreams(0)
    values = {"w": torch.zeros(4)}
    released(mechanism, streams, values, step=4)
    with pytest.raises(CurvedpError, match="drawn before"):
        released(mechanism, streams, values, step=4)
    released(mechanism, streams, values, step=4, attempt=1)
    released(mechanism, streams, values, step=5)


def test_two_runs_have_different_noise():
    mechanism = GaussianMechanism(1.0, 1.0)
    values = {"w": torch.zeros(1000)}
    first, second = (
        released(mechanism, SecureStreams(0), values).values["w"] for _ in range(2)
    )
    assert not bool((first == second).any())


def test_the_key_has_256_bits_of_the_operating_system(monkeypatch):
    sizes = []
    urandom = os.urandom
    monkeypatch.setattr(os, "urandom", lambda n: sizes.append(n) or urandom(n))
    SecureStreams(0)
    assert 32 in sizes


def test_secret_draws_do_not_come_from_numpy():
    streams = SecureStreams(3)
    for stream in (Stream.NOISE, Stream.SAMPLING):
        with pytest.raises(CurvedpError, match="cryptographic"):
            streams.generator(stream, 0, 0)
        with pytest.raises(CurvedpError, match="cryptographic"):
            streams.torch_seed(stream, 0)
    again = SecureStreams(3)
    assert streams.torch_seed(Stream.PROBE, 1) == again.torch_seed(Stream.PROBE, 1)
    for stream in (Stream.FORWARD, Stream.VIEWS):  # masks and views of private rows
        assert streams.torch_seed(stream, 1, 2) == streams.torch_seed(stream, 1, 2)
        assert streams.torch_seed(stream, 1, 2) != streams.torch_seed(stream, 2, 2)
        assert streams.torch_seed(stream, 1, 2) != again.torch_seed(stream, 1, 2)
    assert not streams.is_unsafe


@pytest.mark.parametrize("leak", [pickle.dumps, copy.copy, copy.deepcopy])
def test_secure_streams_keep_their_secret(leak):
    with pytest.raises(CurvedpError, match="secret"):
        leak({"nested": NoiseState(SecureStreams(0))}["nested"].streams)
    assert repr(SecureStreams(5)) == "SecureStreams(seed=5, secret=<AES-256-CTR>)"


# -- sampling --


def sampler(rate, streams=None):
    return (streams or streams_with_key()).sampler(rate, lambda step: [step, 0])


def test_sampling_is_poisson(monkeypatch):
    monkeypatch.setattr("curvedp.noise.secure.COINS", 1000)  # several portions
    rate, population, steps = 0.03, 2500, 400
    drawn = [sampler(rate).draw(step, population) for step in range(steps)]
    counts = np.array([len(d) for d in drawn])
    each = np.bincount(np.concatenate(drawn), minlength=population)
    variance = rate * (1 - rate)
    trials = steps * population
    assert abs(counts.sum() - trials * rate) <= QUANTILE * math.sqrt(trials * variance)
    dispersion = (counts - population * rate) ** 2 / (population * variance)
    assert abs(dispersion.mean() - 1) <= QUANTILE * math.sqrt(2 / steps)
    dispersion = (each - steps * rate) ** 2 / (steps * variance)
    # the fourth moment of a binomial is a little more than a normal's
    assert abs(dispersion.mean() - 1) <= QUANTILE * math.sqrt(2.1 / population)
    assert all(len(set(d)) == len(d) for d in drawn)


def test_sampling_order_is_random_and_repeats_only_at_its_address():
    streams = SecureStreams(0)
    draws = sampler(0.5, streams)
    first = draws.draw(0, 1000)
    assert np.array_equal(first, draws.draw(0, 1000))
    assert not np.array_equal(first, np.sort(first))
    assert set(first) != set(draws.draw(1, 1000))
    assert set(first) != set(sampler(0.5, SecureStreams(0)).draw(0, 1000))
    assert first.dtype == np.int64


def test_sampling_at_the_ends():
    assert set(sampler(1.0).draw(0, 50)) == set(range(50))
    assert sampler(0.5).draw(0, 0).shape == (0,)
    assert sampler(1e-15).draw(0, 100).shape == (0,)
    with pytest.raises(ConfigurationError, match="sample_rate"):
        sampler(0.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gpu_gets_what_the_cpu_gets(dtype):
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(100_001, generator=generator, dtype=dtype) * 50
    on_gpu, on_cpu = (
        released(GaussianMechanism(1.1, 0.7), streams_with_key(), {"w": v}).values["w"]
        for v in (value.cuda(), value)
    )
    assert on_gpu.is_cuda
    assert torch.equal(on_gpu.cpu(), on_cpu)
