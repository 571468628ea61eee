"""Signal to noise by hand, and how round gradients are before and after whitening."""

import math

import pytest
import torch

from curvedp.clipping import FlatClipping, NormalisedClipping
from curvedp.diagnostics.geometry import isotropy, layer_isotropy, signal_to_noise
from curvedp.errors import ConfigurationError
from curvedp.recipes import Curvature
from curvedp.whitening import IdentityWhitener, KroneckerWhitening
from tests.diagnostics.geometry.nets import SMALL, digits, sources, study

NOISE = {"noise_multiplier": 2.0, "expected_batch_size": 32}


def test_by_hand_with_autograd_one_example_at_a_time():
    of = study()
    source = sources(of, Curvature(probe_size=20, probe_batches=1))["oracle"]
    rule = FlatClipping(0.7)
    (rows,) = signal_to_noise(
        of, source, {"identity": IdentityWhitener()}, rule, **NOISE
    ).values()
    chosen = torch.randperm(300, generator=torch.Generator().manual_seed(0))[:20]
    x, y = digits()[chosen]
    parameters = dict(of.model.named_parameters())
    total = {n: torch.zeros_like(p) for n, p in parameters.items()}
    for i in range(20):
        loss = of.loss(of.model(x[i : i + 1]), y[i : i + 1]).sum()
        grads = torch.autograd.grad(loss, list(parameters.values()))
        norm = torch.cat([g.flatten() for g in grads]).norm()
        for name, g in zip(parameters, grads, strict=True):
            total[name] += g * min(1, 0.7 / float(norm))
    assert [row.layer for row in rows] == [
        "0.weight",
        "2.weight",
        "4.weight",
        "6.weight",
    ]
    for row, layer in zip(rows, ("0", "2", "4", "6"), strict=True):
        parts = [total[f"{layer}.weight"].flatten(), total[f"{layer}.bias"].flatten()]
        whole = torch.cat(parts) / 20
        assert row.signal == pytest.approx(float(whole.norm()), rel=1e-4)
        assert row.parameters == len(whole)
        assert row.noise == pytest.approx(2 * 0.7 * math.sqrt(len(whole)) / 32)
        assert row.to_json()["signal_to_noise"] == pytest.approx(row.signal / row.noise)


def test_batches_are_averaged():
    of = study()
    two = sources(of)["synthetic"]
    rows = signal_to_noise(
        of, two, {"identity": IdentityWhitener()}, NormalisedClipping(1.0), **NOISE
    )["identity"]
    # no mean of gradients of length at most 1 is longer than 1
    assert 0 < math.hypot(*(row.signal for row in rows)) <= 1


def test_isotropy_of_a_sphere_a_line_and_an_ellipsoid():
    draw = torch.Generator().manual_seed(0)
    ball = torch.randn(3000, 20, generator=draw)
    found = isotropy(ball)
    assert found.mean_square == pytest.approx(1, rel=0.05)
    assert found.ratio == pytest.approx(1, rel=0.05)
    line = torch.randn(500, 1, generator=draw) * torch.ones(20)
    assert isotropy(line).effective_dimension == pytest.approx(1, rel=0.3)
    spectrum = torch.tensor([9.0] + [1.0] * 19)
    stretched = isotropy(ball * spectrum.sqrt())
    exact = float(spectrum.sum() ** 2 / spectrum.square().sum())
    assert stretched.effective_dimension == pytest.approx(exact, rel=0.1)
    with pytest.raises(ConfigurationError, match="two vectors"):
        isotropy(torch.ones(1, 3))


def test_isotropy_is_unbiased_with_fewer_vectors_than_dimensions():
    draw = torch.Generator().manual_seed(1)
    found = [isotropy(torch.randn(30, 400, generator=draw)).ratio for _ in range(20)]
    assert sum(found) / 20 == pytest.approx(1, rel=0.05)


def test_exact_whitening_makes_gradients_isotropic():
    """Proposition B.1: F^-1/2 of the very gradients gives the identity."""
    draw = torch.Generator().manual_seed(2)
    mix = torch.randn(6, 6, generator=draw, dtype=torch.float64)
    g = torch.randn(4000, 6, generator=draw, dtype=torch.float64) @ mix
    values, vectors = torch.linalg.eigh(g.mT @ g / len(g))
    whitened = g @ (vectors * values**-0.5) @ vectors.mT
    found = isotropy(whitened)
    assert found.mean_square == pytest.approx(1, abs=1e-9)
    assert found.ratio == pytest.approx(1, rel=0.01)
    assert isotropy(g).ratio < 0.8


def test_whitening_rounds_the_gradients_of_every_dense_layer():
    of = study()
    found = sources(of, SMALL)
    whitening = KroneckerWhitening(side="both", rank=None)
    maps = {
        "identity": IdentityWhitener(),
        "oracle": whitening.build(of.factors(found["oracle"]), of.parameters),
    }
    rounded = layer_isotropy(of, found["oracle"], maps)
    for layer in ("0.weight", "4.weight", "6.weight"):
        assert rounded["oracle"][layer].ratio > 1.3 * rounded["identity"][layer].ratio
