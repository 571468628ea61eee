"""Rivals, each by its definition; their claims against an audit."""

import math
from dataclasses import replace

import pytest
import torch
from dp_accounting import ComposedDpEvent, GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from torch import nn
from torch.utils.data import TensorDataset

from curvedp.accounting import PoissonGaussianEvent, get_accountant, repeated
from curvedp.auditing import audit_step
from curvedp.auditing.witness import next_sum
from curvedp.barrier import Relation
from curvedp.clipping import FlatClipping, clipped_sum
from curvedp.errors import ConfigurationError
from curvedp.layers.io import DirectIO
from curvedp.noise import GaussianMechanism
from curvedp.plan import Plan, SamplingPlan
from curvedp.probes import draw
from curvedp.recipes import RECIPES
from curvedp.testing import per_example_gradients
from curvedp.testing.reference import clipped_sum as slow_clipped_sum
from curvedp.testing.reference import embedded_sums

from .test_whitened_recipes import PRIVATE, attach, examples, model

DELTA = 1e-3


def cross_entropy(output, targets):
    return torch.nn.functional.cross_entropy(output, targets, reduction="none")


def gradients(own, dataset):
    """By parameter name, ``[B, *shape]``, float64."""
    return per_example_gradients(own, cross_entropy, *dataset.tensors)


def joined(values):
    return torch.cat([v.double().flatten() for v in values.values()])


def odd_one_out(n=40):
    """Examples, the last of them enormous."""
    x, y = (t.clone() for t in examples(n).tensors)
    x[-1] *= 50
    return TensorDataset(x, y)


def without_last(dataset):
    return TensorDataset(*(t[:-1] for t in dataset.tensors))


# -- AdaDPS ----------------------------------------------------------------------------


@pytest.mark.parametrize("moments", ["batch-squares", "example-squares"])
def test_adadps_is_its_formula(moments):
    """``sum_i clip_C(g_i / sqrt(h + 1e-10))`` with h from the very probes it drew."""
    data, own = examples(), model()
    private = attach(data, "adadps", own, sample_rate=1.0, moments=moments)
    pending = next_sum(private)
    source = private._engine.whiteners
    generator = source._generator(0)
    batches = []
    for _ in range(2):
        drawn = draw(source._how.probe, source._how.labels, 16, generator)
        torch.randint(2**31, (1,), generator=generator)  # as the pass does, for dropout
        with torch.no_grad():
            targets = drawn.targets(own(drawn.inputs))
        batches.append(gradients(own, TensorDataset(drawn.inputs, targets)))
    g = gradients(own, data)
    scaled = {}
    for name in g:
        probes = [b[name] for b in batches]
        if moments == "batch-squares":
            h = sum(p.mean(0).square() for p in probes) / 2
        else:
            h = torch.cat(probes).square().mean(0)
        scaled[name] = g[name] / (h + 1e-10).sqrt()
    expected = joined(slow_clipped_sum(scaled, "flat", 1.0))
    found = joined(pending.values)
    assert (found - expected).norm() < 1e-3 * expected.norm()


def test_adadps_clips_examples_and_not_means_of_microbatches():
    """One example moves the sum by at most C; it turns a clipped mean of two around."""
    torch.manual_seed(0)
    own = nn.Linear(5, 2, bias=False)
    x = torch.randn(6, 5).repeat_interleave(2, 0)
    x[-1] *= 10
    data = TensorDataset(x, torch.tensor([0, 1]).repeat(6))  # opposite gradients
    bound = 1e-3
    sums, means = [], []
    for part in (data, without_last(data)):
        private = attach(part, "adadps", own, sample_rate=1.0, clip_norm=bound)
        sums.append(joined(next_sum(private).values))
        whitener = private._engine.whiteners.at(0)
        g = gradients(own, part)["weight"]
        scaled = [whitener.apply({"weight": one})["weight"].flatten() for one in g]
        pairs = [sum(scaled[i : i + 2]) / 2 for i in range(0, len(scaled), 2)]
        means.append(sum(v * min(1.0, bound / float(v.norm())) for v in pairs))
    assert 0.99 < float((sums[1] - sums[0]).norm()) / bound <= 1 + 1e-5
    assert float((means[1] - means[0]).norm()) / bound > 1.9


# -- GEP -------------------------------------------------------------------------------


def bases_of(whitener):
    return [(own.names, own.basis) for own in whitener.maps]


