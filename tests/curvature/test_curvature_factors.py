"""Factors against sums by hand; a monoid; unchanged by batch size and reduction."""

from dataclasses import replace

import pytest
import torch
from nets import ALL, loss
from torch import nn

from curvedp.barrier import Provenance
from curvedp.curvature import (
    DenseFactor,
    Estimate,
    Factors,
    LookupFactor,
    Refresh,
    SecondMoment,
    estimate,
    factors_from_state,
    factors_state,
)
from curvedp.errors import ConfigurationError
from curvedp.layers import Batch, Recording, cover, synthesiser_like
from curvedp.probes import FeatureProbe, ModelLabels, OracleProbe, UniformLabels
from tests.whitening.maps import factors, recorded


def close(x, y, tolerance=1e-5):
    return (x - y).norm() <= tolerance * y.norm().clamp_min(1e-12)


def named(name):
    return next(net for net in ALL if str(net) == name)


# -- moments ---------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [3, 40])
def test_a_moment_is_the_mean_of_outer_products(rows):
    x = torch.randn(2, rows, 7, dtype=torch.float64)
    moment = SecondMoment.of(x, float(rows))
    expected = x.mT @ x / rows
    assert (moment.rows is None) == (rows > 7)
    assert close(moment.mean(), expected)
    assert close(moment.trace(), expected.diagonal(dim1=1, dim2=2).sum(1))
    spectrum = moment.spectrum()
    rebuilt = (spectrum.vectors * spectrum.values.unsqueeze(1)) @ spectrum.vectors.mT
    assert close(rebuilt, expected)
    assert torch.all(spectrum.values.diff(dim=-1) <= 1e-12)
    assert close(moment.spectrum(2).values, spectrum.values[:, :2])


@pytest.mark.parametrize("sizes", [(2, 3), (2, 30), (30, 2), (30, 30)])
def test_moments_add_up_in_any_form(sizes):
    parts = [torch.randn(1, n, 9, dtype=torch.float64) for n in sizes]
    one, other = (SecondMoment.of(x, float(x.shape[1])) for x in parts)
    whole = SecondMoment.of(torch.cat(parts, 1), float(sum(sizes)))
    assert close((one + other).mean(), whole.mean())
    assert (one + other).weight == whole.weight
    # a weighted mean, whatever the form
    mixed = one.scaled(0.25) + other.scaled(0.75)
    expected = (0.25 * one.total() + 0.75 * other.total()) / mixed.weight
    assert close(mixed.mean(), expected)
    assert close(one.scaled(0.3).mean(), one.mean())


# -- factors of layers -----------------------------------------------------------------


def by_hand(sharing):
    """Inputs and output gradients of a linear layer on ``[B, T, p]``, by hooks."""
    torch.manual_seed(3)
    layer, head = nn.Linear(4, 3), nn.Linear(3, 2)
    x, y = torch.randn(6, 5, 4), torch.randint(0, 2, (6,))
    hidden = layer(x)
    hidden.retain_grad()
    loss(head(torch.tanh(hidden).mean(1)), y).sum().backward()
    a = torch.cat([x, torch.ones(6, 5, 1)], -1)
    d = hidden.grad
    if sharing == "reduce":
        a, d = a.mean(1, keepdim=True), d.sum(1, keepdim=True)
    count = a.shape[0] * a.shape[1]
    inputs = torch.einsum("itp,itq->pq", a, a) / count
    outputs = torch.einsum("itr,its->rs", d, d) / 6

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = layer, head

        def forward(self, x):
            return self.head(torch.tanh(self.layer(x)).mean(1))

    return Net(), Batch(x, y), inputs, outputs


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_factors_of_a_shared_weight_are_those_of_its_positions(sharing):
    model, batch, inputs, outputs = by_hand(sharing)
    coverage = cover(model, synthesiser_like(batch, model), loss)
    recording = Recording(model, coverage.covered, 6, keep_inputs=True)
    loss(recording.forward((batch.inputs,), {}), batch.targets).sum().backward()
    found = factors(recording.layer_ios(), sharing).layers["layer.weight"]
    assert isinstance(found, DenseFactor)
    assert found.bias == "layer.bias"
    assert close(found.a.mean()[0], inputs)
    assert close(found.g.mean()[0], outputs)


