"""Clipping before, in or after the whitened space: bounds, updates, resume."""

import pytest
import torch

from curvedp.auditing.witness import next_sum
from curvedp.barrier import IDENTITY_FRAME
from curvedp.errors import ConfigurationError
from curvedp.recipes import RECIPES
from curvedp.testing.reference import clipped_sum as slow_clipped_sum

from .test_rivals import gradients, joined, odd_one_out, without_last
from .test_whitened_recipes import attach, examples, model, train

ORDERS = ("before", "in", "after")
MAPS = [("dp-kfc", {}), ("dp-kfc", {"side": "both", "rank": 0}), ("dp-ngd", {}),
        ("adadps", {"back_map": "natural"})]  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("recipe", "own"), MAPS, ids=str)
def test_neighbours_are_at_most_the_bound_apart_where_noise_is_added(
    recipe, own, order
):
    data = odd_one_out()
    sums = [
        next_sum(
            attach(d, recipe, sample_rate=1.0, clip_order=order, clip_norm=0.1, **own)
        )
        for d in (data, without_last(data))
    ]
    assert sums[0].frame == sums[1].frame
    assert (sums[0].frame == IDENTITY_FRAME) == (order == "before")
    moved = float((joined(sums[0].values) - joined(sums[1].values)).norm())
    assert 0.5 * 0.1 < moved <= 0.1 * (1 + 1e-5)


@pytest.mark.parametrize(("recipe", "own"), MAPS[:3], ids=str)
def test_without_clipping_and_noise_all_orders_are_the_natural_gradient(recipe, own):
    moves = {}
    for order in ORDERS:
        net = model()
        private = attach(
            examples(), recipe, net, clip_order=order, clip_norm=1e5, clipping="flat",
            noise_multiplier=1e-9, steps=1, **own,
            # so that the floor of a clamp is the same whatever the clip norm
            **({"clamp": "printed", "plain_step": 1e4} if recipe == "dp-ngd" else {}),
        )  # fmt: skip
        before = torch.cat([p.detach().flatten() for p in net.parameters()])
        moves[order] = train(private) - before
    assert moves["in"].norm() > 0
    for order in ("before", "after"):
        error = (moves[order] - moves["in"]).norm()
        assert error < 2e-3 * moves["in"].norm()


def test_each_order_clips_what_it_says():
    data, bound = examples(), 0.05
    for order in ORDERS:
        net = model()
        private = attach(data, "dp-kfc", net, sample_rate=1.0, clip_order=order,
                         clip_norm=bound, clipping="flat", side="both")  # fmt: skip
        found = next_sum(private)
        g = gradients(net, data)
        whitener = attach(data, "dp-kfc", model(), side="both")._engine.whiteners.at(0)
        mapped = [{n: v[i] for n, v in g.items()} for i in range(40)]
        if order != "before":
            mapped = [whitener.apply(one) for one in mapped]
        if order == "after":
            mapped = [whitener.adjoint(one) for one in mapped]
        rows = {n: torch.stack([one[n] for one in mapped]) for n in g}
        expected = joined(slow_clipped_sum(rows, "flat", bound))
        error = (joined(found.values) - expected).norm()
        assert error < 1e-3 * expected.norm()


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("stop", [1, 3, 4])
def test_a_resumed_run_ends_with_the_same_bits(order, stop, tmp_path):
    own = {"clip_order": order}
    whole = train(attach(examples(), "dp-kfc", **own))
    with attach(examples(), "dp-kfc", **own, run_dir=tmp_path / "run") as first:
        first.save()
        train(first, stop)
        if stop != 4:
            first.save()
    with attach(examples(), "dp-kfc", **own, run_dir=tmp_path / "run") as second:
        second.resume()
        assert torch.equal(train(second), whole)


def test_a_transform_is_told_the_noise_after_the_map():
    """Before the map the noise is white; AdamBC sees it reshaped."""
    recipe = RECIPES["dp-kfc+adambc"].configure(back_map="natural", clip_order="before")
    net = model()
    private = attach(examples(), "dp-kfc+adambc", net, back_map="natural",
                     clip_order="before")  # fmt: skip
    engine = private._engine
    seen = []
    chain = engine._chain
    update = type(chain).update

    def look(self, gradient, state):
        seen.append(gradient)
        return update(self, gradient, state)

    object.__setattr__(chain, "update", look.__get__(chain))
    train(private, 1)
    matrix = engine.whiteners.at(0).materialize(
        {n: p.detach() for n, p in engine.parameters.items()}
    )
    expected = matrix.double().square().sum(1) * (1.0 * recipe.clip_norm / 20) ** 2
    found = joined(seen[0].noise_variance)
    assert torch.allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("recipe", "settings", "match"),
    [
        ("dp-kfc", {"clip_order": "around"}, "clip_order"),
        ("dp-kfc", {"clip_order": "before", "back_map": "none"}, "natural"),
        ("dp-kfc", {"clip_order": "after", "exponent": 0.75}, "exponent"),
        ("gep", {"clip_order": "before"}, "clip_order"),
        ("dp-soap", {"clip_order": "after", "back_map": "natural"}, "clip_order"),
    ],
    ids=str,
)
def test_orders_that_make_no_sense_are_refused(recipe, settings, match):
    with pytest.raises(ConfigurationError, match=match):
        RECIPES[recipe].configure(**settings)