@pytest.mark.parametrize("share", [0.5, 0.2, 0.0])
def test_gep_is_its_definition(share):
    """Embedding to C, residual to C1 from the unclipped embedding, and back again."""
    data, own = odd_one_out(), model()
    clips = {"clip_norm": 0.5, "residual_clip": 0.3}
    private = attach(data, "gep", own, sample_rate=1.0, residual_share=share, basis=7,
                     **clips)  # fmt: skip
    pending = next_sum(private)
    whitener = private._engine.whiteners.at(0)
    inside, outside = embedded_sums(
        gradients(own, data), bases_of(whitener), 0.5, 0.5 * 0.3
    )
    found = whitener.inverse({n: v.double() for n, v in pending.values.items()})
    for name, value in found.items():
        expected = inside[name] + (outside[name] if share else 0.0)
        assert torch.allclose(value, expected, rtol=3e-4, atol=1e-4)
    assert joined(outside).norm() > 0.1  # or the residual was not tried


def test_gep_noise_is_that_of_two_mechanisms_with_one_combined_multiplier():
    """After the way back: ``s C / a`` in the span, ``s C1 / b`` in the rest."""
    share, ratio, s, c = 0.3, 0.4, 1.5, 0.5
    private = attach(examples(), "gep", sample_rate=1.0, residual_share=share, basis=7,
                     clip_norm=c, residual_clip=ratio, noise_multiplier=s)  # fmt: skip
    engine = private._engine
    assert engine.noise.event(0) == PoissonGaussianEvent(s, 1.0)
    s0, s1 = s / math.sqrt(1 - share), s / math.sqrt(share)
    assert math.isclose((s0**-2 + s1**-2) ** -0.5, s)
    whitener = engine.whiteners.at(0)
    parameters = {n: p.detach() for n, p in engine.model.named_parameters()}
    back = torch.linalg.inv(whitener.materialize(parameters).double())
    values = torch.linalg.eigvalsh((s * c) ** 2 * back @ back.T)
    columns = sum(basis.shape[1] for _, basis in bases_of(whitener))
    expected = [(s0 * c) ** 2] * columns
    expected += [(s1 * ratio * c) ** 2] * (len(values) - columns)
    assert torch.allclose(values, torch.tensor(sorted(expected)).double(), rtol=1e-4)


@pytest.mark.parametrize("share", [0.5, 0.1])
def test_two_gaussian_releases_of_one_draw_cost_what_the_one_event_costs(share):
    s, steps = 2.0, 10
    s0, s1 = s / math.sqrt(1 - share), s / math.sqrt(share)
    both = ComposedDpEvent([GaussianDpEvent(s0), GaussianDpEvent(s1)])
    by_pld = PLDAccountant().compose(both, steps).get_epsilon(1e-5)
    plan = Plan.make(
        SamplingPlan.by_rate(1.0, steps, 100), FlatClipping(1.0), delta=1e-5,
        noise_multiplier=s,
    )  # fmt: skip
    assert plan.epsilon() == pytest.approx(by_pld, rel=2e-3)
    # from a Poisson sample, where only RDP composes inside of the sampling
    sampled = PoissonSampledDpEvent(0.05, both)
    by_rdp = RdpAccountant().compose(sampled, steps).get_epsilon(1e-5)
    event = repeated(PoissonGaussianEvent(s, 0.05), steps)
    ours = get_accountant("rdp").epsilon(event, Relation.ADD_REMOVE, 1e-5)
    assert ours == pytest.approx(by_rdp, rel=1e-2)
    # two draws, one for each part, would be another and a cheaper mechanism
    apart = ComposedDpEvent(
        [PoissonSampledDpEvent(0.05, GaussianDpEvent(x)) for x in (s0, s1)]
    )
    event = repeated(PoissonGaussianEvent(s, 0.05), steps)
    together = get_accountant("pld").epsilon(event, Relation.ADD_REMOVE, 1e-5)
    assert PLDAccountant().compose(apart, steps).get_epsilon(1e-5) < together


