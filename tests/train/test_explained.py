"""``explain()``: what is printed is what a step does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from curvedp import make_private
from curvedp.errors import ConfigurationError, LoopError
from curvedp.layers.dense import DenseIO
from curvedp.layers.io import DirectIO
from curvedp.train import Trainer
from curvedp.whitening.costs import LEAST_RANK, affordable_rank

EXAMPLES = 12


def data():
    labels = torch.arange(EXAMPLES) % 3
    return TensorDataset(torch.randn(EXAMPLES, 2, 12, 12), labels)


def model():
    """Gradients written down, instantiated, from Gram matrices; an outer product."""
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.Tanh(),
        nn.Conv2d(8, 8, 3), nn.Tanh(), nn.Conv2d(8, 9, 3, padding=1), nn.Tanh(),
        nn.Conv2d(9, 40, 2), nn.Tanh(),
        nn.Flatten(), nn.Linear(160, 3),
    )  # fmt: skip


def attach(net, **settings):
    return make_private(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1),
        data(),
        loss="cross-entropy",
        noise_multiplier=1.0,
        sample_rate=1.0,
        steps=3,
        expected_batch_size=EXAMPLES,
        allow_large_delta=True,
        **settings,
    )


@pytest.mark.parametrize("recipe", ["dp-sgd", "dp-kfc"])
def test_each_layer_takes_the_way_that_is_printed(recipe, monkeypatch):
    # a value that is no number: every layer's values are then gone through
    private = attach(
        model(),
        recipe=recipe,
        prepare=lambda batch: (batch[0] * float("nan"), batch[1]),
    )
    plan = private.explain()
    ways = {row.name: row.norms for row in plan.rows}
    assert set(ways.values()) == {"written", "gram", "instantiate", "product"}
    seen = {}

    def spy(kind, way):
        whole = kind.keep

        def keep(self, mask):
            seen[self.name] = way(self)
            return whole(self, mask)

        monkeypatch.setattr(kind, "keep", keep)

    spy(DenseIO, lambda io: io.shape.norms)
    spy(DirectIO, lambda io: "written")
    x, y = next(iter(private.loader))
    private.loss(private.model(x), y).backward()
    private.optimizer.step()
    assert seen == ways


def named(private):
    return list(private._engine.model.named_parameters())


def test_it_changes_nothing():
    torch.manual_seed(0)
    first = attach(model(), seed=1)
    second = attach(copy.deepcopy(first._engine.model), seed=1)
    state = torch.random.get_rng_state()
    before = {n: p.clone() for n, p in named(first)}
    text = str(first.explain())
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(p, before[n]) for n, p in named(first))
    assert first.step == 0 and first.steps_left() == 3
    assert text == str(second.explain())
    assert text.splitlines()[0].split()[0] == "layer"
    assert "physical batch" in text.splitlines()[-1]


def test_costs_are_those_of_a_physical_batch():
    small, large = (attach(model(), physical_batch_size=n).explain() for n in (2, 8))
    for one, other in zip(small.rows, large.rows, strict=True):
        assert 4 * small.pass_flops(one) == large.pass_flops(other)
        assert 4 * small.norm_flops(one) == large.norm_flops(other)
        assert small.whitening_flops(one) == 0
    stored = large.to_json()
    assert stored["physical_batch_size"] == 8
    assert [layer["norms"] for layer in stored["layers"]] == [
        row.norms for row in large.rows
    ]


def test_views_are_positions_of_their_example():
    plain = attach(model()).explain()
    viewed = attach(model(), augment="flips", views=3).explain()
    first, other = (plan.rows[-1].shape for plan in (plain, viewed))
    assert (first.positions, other.positions) == (1, 3)


def test_half_a_step_is_refused():
    private = attach(model(), physical_batch_size=4)
    next(iter(private.loader))
    with pytest.raises(LoopError):
        private.explain()


def test_the_trainer_explains_without_training():
    net = model()
    before = copy.deepcopy(net.state_dict())
    settings = {"sample_rate": 0.5, "steps": 2, "expected_batch_size": 6}
    trainer = Trainer(
        net, "cross-entropy", "dp-kfc", noise_multiplier=1.0, delta=1e-5,
        physical_batch_size=6, **settings,
    )  # fmt: skip
    plan = trainer.explain(data())
    assert plan.physical_batch_size == 6
    assert any("rank" in row.inputs for row in plan.rows)
    assert all(torch.equal(v, before[n]) for n, v in net.state_dict().items())
    with pytest.raises(ConfigurationError):
        Trainer(net, "cross-entropy", "non-private", **settings).explain(data())


def test_a_head_of_few_outputs_keeps_fewer_eigenpairs():
    assert affordable_rank(None, 2) is None
    assert affordable_rank(32, 100) == 32
    assert affordable_rank(32, 10) == 20
    assert affordable_rank(32, 1) == LEAST_RANK
    assert affordable_rank(4, 1) == 4
    net = nn.Sequential(nn.Flatten(), nn.Linear(288, 30), nn.Tanh(), nn.Linear(30, 10))
    plan = attach(net, recipe="dp-kfc", physical_batch_size=EXAMPLES).explain()
    assert [row.inputs for row in plan.rows] == ["rank 32, before", "rank 20, before"]
