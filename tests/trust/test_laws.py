"""Noise and draws have the laws that the accountant takes them to have."""

import numpy as np
import pytest
import torch

from curvedp.noise import RandomStreams

from .laws import correlations, noise_law, sampler_law

both = pytest.mark.parametrize("source", ["default", "secure"])


@both
def test_noise_is_normal_with_the_declared_variance(source):
    law = noise_law(source, 10**6)
    assert law.draws == 10**6
    assert law.fits, law


@both
def test_noise_is_independent_of_other_noise(source):
    scores = correlations(source, 200_000)
    assert len(scores) == 12
    assert max(map(abs, scores.values())) < 6, scores


@both
def test_draws_are_poisson(source):
    law = sampler_law(source, 8_000)
    assert law.fits, law


def test_half_a_per_cent_less_noise_is_seen(monkeypatch):
    own = RandomStreams.normals
    monkeypatch.setattr(
        RandomStreams, "normals", lambda self, *args: 0.995 * own(self, *args)
    )
    assert not noise_law("default", 10**6).fits


def test_another_law_with_the_same_variance_is_seen(monkeypatch):
    def uniform(self, shape, generator):
        width = 12**0.5
        drawn = generator.random(tuple(shape)) * width - width / 2
        return torch.from_numpy(drawn.astype(np.float32))

    monkeypatch.setattr(RandomStreams, "normals", uniform)
    law = noise_law("default", 10**5)
    assert abs(law.variance - 1) < 0.02
    assert not law.fits


def test_the_same_noise_for_two_steps_is_seen(monkeypatch):
    own = RandomStreams.generator
    monkeypatch.setattr(
        RandomStreams,
        "generator",
        lambda self, stream, *at: own(RandomStreams(0, unsafe_reproducible_noise=1),
                                      stream, 0),
    )  # fmt: skip
    assert abs(correlations("default", 10_000)["steps"]) > 50


def test_batches_of_a_fixed_size_are_seen(monkeypatch):
    class Fixed:
        def draw(self, step, population):
            return np.random.default_rng(step).permutation(population)[:6]

    monkeypatch.setattr(RandomStreams, "sampler", lambda self, *args: Fixed())
    law = sampler_law("default", 4_000)
    assert law.pair_z > 6 and law.counts_p < 1e-6
