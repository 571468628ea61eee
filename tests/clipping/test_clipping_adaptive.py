"""Adaptive clipping: the count is in the bound, centred, and finds its quantile."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from curvedp.accounting import PoissonGaussianEvent
from curvedp.clipping import AdaptiveClipping, clipped_sum, clipping_rule
from curvedp.clipping.adaptive import COUNT
from curvedp.errors import ConfigurationError
from curvedp.layers.io import DirectIO
from curvedp.whitening import IdentityWhitener

from ..faults.cases import attach, examples, linear, parameters, train

#: The bound holds up to the rounding of float32 coordinates.
SLACK = 1e-6


def summed(gradients, rule, present=None):
    """The clipped sum, count included, of gradients ``[B, n]``."""
    total = clipped_sum(
        [DirectIO("layer", {"w": gradients})],
        rule,
        IdentityWhitener(),
        parameters={"w": torch.zeros(gradients.shape[1])},
        present=torch.ones(len(gradients), dtype=torch.bool)
        if present is None
        else present,
        step=0,
    )
    return torch.cat([total.values["w"], total.values[COUNT].reshape(1)]).double()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    length=st.sampled_from([0.0, 1e-30, 1e-3, 0.5, 1.0, 7.0, 1e15, float("nan")]),
    threshold=st.sampled_from([1e-6, 0.5, 1.0, 100.0]),
    share=st.sampled_from([0.01, 0.05, 1.0]),
)
def test_gradient_and_count_together_stay_in_the_bound(length, threshold, share):
    rule = AdaptiveClipping.start(threshold, share=share)
    others = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    with_it = summed(torch.cat([others, torch.full((1, 3), length)]), rule)
    moved = (with_it - summed(others, rule)).norm()
    assert moved <= rule.bound * (1 + SLACK)
    if not math.isnan(length):  # and the count is not free
        assert moved >= 0.99 * share


def test_padding_and_broken_examples_are_not_counted():
    rule = AdaptiveClipping.start(1.0)
    gradients = torch.tensor([[0.1], [9.0], [float("inf")], [0.2]])
    present = torch.tensor([True, True, True, False])
    assert abs(summed(gradients, rule, present)[-1]) < 1e-9  # one below, one above


def test_the_threshold_finds_the_quantile():
    generator = torch.Generator().manual_seed(0)
    rule = AdaptiveClipping.start(100.0, quantile=0.7)
    for _ in range(200):
        norms = torch.rand(400, 1, generator=generator) * 10  # the 0.7 quantile is 7
        total = clipped_sum(
            [DirectIO("layer", {"w": norms})],
            rule,
            IdentityWhitener(),
            parameters={"w": torch.zeros(1)},
            present=torch.ones(400, dtype=torch.bool),
            step=0,
        )
        _, threshold = rule.read(total.values, 400)
        rule = rule.at(threshold)
    assert rule.threshold == pytest.approx(7.0, rel=0.05)


def test_a_release_reads_in_the_units_of_the_gradient():
    rule = AdaptiveClipping.start(4.0)
    values, _ = rule.read({"w": torch.tensor([0.5]), COUNT: torch.tensor(0.0)}, 10)
    assert values.keys() == {"w"}
    assert float(values["w"]) == 2.0


def test_one_event_with_the_plain_multiplier():
    private = attach(examples(), clipping="adaptive")
    assert private.plan.step_event() == PoissonGaussianEvent(1.0, 0.5)
    assert private.plan.mechanism().noise_std == pytest.approx(math.sqrt(1 + 0.05**2))
    assert "paid for in the same event" in str(private.statement())


def test_it_trains_resumes_and_moves_its_threshold(tmp_path):
    settings_ = {"clipping": "adaptive", "clip_norm": 50.0, "steps": 8}
    whole = attach(examples(), **settings_)
    expected = train(whole)
    assert whole._engine.threshold != 50.0

    first = attach(examples(), run_dir=tmp_path, **settings_)
    first.save()
    for x, y in first.loader:
        first.loss(first.model(x), y).backward()
        first.optimizer.step()
        if first.step == 5 and first._engine.between_steps:
            break
    first.close()
    model = linear()
    second = attach(examples(), model, run_dir=tmp_path, **settings_)
    second.resume()  # five steps from the journal
    assert second._engine.threshold == first._engine.threshold
    assert torch.equal(train(second), expected)
    assert torch.equal(parameters(model), expected)


def test_neighbours_differ_by_the_bound_at_most():
    x, y = examples(30).tensors
    sums = []
    for n in (30, 29):
        private = attach(
            TensorDataset(x[:n], y[:n]),
            rate=1.0,
            physical_batch_size=30,
            clipping="adaptive",
        )
        for inputs, targets in private.loader:
            private.loss(private.model(inputs), targets).backward()
            private._engine.accumulate()
            break
        values = private._engine._open.pending.values.values()
        sums.append(torch.cat([v.flatten() for v in values]))
    assert (sums[0] - sums[1]).norm() <= private.plan.clipping.bound * (1 + SLACK)


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ({"quantile": 1.0}, "quantile"),
        ({"rate": 0.0}, "rate"),
        ({"share": -1.0}, "share"),
    ],
)
def test_impossible_settings_are_named(settings_, words):
    with pytest.raises(ConfigurationError, match=words):
        AdaptiveClipping.start(1.0, **settings_)
    with pytest.raises(ConfigurationError, match="clip_norm"):
        clipping_rule("adaptive", 0.0)
    with pytest.raises(ConfigurationError, match="does not cover"):
        AdaptiveClipping(1.0, threshold=1.0)