def crafted(whitener):
    """Gradients that are hard to bound, flat, of a net of one layer."""
    (own,) = whitener.maps
    q = own.basis
    generator = torch.Generator().manual_seed(0)
    other = torch.randn(q.shape[0], generator=generator, dtype=torch.float64)
    rest = other - q @ (q.T @ other)
    return {
        "inside": 1e8 * q[:, 0],
        "outside": 1e8 * rest,
        "both": 1e8 * (q[:, 0] + rest),
        "almost inside": 1e8 * q.sum(1) + 1e-3 * rest,
        "almost outside": 1e8 * rest + 1e-3 * q[:, 1],
        "small": 1e-12 * other,
        "huge": 1e15 * other,
        "not finite": float("inf") * q[:, 0],
    }


@pytest.mark.parametrize("clipping", ["flat", "normalised", "per-layer"])
@pytest.mark.parametrize("share", [0.5, 0.01, 0.0])
def test_no_example_exceeds_the_bound_of_gep(share, clipping):
    private = attach(
        TensorDataset(torch.randn(40, 9), torch.randint(0, 3, (40,))), "gep",
        nn.Linear(9, 3), residual_share=share, basis=4, clipping=clipping,
    )  # fmt: skip
    whitener = private._engine.whiteners.at(0)
    parameters = {n: p.detach() for n, p in private._engine.parameters.items()}
    rule = private.plan.clipping
    (own,) = whitener.maps
    for kind, flat in crafted(whitener).items():
        pieces = torch.split(flat.float(), [parameters[n].numel() for n in own.names])
        grads = {
            n: piece.reshape(1, *parameters[n].shape)
            for n, piece in zip(own.names, pieces, strict=True)
        }
        total = clipped_sum(
            [DirectIO("", grads)], rule, whitener, parameters=parameters,
            present=torch.tensor([True]), step=0,
        )  # fmt: skip
        length = float(joined(total.values).norm())
        assert length <= rule.bound * (1 + 1e-6)
        if kind == "both" and share:
            assert length > 0.99 * rule.bound
        assert (length == 0) == (kind == "not finite")


def test_parts_that_have_more_than_the_bound_are_refused():
    private = attach(examples(), "gep", basis=4)
    whitener = private._engine.whiteners.at(0)
    whitener._parts = tuple(replace(p, share=0.8) for p in whitener.parts)
    with pytest.raises(ConfigurationError, match="more than the whole"):
        next_sum(private)


def test_gep_needs_a_rule_that_clips_parts():
    with pytest.raises(ConfigurationError, match="one threshold"):
        RECIPES["gep"].configure(clipping="adaptive")
    with pytest.raises(ConfigurationError, match="back_map"):
        RECIPES["gep"].configure(back_map="none")
    with pytest.raises(ConfigurationError, match="basis"):
        RECIPES["dp-kfc"].configure(basis=3)
    assert RECIPES["gep"].configure(mode="biased").facts()["residual_share"] == 0


# -- what is claimed -------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe", [name for name in PRIVATE if RECIPES[name].correlation is None]
)
def test_an_audit_comes_close_to_the_claim_and_never_exceeds_it(recipe):
    private, sums = neighbours(recipe)
    claim = private.plan.epsilon()
    mechanism = private._engine.noise.mechanism
    found = audit_step(mechanism, sums, DELTA, unsafe_reproducible_noise=0)
    assert found.epsilon_lower <= claim
    assert found.epsilon_estimated > 0.8 * claim
    weak = GaussianMechanism(mechanism.noise_multiplier / 2, mechanism.bound)
    caught = audit_step(weak, sums, DELTA, unsafe_reproducible_noise=0)
    assert caught.epsilon_lower > claim


def neighbours(recipe):
    """A run of one step in which everybody takes part, and both of its sums."""
    options = {
        "sample_rate": 1.0, "steps": 1, "delta": DELTA, "noise_multiplier": 1.5,
        "allow_large_delta": True, "clip_norm": 0.02,
    }  # fmt: skip
    data = odd_one_out()
    with_it = attach(data, recipe, **options)
    without = attach(without_last(data), recipe, **options)
    return with_it, [next_sum(without), next_sum(with_it)]


def test_disk_adds_the_noise_of_dp_sgd():
    """Not divided by ``sqrt(c^2 + (1 - c)^2)``: its one gradient has length C."""
    plain, ahead = (attach(examples(), r)._engine for r in ("dp-sgd", "disk"))
    assert ahead.noise.mechanism == plain.noise.mechanism
    assert ahead.noise.event(0) == plain.noise.event(0)
    assert RECIPES["disk"].clip_norm == plain.noise.mechanism.bound
