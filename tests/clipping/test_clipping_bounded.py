"""One example moves the sum by at most C, whatever is in it; broken ones by nothing."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import ALL, TokenModel, loss
from passes import add_up, flat, record
from torch import nn
from torch.utils._pytree import tree_map

from curvedp.barrier import ClippedSum, Relation
from curvedp.clipping import (
    FlatClipping,
    NormalisedClipping,
    PerLayerClipping,
    clipped_sum,
    clipping_rule,
)
from curvedp.errors import ConfigurationError
from curvedp.layers import Batch, cover
from curvedp.layers.dense import DenseIO
from curvedp.layers.io import DirectIO, UnreachedIO
from curvedp.layers.linear import LinearGeometry
from curvedp.layers.lookup import LookupIO
from curvedp.testing import check_clipping_rule
from curvedp.whitening import IdentityWhitener

#: The bound holds up to the rounding of a float32 sum over the batch.
SLACK = 1e-6

#: Two sums over the same examples in another order: float32 round-off.
SAME = 1e-6

SIZE = 5
RULES = [FlatClipping, NormalisedClipping, PerLayerClipping]
#: A net for every kind of LayerIO, and for parameters outside layers.
REPRESENTATIVE = [
    net
    for net in ALL
    if str(net)
    in {
        "sequence-linear",
        "sequence-frozen-weight",
        "sequence-layer-norm",
        "sequence-bilinear",
        "sequence-added-td",
        "sequence-positions-t",
        "sequence-called-thrice",
        "image-conv-groups",
        "image-group-norm",
        "image-conv-standardised",
        "image-conv-strided",
        "tokens-padding",
        "two-towers",
        "vit-1td",
        "vector",
    }
]


def attached(net):
    model = net.make()
    return model, cover(model, net.synthesiser(), loss)


def masked_out(i):
    return torch.arange(SIZE) != i


def poisoned(batch, i, value):
    """Example i with a value of that kind in every floating-point tensor."""

    def poison(x):
        if not x.is_floating_point():
            return x
        x = x.clone()
        x[i].view(-1)[0] = value
        return x

    return Batch(*tree_map(poison, (batch.inputs, batch.targets)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("net", REPRESENTATIVE, ids=str)
def test_a_broken_example_contributes_nothing_and_disturbs_nobody(net, value):
    model, coverage = attached(net)
    batch = net.batch(SIZE, torch.Generator().manual_seed(1))
    whole = record(model, coverage, batch, SIZE, loss)
    broken = record(model, coverage, poisoned(batch, 2, value), SIZE, loss)
    for rule in RULES:
        without = add_up(model, whole, rule(1.0), masked_out(2))
        total = add_up(model, broken, rule(1.0))
        alone = add_up(model, broken, rule(1.0), ~masked_out(2))
        length = float(flat(alone.values).norm())
        # 1e30 may stay finite behind a norm or a tanh; then it is clipped as usual
        assert length == 0 or (value == 1e30 and length <= 1 + SLACK)
        difference = flat(total.values) - flat(alone.values) - flat(without.values)
        assert difference.norm() <= SAME * flat(without.values).norm()


def io_types():
    """Every LayerIO with example 1 broken, in each place where it can be broken."""

    def ones(*shape):
        return torch.ones(3, *shape)

    def broken(x, value):
        x = x.clone()
        x[1].view(-1)[-1] = value
        return x

    geometry = LinearGeometry(torch.Size((2, 4)))
    ids = torch.zeros(3, 6, dtype=torch.int64)
    cases = {}
    for value in (math.nan, math.inf, 1e30):
        for t in (1, 5):
            x, d = ones(t, 4), ones(t, 2)
            cases[f"dense-a-{t}-{value}"] = DenseIO(
                "l", "w", "b", [(broken(x, value), d)], geometry
            )
            cases[f"dense-d-{t}-{value}"] = DenseIO(
                "l", "w", "b", [(x, broken(d, value))], geometry
            )
            cases[f"dense-second-call-{t}-{value}"] = DenseIO(
                "l", "w", None, [(x, d), (broken(x, value), d)], geometry
            )
        cases[f"lookup-{value}"] = LookupIO(
            "l", "w", 3, None, [(ids, broken(ones(6, 2), value))]
        )
        cases[f"direct-{value}"] = DirectIO(
            "l", {"w": broken(ones(2, 4), value), "b": ones(2)}
        )
        cases[f"direct-scalar-{value}"] = DirectIO("l", {"b": broken(ones(), value)})
    return cases


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("name", "io"), io_types().items(), ids=str)
def test_every_layer_type_drops_a_broken_example_exactly(name, io, rule):
    shapes = {n: torch.zeros(g.shape[1:]) for n, g in io.per_example().items()}

    def total(present):
        return clipped_sum(
            [io],
            rule(1.0),
            IdentityWhitener(),
            parameters=shapes,
            present=torch.tensor(present),
            step=0,
        ).values

    for value in total([False, True, False]).values():
        assert not value.any(), "the broken example contributed"
    others, everybody = total([True, False, True]), total([True, True, True])
    for n, value in everybody.items():
        assert torch.equal(value, others[n]), "the broken example disturbed the others"
        assert value.any()


def test_a_pixel_that_no_patch_touches_is_not_looked_at():
    # stride 3, kernel 1: the pixel does not enter the forward pass either
    model = nn.Sequential(nn.Conv2d(1, 2, 1, stride=3), nn.Flatten(), nn.Linear(8, 2))

    def synthesise(size, generator):
        x = torch.rand(size, 1, 4, 4, generator=generator)
        return Batch(x, torch.ones(size))

    coverage = cover(model, synthesise, loss)
    batch = synthesise(SIZE, torch.Generator().manual_seed(0))
    clean = add_up(model, record(model, coverage, batch, SIZE, loss), FlatClipping(1.0))
    batch.inputs[2, 0, 1, 1] = math.nan
    total = add_up(model, record(model, coverage, batch, SIZE, loss), FlatClipping(1.0))
    assert torch.equal(flat(total.values), flat(clean.values))


@pytest.mark.parametrize("net", REPRESENTATIVE, ids=str)
def test_a_batch_of_padding_gives_exact_zeros_for_every_parameter(net):
    model, coverage = attached(net)
    batch = net.batch(SIZE, torch.Generator().manual_seed(1))
    empty = tree_map(torch.zeros_like, (batch.inputs, batch.targets))
    nobody = torch.zeros(SIZE, dtype=torch.bool)
    for padding in (Batch(*empty), batch):
        ios = record(model, coverage, padding, SIZE, loss)
        for rule in RULES:
            total = add_up(model, ios, rule(1.0), nobody)
            trainable = {n for n, p in model.named_parameters() if p.requires_grad}
            assert total.values.keys() == trainable
            assert all(not v.any() for v in total.values.values())
            assert all(bool(torch.isfinite(v).all()) for v in total.values.values())


def test_a_parameter_that_the_batch_did_not_reach_is_in_the_sum():
    reached = DirectIO("a", {"a.w": torch.ones(3, 2)})
    unreached = UnreachedIO("b", 3, torch.device("cpu"))
    parameters = {"a.w": torch.zeros(2), "b.w": torch.zeros(4)}
    for rule in RULES:
        total = clipped_sum(
            [reached, unreached],
            rule(1.0),
            IdentityWhitener(),
            parameters=parameters,
            present=torch.ones(3, dtype=torch.bool),
            step=0,
        )
        assert total.values.keys() == parameters.keys()
        assert not total.values["b.w"].any()
    # the number of layers is the model's, not the batch's: C / sqrt(2) each
    per_layer = float(total.values["a.w"].norm()) / 3
    assert per_layer == pytest.approx(1 / math.sqrt(2), rel=1e-4)


def test_a_table_row_that_nobody_used_gets_nothing_and_is_in_the_sum():
    model = TokenModel(padding=2)
    net = next(n for n in ALL if str(n) == "tokens-padding")
    coverage = cover(model, net.synthesiser(), loss)
    batch = net.batch(SIZE, torch.Generator().manual_seed(1))
    batch.inputs["ids"].clamp_(max=4)
    ios = record(model, coverage, batch, SIZE, loss)
    table = add_up(model, ios, FlatClipping(1.0)).values["table.weight"]
    assert not table[5:].any()
    assert not table[2].any()
    assert table[:2].any()


def test_the_scale_of_a_mean_loss_is_undone_exactly():
    net = next(n for n in ALL if str(n) == "sequence-linear")
    model, coverage = attached(net)
    batch = net.batch(SIZE, torch.Generator().manual_seed(1))
    summed = record(model, coverage, batch, SIZE, loss)
    averaged = record(model, coverage, batch, SIZE, lambda o, y: loss(o, y) / SIZE)
    for rule in RULES:
        x = flat(add_up(model, summed, rule(1.0)).values)
        y = flat(add_up(model, averaged, rule(1.0), scale=SIZE).values)
        assert (x - y).norm() <= 1e-5 * x.norm()


# -- neighbours ------------------------------------------------------------------------

ATTACHED = {str(net): (net, *attached(net)) for net in REPRESENTATIVE}


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(sorted(ATTACHED)),
    rule=st.sampled_from(RULES),
    bound=st.sampled_from([1e-2, 1.0, 30.0]),
    scale=st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e3, 1e8, 1e18, 1e30, math.nan]),
    target=st.sampled_from([0.0, 1e-20, 1.0, -1e3, 1e10, 1e19, 1e30, math.inf]),
    i=st.integers(0, SIZE - 1),
    seed=st.integers(0, 999),
)
def test_removing_one_example_moves_the_sum_by_at_most_the_bound(
    name, rule, bound, scale, target, i, seed
):
    net, model, coverage = ATTACHED[name]
    batch = net.batch(SIZE, torch.Generator().manual_seed(seed))

    def extreme(x):
        if x.is_floating_point():
            x = x.clone()
            x[i] *= scale
        return x

    inputs = tree_map(extreme, batch.inputs)
    batch.targets[i] = target
    ios = record(model, coverage, Batch(inputs, batch.targets), SIZE, loss)
    everybody = add_up(model, ios, rule(bound))
    without = add_up(model, ios, rule(bound), masked_out(i))
    moved = float((flat(everybody.values) - flat(without.values)).norm())
    # the sum of the others rounds too, relative to its own length
    rounding = SLACK * float(flat(without.values).norm())
    assert moved <= bound * (1 + SLACK) + rounding


# -- the value type and the rules ------------------------------------------------------


def test_the_bound_of_a_sum_is_its_sensitivity():
    total = ClippedSum({"w": torch.ones(2)}, 1.5, "identity", 3)
    assert total.sensitivity(Relation.ADD_REMOVE) == 1.5
    assert total.sensitivity(Relation.ZERO_OUT) == 1.5
    assert total.sensitivity(Relation.REPLACE_ONE) == 3.0
    assert "1." not in repr(total).replace("1.5", ""), "a repr never shows values"


def test_merging_adds_and_keeps_the_bound():
    a = ClippedSum({"w": torch.ones(2)}, 1.0, "identity", 3)
    merged = a.merge(ClippedSum({"w": torch.full((2,), 2.0)}, 1.0, "identity", 3))
    assert torch.equal(merged.values["w"], torch.full((2,), 3.0))
    assert (merged.bound, merged.frame, merged.step) == (1.0, "identity", 3)
    assert torch.equal(a.values["w"], torch.ones(2))


@pytest.mark.parametrize(
    "other",
    [
        ClippedSum({"w": torch.ones(2)}, 2.0, "identity", 3),
        ClippedSum({"w": torch.ones(2)}, 1.0, "other", 3),
        ClippedSum({"w": torch.ones(2)}, 1.0, "identity", 4),
        ClippedSum({"v": torch.ones(2)}, 1.0, "identity", 3),
    ],
)
def test_parts_of_different_sums_do_not_merge(other):
    with pytest.raises(ConfigurationError):
        ClippedSum({"w": torch.ones(2)}, 1.0, "identity", 3).merge(other)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bound", [1e-3, 1.0, 1e4])
def test_the_rules_conform(rule, bound):
    check_clipping_rule(rule(bound))


def test_a_rule_that_breaks_its_bound_does_not_conform():
    class Generous(FlatClipping):
        def weights(self, sq_norms):
            return super().weights(sq_norms) * (1 + 1e-5)

    with pytest.raises(AssertionError, match="bound is"):
        check_clipping_rule(Generous(1.0))


def test_short_gradients_pass_flat_clipping_unchanged():
    sq_norms = torch.tensor([[0.0, 0.25, 0.99, 4.0]])
    weights = FlatClipping(1.0).weights(sq_norms)
    assert weights[0, :3].tolist() == [1.0, 1.0, 1.0]
    assert weights[0, 3] == pytest.approx(0.5, rel=1e-5)


def test_short_gradients_pass_per_layer_clipping_unchanged():
    sq_norms = torch.tensor([[0.0, 0.01, 0.4, 4.0], [0.0, 9.0, 0.1, 0.2]])
    weights = PerLayerClipping(1.0).weights(sq_norms)
    assert weights[0, :3].tolist() == [1.0, 1.0, 1.0]
    assert weights[1, 2:].tolist() == [1.0, 1.0]
    assert weights[1, 1] == pytest.approx(math.sqrt(0.5) / 3, rel=1e-5)


@pytest.mark.parametrize("slots", [2, 3])
def test_rows_of_one_unit_are_clipped_as_one(slots):
    io = DirectIO("a", {"a.w": torch.full((2 * slots, 1), 5.0)})
    total = clipped_sum(
        [io],
        FlatClipping(1.0),
        IdentityWhitener(),
        parameters={"a.w": torch.zeros(1)},
        present=torch.arange(2 * slots) < slots,  # one unit, and padding
        step=0,
        slots=slots,
    )
    assert float(total.values["a.w"]) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("name", ["flat", "normalised", "per-layer"])
def test_rules_by_name(name):
    rule = clipping_rule(name, 2.0)
    assert (rule.name, rule.bound) == (name, 2.0)
    assert rule.to_json()["clip_norm"] == 2.0


@pytest.mark.parametrize("bound", [0.0, -1.0, 1e-20, math.nan, math.inf])
@pytest.mark.parametrize("rule", RULES)
def test_impossible_bounds_are_refused(rule, bound):
    with pytest.raises(ConfigurationError, match="clip_norm"):
        rule(bound)


def test_impossible_settings_are_refused():
    with pytest.raises(ConfigurationError, match="gamma"):
        NormalisedClipping(1.0, gamma=0.0)
    with pytest.raises(ConfigurationError, match="flat, normalised, per-layer"):
        clipping_rule("flatt", 1.0)