def test_an_embedding_counts_its_tokens_and_no_padding():
    _, _, ios = recorded(named("tokens-padding"), 8, seed=2)
    found = [f for f in factors(ios).layers.values() if isinstance(f, LookupFactor)]
    assert found
    for factor in found:
        assert float(factor.counts.sum()) == factor.tokens
        assert 0 < factor.tokens <= 8 * factor.counts.numel() * 100


def test_every_parameter_but_tied_ones_has_a_factor():
    for net in ALL[::5]:
        model, coverage, ios = recorded(net, 4, seed=1)
        known = set(factors(ios).parameters)
        tied = {n for g in coverage.layers for n in g} - known
        shared = [i.site.parameters.values() for i in coverage.covered]
        several = {n for names in shared for n in names if _uses(n, shared) > 1}
        groups = [set(g) for g in coverage.layers]
        allowed = {n for g in groups if g & several for n in g}
        assert tied <= allowed, (str(net), tied - allowed)
        assert model is not None


def _uses(name, shared):
    return sum(name in names for names in shared)


def cross_entropy(output, targets):
    return nn.functional.cross_entropy(output, targets, reduction="none")


# -- estimates -------------------------------------------------------------------------


def net():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    template = Batch(torch.zeros(1, 6), torch.zeros(1, dtype=torch.int64))
    return model, cover(model, synthesiser_like(template, model), loss)


def run(how, reduction=None):
    model, coverage = net()
    own = loss if reduction is None else reduction
    return estimate(model, coverage.covered, how, own, torch.Generator().manual_seed(5))


