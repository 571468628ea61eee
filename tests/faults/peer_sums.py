"""What one example may do to the sum, and what noise it gets."""

from __future__ import annotations

import math
from tempfile import TemporaryDirectory

import torch
from torch import nn
from torch.utils.data import TensorDataset

from curvedp.barrier import ClippedSum
from curvedp.clipping import AdaptiveClipping, FlatClipping
from curvedp.clipping.rules import Seen
from curvedp.noise import Grid, NoiseState, RandomStreams, SecureStreams
from curvedp.plan import Plan, SamplingPlan

from .cases import attach, linear
from .checking import clipped_sum, clipped_vector, one_step, unusable, working


def bad_target_is_as_if_absent():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(6, n, generator=generator) for n in (4, 3))
    expected = clipped_vector(TensorDataset(x[1:], y[1:]), loss="mse")
    y[0, 1] = float("inf")
    given = clipped_vector(TensorDataset(x, y), loss="mse")
    assert torch.allclose(given, expected, atol=1e-6), "one target reached everybody"


# -- precision ------------------------------------------------------------------------


def _longest(contributions):
    return max(float(c.double().norm()) for c in contributions)


def bound_holds_in_bfloat16():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 3)).bfloat16()
    x = 5 * torch.randn(20, 32).bfloat16()
    for clipping in ("flat", "normalised", "per-layer"):
        length = _longest(
            clipped_vector(
                TensorDataset(x[i : i + 1], torch.zeros(1).long()),
                model,
                clipping=clipping,
                clip_norm=0.7,
            )
            for i in range(len(x))
        )
        assert length <= 0.7, f"{clipping}: {length / 0.7 - 1:.2%} beyond the bound"


def bound_holds_under_autocast():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 3))
    x = 5 * torch.randn(12, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        length = _longest(
            clipped_vector(
                TensorDataset(x[i : i + 1], torch.zeros(1).long()), model, clip_norm=0.7
            )
            for i in range(len(x))
        )
    assert length <= 0.7, f"{length / 0.7 - 1:.2%} beyond the bound"


# -- adaptive clipping ----------------------------------------------------------------


def adaptive_contribution_is_bounded():
    """Gradient and count together: the bound is what the noise is made for."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 4, generator=generator) * torch.logspace(-3, 3, 24)[:, None]
    for i in range(0, 24, 3):
        one = TensorDataset(x[i : i + 1], torch.zeros(1).long())
        total = clipped_sum(one, clipping="adaptive", clip_norm=0.7)
        vector = torch.cat([v.flatten() for v in total.values.values()])
        length = float(vector.double().norm())
        assert length <= total.bound, f"{length} where {total.bound} is accounted for"


def adaptive_count_gets_the_same_noise():
    rule = AdaptiveClipping.start(1.0, share=0.5)
    plan = Plan.make(
        SamplingPlan.by_rate(0.1, 4, 10), rule, delta=1e-5, noise_multiplier=2.0
    )
    zeros = {
        "w": torch.zeros(4000),
        **rule.extras(Seen([], torch.ones(1, 1), torch.zeros(1) > 0)),
    }
    (count,) = zeros.keys() - {"w"}
    counts, weights = [], []
    for step in range(400):
        total = ClippedSum(zeros, rule.bound, "identity", step)
        streams = RandomStreams(0, unsafe_reproducible_noise=step)
        release, _ = plan.mechanism().update(total, NoiseState(streams))
        counts.append(float(release.values[count]))
        weights.append(release.values["w"][:10])
    expected = 2.0 * math.sqrt(1 + 0.5**2)
    for drawn in (torch.tensor(counts), torch.cat(weights)):
        assert 0.85 < float(drawn.std()) / expected < 1.15, "noise for a smaller bound"


def replacing_an_example_costs_twice_the_distance():
    """With everybody in every step, replace-one at 2 s is add-remove at s."""

    def epsilon(relation, multiplier):
        return Plan.make(
            SamplingPlan.by_rate(1.0, 1, 10),
            FlatClipping(1.0),
            delta=1e-5,
            noise_multiplier=multiplier,
            relation=relation,
        ).epsilon()

    ratio = epsilon("replace-one", 4.0) / epsilon("add-remove", 2.0)
    assert 0.99 < ratio < 1.01, f"replacing costs {ratio:.2f} of what it has to"


# -- noise ----------------------------------------------------------------------------


def _noise(folder=None, *, steps=2, **options):
    """The first step's noise: the examples contribute nothing."""
    settings = {"run_dir": folder, "journal": False, "steps": steps, **options}
    with attach(unusable(4), **settings) as private:
        if folder is not None:
            private.resume()
        return one_step(private)


def resumed_run_draws_new_noise():
    """The step's release was lost; the seed is the same as before."""
    with TemporaryDirectory() as folder:
        lost, again = _noise(folder), _noise(folder)
    assert not torch.equal(lost, again), "the lost step's noise was drawn again"


def seeding_torch_does_not_seed_the_noise():
    draws = []
    for _ in range(2):
        torch.manual_seed(0)
        draws.append(_noise(seed=0, unsafe_reproducible_noise=None))
    assert not torch.equal(*draws), "whoever knows the seed knows the noise"


def secure_mode_works():
    torch.manual_seed(0)
    model = linear(features=4, classes=500)
    with working():
        private = attach(
            unusable(4),
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=10.0),  # undoes the mean
            secure=True,
            noise_multiplier=2.0,
            unsafe_reproducible_noise=None,
        )
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
        noise = one_step(private)
    assert isinstance(private._engine.streams, SecureStreams), "numpy drew the noise"
    assert "AES-256" in private.statement().facts["noise_source"]
    assert 0.95 < float(noise.std()) / 2.0 < 1.05, "the noise has another size"
    steps = noise.double() / Grid.of(2.0).spacing
    # the update is computed in float32, so the grid shows up to its rounding
    assert ((steps - steps.round()).abs() <= steps.abs() * 2.0**-22 + 1e-3).all()
