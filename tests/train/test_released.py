"""Factors learnt from releases: the noise is taken out, and what is left is signal."""

import pytest
import torch
from torch import nn

from curvedp.auditing import audit_step
from curvedp.auditing.witness import next_sum
from curvedp.clipping import FlatClipping
from curvedp.curvature import DenseFactor, DiagonalFactor, Refresh
from curvedp.errors import CheckpointError, ConfigurationError
from curvedp.layers import Batch, cover, synthesiser_like
from curvedp.noise import restore_release
from curvedp.recipes import RECIPES
from curvedp.train import released
from curvedp.train.released import ReleasedSource
from curvedp.whitening import Damping, KroneckerWhitening

from .test_rivals import DELTA, odd_one_out, without_last
from .test_whitened_recipes import attach, examples, train

B, STD = 10.0, 3.0


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 2, groups=2), nn.Flatten(), nn.LayerNorm(16), nn.Linear(16, 3),
    )  # fmt: skip


def source(decay=0.999, every=None, **how):
    model = net()
    shape = Batch(torch.zeros(1, 2, 3, 3), torch.zeros(1, dtype=torch.int64))
    coverage = cover(
        model,
        synthesiser_like(shape, model),
        lambda o, t: nn.functional.cross_entropy(o, t, reduction="none"),
    )
    how = {"side": "both", "rank": None, "damping": Damping(0.1), **how}
    return ReleasedSource(
        model, coverage, KroneckerWhitening(**how), Refresh(every, decay)
    )


def releases(own, signal, count, seed=0):
    """Mapped signal and noise; the source observes them all at the first map."""
    generator = torch.Generator().manual_seed(seed)
    whitener = own.at(0)
    for _ in range(count):
        mapped = whitener.apply(signal())
        noisy = {
            n: (B * v + STD * torch.randn(v.shape, generator=generator)).float()
            for n, v in mapped.items()
        }
        release = restore_release(noisy, whitener.frame, 0, noise_std=STD)
        own.observe(release, FlatClipping(1.0), B)


def zeros(own):
    return {n: torch.zeros_like(p) for n, p in own._parameters.items()}


def sizes(own):
    """Length of every factor's mean, against that of the noise in it."""
    found = {}
    for name, factor in own._running.layers.items():
        noise = own._noise[name]
        if isinstance(factor, DenseFactor):
            for side in "ag":
                mean = getattr(factor, side).mean()
                full = (STD / B) ** 2 * getattr(noise, side).mean()
                found[name, side] = float(mean.norm() / full.norm())
        else:
            for n in factor.squares:
                full = (STD / B) ** 2 * noise.mean(n)
                found[n, "d"] = float(factor.mean(n).mean().abs() / full.mean())
    return found


@pytest.mark.parametrize(
    "how",
    [{}, {"rank": 2}, {"side": "a", "match_scale": True}, {"diagonal": True}],
    ids=str,
)
def test_noise_alone_leaves_nothing(how, monkeypatch):
    """Also through a map that is not the identity, in every form of map."""
    own = source(**how)
    generator = torch.Generator().manual_seed(5)
    directions = {
        n: torch.rand(p.shape, generator=generator) * 5
        for n, p in own._parameters.items()
    }

    def steep():
        return {
            n: v * torch.randn(v.shape, generator=generator)
            for n, v in directions.items()
        }

    releases(own, steep, 30)
    own._build(0, own._running)
    matrix = own.at(0).materialize(own._parameters)
    scales = torch.linalg.eigvalsh((matrix + matrix.T) / 2)
    assert scales.max() > 1.5 * scales.min()
    own._running = own._running.scaled(0.0)
    releases(own, lambda: zeros(own), 3000)
    found = sizes(own)
    assert len(found) == 6
    assert max(found.values()) < 0.15
    # without the correction all of the noise would be there
    monkeypatch.setattr(released, "_less", lambda factor, *_: factor)
    own._running = own._running.scaled(0.0)
    releases(own, lambda: zeros(own), 300)
    assert min(sizes(own).values()) > 0.8


def test_the_signal_is_what_is_left():
    own = source()
    fixed = {n: torch.randn(p.shape) for n, p in own._parameters.items()}
    releases(own, lambda: fixed, 3000)
    factor = own._running.layers["3.weight"]
    m = torch.cat([fixed["3.weight"], fixed["3.bias"][:, None]], 1).double()
    assert (factor.a.mean()[0] - m.T @ m).norm() < 0.05 * (m.T @ m).norm()
    assert (factor.g.mean()[0] - m @ m.T).norm() < 0.05 * (m @ m.T).norm()
    diagonal = own._running.layers["2.weight"]
    assert isinstance(diagonal, DiagonalFactor)
    wanted = fixed["2.weight"].double().square()
    assert (diagonal.mean("2.weight") - wanted).norm() < 0.05 * wanted.norm()


def test_before_the_first_release_all_directions_are_alike():
    own = source()
    m = own.at(0).materialize(own._parameters)
    assert torch.allclose(m, m.diagonal().diag(), atol=1e-8)


def test_a_wide_layer_has_squares_alone(monkeypatch):
    monkeypatch.setattr(released, "LARGEST_SIDE", 16)
    kinds = [type(f) for f in source()._running.layers.values()]
    assert kinds == [DenseFactor, DiagonalFactor, DiagonalFactor]


def test_a_map_needs_the_releases_before_it():
    own = source(every=3)
    with pytest.raises(CheckpointError, match="step 4"):
        own.at(4)


def test_an_adaptive_threshold_is_read_before_it_moves():
    """``plain`` is the gradient's mean whatever the threshold was at that step."""
    private = attach(examples(), "dp-soap", clipping="adaptive", noise_multiplier=1e-3)
    seen = []
    observe = private._engine.whiteners.observe
    private._engine.whiteners.observe = lambda release, rule, size: (
        seen.append(rule.threshold), observe(release, rule, size)
    )  # fmt: skip
    train(private, 3)
    assert seen[0] == RECIPES["dp-soap"].clip_norm
    assert len(set(seen)) == 3


def test_what_probes_would_need_is_refused():
    with pytest.raises(ConfigurationError, match="probe_size"):
        RECIPES["dp-soap"].configure(probe_size=3)
    with pytest.raises(ConfigurationError, match="clamp"):
        RECIPES["dp-ngd"].configure(probe="releases")
    assert not RECIPES["dp-kfc"].configure(probe="releases").probes


def test_the_claim_holds_for_a_map_that_was_learnt():
    """Two neighbours with one past: an audit of the fifth step."""
    options = {"sample_rate": 1.0, "delta": DELTA, "noise_multiplier": 1.5,
               "clip_norm": 0.02, "allow_large_delta": True}  # fmt: skip
    data = odd_one_out()
    with_it = attach(data, "dp-soap", **options)
    first = with_it._engine.whiteners.at(0).frame
    train(with_it, 4)
    without = attach(without_last(data), "dp-soap", **options)
    without.load_state_dict(with_it.state_dict())
    sums = [next_sum(without), next_sum(with_it)]
    assert sums[0].frame == sums[1].frame != first
    one_step = with_it.plan.epsilon(1)
    found = audit_step(
        with_it._engine.noise.mechanism, sums, DELTA, unsafe_reproducible_noise=0
    )
    assert found.epsilon_lower <= one_step
    assert found.epsilon_estimated > 0.8 * one_step