def test_factors_do_not_change_with_the_size_of_a_probe_batch():
    """The same 512 rows in batches of any size: equal but for the order of sums."""
    rows = torch.randn(512, 6)

    class InOrder:
        provenance = Provenance.SYNTHETIC

        def __init__(self):
            self.start = 0

        def inputs(self, size, generator):
            self.start += size
            return rows[self.start - size : self.start]

        def describe(self):
            return {}

    class ByRow:
        def targets(self, output, generator):
            return output.detach().argmax(1)

        def describe(self):
            return {}

    results = [
        run(Estimate(InOrder(), ByRow(), size, 512 // size)) for size in (512, 64, 1)
    ]
    for other in results[1:]:
        for name, factor in results[0].layers.items():
            assert close(other.layers[name].a.mean(), factor.a.mean())
            assert close(other.layers[name].g.mean(), factor.g.mean())


def test_the_mean_loss_of_the_public_code_shrinks_g_by_the_square_of_the_size():
    probe = FeatureProbe(6)
    right = run(Estimate(probe, ModelLabels(), 32, 1))
    official = run(Estimate(probe, ModelLabels(), 32, 1, mean_loss=True))
    for name, factor in right.layers.items():
        assert close(official.layers[name].a.mean(), factor.a.mean())
        assert close(official.layers[name].g.mean() * 32**2, factor.g.mean())


def test_model_labels_give_the_fisher_matrix_of_the_logits():
    """``E d d^T = diag(p) - p p^T`` at the last layer, averaged over the probe."""
    model, coverage = net()
    how = Estimate(FeatureProbe(6), ModelLabels(), 2000, 5)
    found = estimate(
        model, coverage.covered, how, cross_entropy, torch.Generator().manual_seed(5)
    )
    x = torch.randn(10_000, 6)
    p = model(x).softmax(1).detach()
    fisher = torch.diag_embed(p).mean(0) - torch.einsum("ij,ik->jk", p, p) / len(p)
    assert close(found.layers["2.weight"].g.mean()[0], fisher, 0.03)


def test_an_estimate_leaves_model_and_randomness_alone():
    model, coverage = net()
    before = {n: p.clone() for n, p in model.named_parameters()}
    state = torch.get_rng_state()
    how = Estimate(FeatureProbe(6), UniformLabels(), 8, 2)
    first = estimate(
        model, coverage.covered, how, loss, torch.Generator().manual_seed(1)
    )
    again = estimate(
        model, coverage.covered, how, loss, torch.Generator().manual_seed(1)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
    for name, factor in first.layers.items():
        assert torch.equal(again.layers[name].a.mean(), factor.a.mean())


def test_provenance_is_the_weakest_of_all_that_went_in():
    oracle = OracleProbe(torch.randn(20, 6))
    private = run(Estimate(oracle, ModelLabels(), 8, 1))
    public = run(Estimate(FeatureProbe(6), ModelLabels(), 8, 1))
    assert private.provenance is Provenance.ORACLE
    assert (public + private).provenance is Provenance.ORACLE
    assert not (public + private.scaled(0.0)).provenance.is_public


def test_factors_survive_storage():
    _, _, ios = recorded(named("tokens-padding"), 6, seed=2)
    found = factors(ios)
    again = factors_from_state(factors_state(found))
    assert again.provenance is found.provenance
    total = found + again
    for name, factor in found.layers.items():
        assert type(again.layers[name]) is type(factor)
        if hasattr(factor, "g"):
            assert close(total.layers[name].g.mean(), factor.g.mean())


def test_factors_of_other_layers_are_not_added():
    public = run(Estimate(FeatureProbe(6), ModelLabels(), 8, 1))
    with pytest.raises(ConfigurationError, match="different models"):
        public + Factors({}, Provenance.SYNTHETIC)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [({"size": 0}, "at least one"), ({"sharing": "both"}, "sharing")],
)
def test_estimates_that_cannot_be_are_refused(settings, problem):
    with pytest.raises(ConfigurationError, match=problem):
        Estimate(FeatureProbe(6), ModelLabels(), **settings)


def test_a_reduced_loss_is_refused():
    with pytest.raises(ConfigurationError, match="one number for each"):
        run(
            Estimate(FeatureProbe(6), ModelLabels(), 8, 1),
            nn.functional.cross_entropy,
        )


# -- when ------------------------------------------------------------------------------


def test_refresh_is_in_declared_steps():
    every = Refresh(5)
    assert [s for s in range(12) if every.is_due(s)] == [0, 5, 10]
    assert [every.last_due(s) for s in (0, 4, 5, 11)] == [0, 0, 5, 10]
    frozen = Refresh(None)
    assert [s for s in range(12) if frozen.is_due(s)] == [0]
    assert frozen.last_due(1000) == 0
    for bad in ({"every": 0}, {"decay": 1.0}, {"decay": -0.1}):
        with pytest.raises(ConfigurationError):
            Refresh(**bad)


# -- batches joined to one -------------------------------------------------------------


def test_batches_are_joined_where_only_their_sum_counts_and_there_is_room():
    synthetic = Estimate(FeatureProbe(4), UniformLabels(), size=8, batches=4)
    joined = synthetic.joined(example_bytes=2**28 // 32)
    assert (joined.size, joined.batches) == (32, 1)
    assert synthetic.joined(example_bytes=2**28 // 32 + 1) is synthetic
    for other in (
        {"mean_loss": True},
        {"moments": "batch-squares"},
        {"moments": "subspace"},
        {"probe": OracleProbe([(torch.zeros(4), 0)] * 8)},
    ):
        how = replace(synthetic, **other)
        assert how.joined(1) is how


def test_joined_batches_give_the_same_factors_but_for_sampling():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    template = Batch(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))
    covered = cover(model, synthesiser_like(template, model), loss).covered
    how = Estimate(FeatureProbe(4), UniformLabels(), size=2000, batches=4)
    found = [
        estimate(model, covered, own, loss, torch.Generator().manual_seed(seed))
        for seed, own in enumerate((how, how.joined(1)))
    ]
    one, other = (part.layers["weight"] for part in found)
    assert one.a.weight == other.a.weight == 8000
    assert close(one.a.mean(), other.a.mean(), 0.1)
    assert close(one.g.mean(), other.g.mean(), 0.1)
