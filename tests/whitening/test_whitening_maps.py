"""Every whitening against the dense reference: its matrix on written-down gradients."""

import pytest
import torch
import torch.nn.functional as F
from nets import ALL, composed, loss
from torch import nn

from curvedp.clipping import FlatClipping, NormalisedClipping, PerLayerClipping
from curvedp.clipping.bounded import clipped_sum
from curvedp.errors import ConfigurationError, CoverageError
from curvedp.layers import Batch, Recording, cover
from curvedp.testing import check_whitener, per_example_gradients
from curvedp.whitening import (
    Damping,
    IdentityMap,
    KroneckerWhitening,
    LayerwiseWhitener,
    diagonal_whitening,
)

from .maps import WHITENINGS, build, factors, layer_ios, recorded, trainable

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using padding='same' with even kernel:UserWarning"
)

SIZE = 5

#: Small enough to write the whole map down.
NETS = [n for n in composed() if sum(p.numel() for p in n.make().parameters()) < 1500]


def named(name):
    return next(net for net in ALL if str(net) == name)


def test_there_are_enough_nets():
    assert len(NETS) >= 20


@pytest.mark.parametrize("whitening", WHITENINGS)
@pytest.mark.parametrize("net", NETS[:: max(1, len(NETS) // 20)][:20], ids=str)
def test_norms_and_clipped_sums_are_those_of_the_dense_map(net, whitening):
    model, coverage, probe = recorded(net, 12, seed=1)
    parameters = trainable(model)
    whitener = build(whitening, factors(probe), parameters)
    matrix = whitener.materialize(parameters).double()
    batch = net.batch(SIZE, torch.Generator().manual_seed(9))
    for keep_inputs in (True, False):
        ios = layer_ios(model, coverage, batch, SIZE, keep_inputs)
        rows = torch.stack(
            [flat_of(ios, parameters, i) for i in range(SIZE)]
        )  # [B, all]
        mapped = rows @ matrix.T
        norms = torch.stack([whitener.sq_norms(io) for io in ios]).sum(0)
        true = mapped.square().sum(1)
        assert torch.allclose(norms, true, rtol=1e-4)
        assert torch.all(norms >= true * (1 - 1e-6))
        bound = float(true.sqrt().median())
        for rule in (FlatClipping(bound), NormalisedClipping(bound)):
            weights = rule.weights(norms.unsqueeze(0))[0].double()
            expected = weights @ mapped
            total = clipped_sum(
                ios,
                rule,
                whitener,
                parameters=parameters,
                present=torch.ones(SIZE, dtype=torch.bool),
                step=0,
            )
            error = (flat(total.values).double() - expected).norm()
            assert error <= 1e-4 * expected.norm()
            assert total.frame == whitener.frame


def flat(values):
    return torch.cat([v.flatten() for v in values.values()])


def flat_of(ios, parameters, i):
    one = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in parameters.items()}
    for io in ios:
        one |= {n: g[i].double() for n, g in io.per_example().items()}
    return torch.cat([v.flatten() for v in one.values()])


@pytest.mark.parametrize("whitening", WHITENINGS)
@pytest.mark.parametrize(
    "name", ["sequence-linear", "image-conv-groups", "tokens-padding", "sequence-lstm"]
)
def test_every_whitening_conforms(name, whitening):
    model, _, probe = recorded(named(name), 12, seed=1)
    parameters = trainable(model)
    whitener = build(whitening, factors(probe), parameters)
    check_whitener(whitener, parameters, probe)


@pytest.mark.parametrize("whitening", WHITENINGS)
def test_nobody_contributes_more_than_the_bound(whitening):
    net = named("image-conv-groups")
    model, coverage, probe = recorded(net, 12, seed=1)
    parameters = trainable(model)
    whitener = build(whitening, factors(probe), parameters)
    batch = net.batch(SIZE, torch.Generator().manual_seed(4))
    for keep_inputs in (True, False):
        ios = layer_ios(model, coverage, batch, SIZE, keep_inputs)
        for rule in (
            FlatClipping(0.01),
            NormalisedClipping(0.5),
            PerLayerClipping(0.1),
        ):
            for i in range(SIZE):
                total = clipped_sum(
                    ios,
                    rule,
                    whitener,
                    parameters=parameters,
                    present=torch.arange(SIZE) == i,
                    step=0,
                )
                length = float(flat(total.values).double().norm())
                assert length <= rule.bound * (1 + 1e-6)


def test_equal_maps_have_equal_frames_and_others_do_not():
    model, _, probe = recorded(named("sequence-linear"), 12, seed=1)
    parameters = trainable(model)
    frames = [build(name, factors(probe), parameters).frame for name in WHITENINGS]
    again = [build(name, factors(probe), parameters).frame for name in WHITENINGS]
    assert frames == again
    assert len(set(frames)) == len(frames) - 1  # channel-spatial is "both" here
    left_out = KroneckerWhitening(leave_out=tuple(parameters))
    assert left_out.build(factors(probe), parameters).frame == "identity"


def test_layers_can_be_left_out_by_name():
    model, _, probe = recorded(named("sequence-linear"), 12, seed=1)
    parameters = trainable(model)
    weight = next(n for n in parameters if n.endswith("weight"))
    layer = weight.rpartition(".")[0]
    for given in (weight, layer):
        whitener = KroneckerWhitening(leave_out=(given,)).build(
            factors(probe), parameters
        )
        image = whitener.apply(parameters)
        same = [n for n in parameters if torch.equal(image[n], parameters[n])]
        assert weight in same
        assert len(same) < len(parameters)


def test_a_parameter_without_a_map_is_named():
    with pytest.raises(CoverageError, match="'b'"):
        LayerwiseWhitener([IdentityMap(("a",))], ["a", "b"])
    with pytest.raises(CoverageError, match="two"):
        LayerwiseWhitener([IdentityMap(("a",)), IdentityMap(("a",))], ["a"])


@pytest.mark.parametrize(
    "settings",
    [{"side": "left"}, {"exponent": -0.1}, {"exponent": 1.1}, {"rank": 0}],
    ids=str,
)
def test_settings_that_make_no_map_are_refused(settings):
    with pytest.raises(ConfigurationError, match=str(next(iter(settings)))):
        KroneckerWhitening(**settings)


@pytest.mark.parametrize("amount", [0.0, -1.0, float("nan"), float("inf")])
def test_damping_is_positive(amount):
    with pytest.raises(ConfigurationError, match="damping"):
        Damping(amount)


def test_matched_scale_keeps_the_probes_mean_square():
    """``tr(P^2 F) = tr(F)``: of gradients that have F as their second moment."""
    model, _, probe = recorded(named("sequence-linear"), 400, seed=1)
    parameters = trainable(model)
    found = factors(probe)
    whitener = KroneckerWhitening(side="both", match_scale=True).build(
        found, parameters
    )
    for factor in found.layers.values():
        if not hasattr(factor, "a"):
            continue
        a, g = factor.a.mean().double()[0], factor.g.mean().double()[0]
        la, lg = (
            torch.linalg.cholesky(a + 1e-9 * torch.eye(len(a))),
            torch.linalg.cholesky(g + 1e-9 * torch.eye(len(g))),
        )
        before = float(a.trace() * g.trace())
        # columns of the Kronecker root, mapped one by one
        after = 0.0
        for i in range(len(a)):
            for j in range(len(g)):
                m = torch.outer(lg[:, j], la[:, i])
                layer = next(
                    layer for layer in whitener.maps if factor.weight in layer.names
                )
                values = layer.values(m.unsqueeze(0), parameters)
                values = {n: v.double() for n, v in values.items()}
                after += sum(
                    float(v.square().sum()) for v in layer.apply(values).values()
                )
        assert after == pytest.approx(before, rel=1e-3)


@pytest.mark.parametrize("name", ["sequence-linear", "image-conv-groups"])
def test_a_diagonal_map_scales_by_the_product_of_mean_squares(name):
    """Entry by entry, written down from the inputs and output gradients themselves."""
    model, _, probe = recorded(named(name), 12, seed=1)
    parameters = trainable(model)
    how = KroneckerWhitening(diagonal=True, exponent=0.4, damping=Damping(0.2))
    whitener = how.build(factors(probe), parameters)
    image = whitener.apply({n: torch.ones_like(p) for n, p in parameters.items()})
    dense = [io for io in probe if hasattr(io, "rows") and hasattr(io, "bias")]
    assert dense
    for io in dense:
        a, d = (x.double() for x in io.rows())  # [B, G, T, p (+ 1)], [B, G, T, r]
        squares = torch.einsum(
            "gr,gp->grp", d.square().sum(2).mean(0), a.square().mean((0, 2))
        )
        scales = (squares / squares.mean() + 0.2) ** -0.4
        if io.bias is not None:
            bias = scales[..., -1].flatten()
            assert torch.allclose(image[io.bias].double(), bias, rtol=1e-4)
            scales = scales[..., :-1]
        weight = image[io.weight]
        assert torch.allclose(weight.double(), scales.reshape(weight.shape), rtol=1e-4)


def test_of_one_example_and_one_position_it_is_the_root_of_the_squared_gradient():
    """There the second moment is a Kronecker product, so nothing is approximated."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    x, y = torch.randn(1, 4), torch.tensor([1])
    recording = Recording(model, cover_linear(model).covered, 1, keep_inputs=True)
    F.cross_entropy(recording.forward((x,), {}), y).backward()
    parameters = trainable(model)
    found = factors(recording.layer_ios())
    whitener = diagonal_whitening(found, parameters, damping=Damping(0.05))
    again = KroneckerWhitening(diagonal=True).build(found, parameters)
    assert whitener.frame == again.frame
    squares = flat(
        {n: g[0] for n, g in per_example_gradients(model, cross, x, y).items()}
    ).square()
    ones = whitener.apply({n: torch.ones_like(p) for n, p in parameters.items()})
    expected = (squares / squares.mean() + 0.05) ** -0.5
    assert torch.allclose(flat(ones).double(), expected.double(), rtol=1e-4)


def cross(output, targets):
    return F.cross_entropy(output, targets, reduction="none")


def cover_linear(model):
    def synthetic(size, generator):
        x = torch.randn(size, model.in_features, generator=generator)
        return Batch(x, torch.randint(0, 3, (size,), generator=generator))

    return cover(model, synthetic, cross)


def test_a_diagonal_map_leaves_layers_out_too():
    model, _, probe = recorded(named("sequence-linear"), 12, seed=1)
    parameters = trainable(model)
    how = KroneckerWhitening(diagonal=True, leave_out=tuple(parameters))
    assert how.build(factors(probe), parameters).frame == "identity"


def test_the_reference_agrees_with_the_recording():
    """The slow twin sees the same gradients that the maps are compared on."""
    net = named("sequence-linear")
    model = net.make()
    coverage = cover(model, net.synthesiser(), loss)
    batch = net.batch(SIZE, torch.Generator().manual_seed(9))
    ios = layer_ios(model, coverage, batch, SIZE, keep_inputs=False)
    slow = per_example_gradients(model, loss, batch.inputs, batch.targets)
    for i in range(SIZE):
        one = torch.cat([g[i].flatten() for g in slow.values()])
        assert torch.allclose(
            flat_of(ios, trainable(model), i), one.double(), rtol=1e-4, atol=1e-6
        )
