"""Rivals, each by its definition; their claims against an audit."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from curvedp.noise import GaussianMechanism
from curvedp.probes import draw
from curvedp.recipes import RECIPES
from curvedp.testing import per_example_gradients
from curvedp.testing.reference import clipped_sum as slow_clipped_sum

from .auditing import audit, first_sum
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
    pending = first_sum(private)
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
        sums.append(joined(first_sum(private).values))
        whitener = private._engine.whiteners.at(0)
        g = gradients(own, part)["weight"]
        scaled = [whitener.apply({"weight": one})["weight"].flatten() for one in g]
        pairs = [sum(scaled[i : i + 2]) / 2 for i in range(0, len(scaled), 2)]
        means.append(sum(v * min(1.0, bound / float(v.norm())) for v in pairs))
    assert 0.99 < float((sums[1] - sums[0]).norm()) / bound <= 1 + 1e-5
    assert float((means[1] - means[0]).norm()) / bound > 1.9


# -- what is claimed -------------------------------------------------------------------


@pytest.mark.parametrize("recipe", PRIVATE)
def test_an_audit_comes_close_to_the_claim_and_never_exceeds_it(recipe):
    private, sums = neighbours(recipe)
    claim = private.plan.epsilon()
    mechanism = private._engine._mechanism
    least, estimated = audit(mechanism, sums, DELTA)
    assert least <= claim
    assert estimated > 0.8 * claim
    weak = GaussianMechanism(mechanism.noise_multiplier / 2, mechanism.bound)
    caught, _ = audit(weak, sums, DELTA)
    assert caught > claim


def neighbours(recipe):
    """A run of one step in which everybody takes part, and both of its sums."""
    options = {
        "sample_rate": 1.0, "steps": 1, "delta": DELTA, "noise_multiplier": 1.5,
        "allow_large_delta": True, "clip_norm": 0.02,
    }  # fmt: skip
    data = odd_one_out()
    with_it = attach(data, recipe, **options)
    without = attach(without_last(data), recipe, **options)
    return with_it, [first_sum(without), first_sum(with_it)]


def test_disk_adds_the_noise_of_dp_sgd():
    """Not divided by ``sqrt(c^2 + (1 - c)^2)``: its one gradient has length C."""
    plain, ahead = (attach(examples(), r)._engine for r in ("dp-sgd", "disk"))
    assert ahead._mechanism == plain._mechanism
    assert ahead._event == plain._event
    assert RECIPES["disk"].clip_norm == plain._mechanism.bound
