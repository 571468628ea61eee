"""The three forms of LayerIO, and the reference that all is compared with."""

from dataclasses import replace

import pytest
import torch
from nets import ALL, composed, loss
from passes import flat, in_float64, record
from torch import nn

from curvedp.errors import LoopError
from curvedp.layers import Batch, Recording, as_call, costs, cover, synthesiser_like
from curvedp.layers.conv import ConvGeometry
from curvedp.layers.costs import NormMethod, choose_method
from curvedp.layers.dense import DenseIO, Geometry
from curvedp.layers.direct import Expanded
from curvedp.layers.io import DirectIO
from curvedp.layers.planned import planned_for
from curvedp.testing import (
    check_transform,
    check_whitener,
    clipped_sum,
    per_example_gradients,
)
from curvedp.update import Chain, Gradient, Transform
from curvedp.whitening import IdentityWhitener

#: Agreement of two float32 computations of a short sum.
SAME = 1e-5

SIZE = 5


def recorded(net, size=SIZE, keep_inputs=True):
    model = net.make()
    coverage = cover(model, net.synthesiser(), loss)
    batch = net.batch(size, torch.Generator().manual_seed(2))
    return model, record(model, coverage, batch, size, loss, keep_inputs)


def net_called(name):
    return next(net for net in ALL if str(net) == name)


FORMS = [
    "sequence-linear",
    "image-conv-groups",
    "tokens-padding",
    "two-towers",
    "sequence-called-thrice",
    "sequence-layer-norm",
]


@pytest.mark.parametrize("keep_inputs", [True, False], ids=["kept", "settled"])
@pytest.mark.parametrize("net", [net_called(n) for n in FORMS], ids=str)
def test_norms_sums_and_masks_agree_with_the_gradients(net, keep_inputs):
    _, ios = recorded(net, keep_inputs=keep_inputs)
    weights = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0])
    mask = torch.tensor([True, False, True, True, False])
    for io in ios:
        assert io.batch_size == SIZE
        true = in_float64(io)
        squares = sum(g.reshape(SIZE, -1).square().sum(1) for g in true.values())
        norms = io.sq_norms().double()
        assert torch.all(norms >= squares * (1 - 1e-6))
        assert torch.all(norms <= squares * (1 + 1e-3) + 1e-30)
        sums, kept = io.weighted_sum(weights), io.keep(mask)
        assert sums.keys() == true.keys()
        for name, g in true.items():
            expected = torch.einsum("b,b...->...", weights.double(), g)
            assert (sums[name] - expected).norm() <= SAME * (1e-30 + g.norm())
            assert torch.equal(kept.per_example()[name][~mask], 0 * g[~mask].float())
            assert torch.equal(
                kept.per_example()[name][mask], io.per_example()[name][mask]
            )
        assert not kept.sq_norms()[~mask].gt(1e-30).any()


@pytest.mark.parametrize("method", NormMethod)
def test_norms_do_not_depend_on_the_chunks(method, monkeypatch):
    _, ios = recorded(net_called("image-conv-groups"))
    dense_ios = [replace(io, method=method) for io in ios if isinstance(io, DenseIO)]
    whole = [io.sq_norms() for io in dense_ios]
    monkeypatch.setattr(costs, "CHUNK_ELEMENTS", {"cpu": 1})
    for io, expected in zip(dense_ios, whole, strict=True):
        assert len(list(io.chunks())) == SIZE
        assert torch.allclose(io.sq_norms(), expected, rtol=SAME)


@pytest.mark.parametrize("net", ALL[1::3], ids=str)
def test_the_ways_of_a_gpu_give_the_same(net):
    """What a GPU is given to do, done by a CPU: patches, tiles, sums in one product."""
    model = net.make()
    coverage = cover(model, net.synthesiser(), loss)
    batch = net.batch(SIZE, torch.Generator().manual_seed(3))
    weights = torch.linspace(0.5, 1.5, SIZE, dtype=torch.float64)

    def found(kept):
        ios = record(model, coverage, batch, SIZE, loss, keep_inputs=kept)
        sums = {n: s for io in ios for n, s in io.weighted_sum(weights).items()}
        return torch.stack([io.sq_norms() for io in ios]), sums

    for kept in (False, True):
        norms, sums = found(kept)
        with planned_for("cuda"):
            same_norms, same_sums = found(kept)
        torch.testing.assert_close(same_norms, norms, rtol=SAME, atol=1e-9)
        assert same_sums.keys() == sums.keys()
        longest = float(norms.sqrt().sum())
        for name, value in sums.items():
            assert (same_sums[name] - value).norm() <= SAME * longest, name


def test_small_gradients_settle_and_inputs_of_large_ones_stay():
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(48, 20)
    )
    batch = Batch(torch.randn(SIZE, 2, 6, 6), torch.zeros(SIZE, dtype=torch.int64))
    coverage = cover(model, synthesiser_like(batch, model), loss)
    convolution, norm, head = record(model, coverage, batch, SIZE, loss)
    assert isinstance(convolution, DirectIO)
    assert isinstance(norm, DirectIO)
    assert isinstance(head, DenseIO)
    whole = record(model, coverage, batch, SIZE, loss, keep_inputs=True)[0]
    assert isinstance(whole, DenseIO)
    for name, g in whole.per_example().items():
        assert torch.equal(g, convolution.grads[name])


def test_convolutions_write_down_somewhat_larger_gradients(monkeypatch):
    # kept 8 x 16 + 12 x 16 values, gradient 12 x 8 x 9; the second is an outer product
    model = nn.Sequential(
        nn.Conv2d(8, 12, 3, padding=1), nn.Flatten(), nn.Linear(192, 2)
    )
    batch = Batch(torch.randn(SIZE, 8, 4, 4), torch.zeros(SIZE, dtype=torch.int64))
    coverage = cover(model, synthesiser_like(batch, model), loss)
    monkeypatch.setattr(costs, "SETTLED_OVER_KEPT", 1)
    before = record(model, coverage, batch, SIZE, loss)
    assert all(isinstance(io, DenseIO) for io in before)
    monkeypatch.setattr(costs, "SETTLED_OVER_KEPT", 3)
    convolution, head = record(model, coverage, batch, SIZE, loss)
    assert isinstance(convolution, DirectIO)
    assert isinstance(head, DenseIO)
    assert torch.allclose(convolution.sq_norms(), before[0].sq_norms(), rtol=SAME)
    monkeypatch.setattr(costs, "SETTLED_OVER_KEPT", 2)
    assert isinstance(record(model, coverage, batch, SIZE, loss)[0], DenseIO)


def test_what_settled_frees_its_inputs_during_the_backward_pass():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 3))
    x = torch.randn(SIZE, 2, 8, 8)
    coverage = cover(model, synthesiser_like(Batch(x, x), model), None)
    recording = Recording(model, coverage.covered, SIZE)
    output = recording.forward((x,), {})
    assert len(recording.inputs()) == 2
    output.square().sum().backward()
    assert recording.inputs() == []
    assert recording.reached
    with pytest.raises(LoopError, match="twice"):
        output = recording.forward((x,), {}).square().sum()
        output.backward(retain_graph=True)
        output.backward()


def test_the_planner_takes_gram_only_where_it_is_cheaper_and_smaller():
    # fully connected, few positions: Gram. First convolution, many positions: not.
    assert choose_method(4, 512, 512) is NormMethod.GRAM
    assert choose_method(1024, 27, 64) is NormMethod.INSTANTIATE
    assert choose_method(64, 65, 65) is NormMethod.INSTANTIATE  # not less work
    assert choose_method(20, 41, 41) is NormMethod.GRAM
    assert choose_method(30, 61, 61) is NormMethod.GRAM
    assert choose_method(6, 5, 1000) is NormMethod.INSTANTIATE


def test_chunks_are_even_and_hardly_larger_than_they_may_be():
    assert [costs.even_rows(1024, most) for most in (1, 3, 97, 1000)] == [
        1, 3, 94, 1024,
    ]  # fmt: skip
    assert costs.even_rows(5, 4) == 5 and costs.even_rows(6, 4) == 3
    assert costs.even_rows(0, 4) == 1
    for rows in range(1, 60):
        for most in range(1, 60):
            size = costs.even_rows(rows, most)
            assert 1 <= size <= max(most, 1.25 * most)
            assert -(-rows // size) <= -(-rows // most)


CONVOLUTIONS = [
    nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2),
    nn.Conv2d(4, 8, (3, 2), (2, 1), (1, 2), (1, 2), 4),
    nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
    nn.Conv3d(4, 6, 2, padding="same", groups=2),
]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("module", CONVOLUTIONS, ids=str)
def test_both_ways_to_sum_a_convolution_agree_with_autograd(module, monkeypatch):
    side = {nn.Conv1d: (11,), nn.Conv2d: (7, 9), nn.Conv3d: (4, 3, 5)}[type(module)]
    x = torch.randn(SIZE, 4, *side)
    output = module(x)
    d = torch.randn_like(output)
    (expected,) = torch.autograd.grad(output, module.weight, d)
    geometry = ConvGeometry.of(module)
    assert geometry.weight_shape() == module.weight.shape
    ways = [geometry._weight_sum_native, geometry._weight_sum_rows]
    for way in ways:
        assert (way(x, d) - expected).norm() <= SAME * expected.norm()
    monkeypatch.setattr("curvedp.layers.conv.CHUNK_ELEMENTS", {"cpu": 1})
    chunked = geometry._weight_sum_rows(x, d)
    assert (chunked - expected).norm() <= SAME * expected.norm()
    with planned_for("cuda"):
        for most in (1, 2**27):
            monkeypatch.setattr("curvedp.layers.conv.CHUNK_ELEMENTS", {"cuda": most})
            assert (
                geometry.weight_sum(x, d) - expected
            ).norm() <= SAME * expected.norm()


WIDE_CONVOLUTIONS = [
    nn.Conv1d(16, 6, 3, stride=2, padding=1, groups=2),
    nn.Conv2d(8, 12, 3, padding=1),
    nn.Conv2d(8, 5, (3, 2), (2, 1), (1, 2), (1, 2)),
    nn.Conv2d(32, 8, 3, groups=4),
    nn.Conv2d(9, 4, 3, padding=1, padding_mode="reflect"),
    nn.Conv2d(8, 3, 1, stride=2),
    nn.Conv3d(8, 6, 2, padding="same"),
]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("module", WIDE_CONVOLUTIONS, ids=str)
def test_gradients_by_the_kernel_of_a_cpu_are_those_of_patches(module):
    side = {nn.Conv1d: (11,), nn.Conv2d: (7, 9), nn.Conv3d: (4, 3, 5)}[type(module)]
    x = torch.randn(SIZE, module.in_channels, *side)
    d = torch.randn_like(module(x))
    geometry = ConvGeometry.of(module)
    if torch.backends.mkldnn.is_available():
        assert not geometry.needs_rows(x)
    assert geometry.needs_rows(x.double())
    groups = module.groups
    shape = (SIZE, groups, module.out_channels // groups, module.weight[0].numel())
    found, patches = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    geometry.gradients(x, d, out=found)
    Geometry.gradients(geometry, x, d, out=patches)
    for i in range(SIZE):
        (alone,) = torch.autograd.grad(
            module(x[i : i + 1]), module.weight, d[i : i + 1]
        )
        for way in (found, patches):
            own = way[i].reshape(alone.shape)
            assert (own - alone).norm() <= SAME * alone.norm()


@pytest.mark.parametrize("at_once", [1, 2, 3, 4, 8])
def test_where_an_example_stands_does_not_change_its_gradient(at_once, monkeypatch):
    module = nn.Conv2d(16, 16, 3, padding=1)
    x = torch.randn(5, 16, 32, 32)
    d = torch.randn_like(module(x))
    # inputs, output gradients and gradients of as many examples
    each = 2 * 16 * 1024 + module.weight.numel()
    monkeypatch.setattr(costs, "CHUNK_ELEMENTS", {"cpu": at_once * each})

    def written(order):
        calls = [(x[order], d[order])]
        io = DenseIO("c", "w", None, calls, ConvGeometry.of(module))
        return io.per_example()["w"]

    order = torch.tensor([4, 2, 0, 3, 1])
    assert torch.equal(written(order), written(torch.arange(5))[order])


def test_a_convolution_of_few_channels_keeps_to_patches():
    geometry = ConvGeometry.of(nn.Conv2d(3, 8, 3))
    assert geometry.needs_rows(torch.randn(2, 3, 5, 5))


def test_layouts_put_copies_where_they_broadcast():
    p = torch.randn(3, 4)
    for layout in Expanded.layouts(p):
        copies = layout.copies(p, SIZE)
        assert copies.requires_grad
        assert copies.shape == (SIZE, *[1] * layout.ones, 3, 4)
    leading = Expanded.layouts(torch.randn(1, 4))[0]
    assert leading.leading
    assert leading.copies(torch.randn(1, 4), SIZE).shape == (SIZE, 4)


# -- synthetic batches -----------------------------------------------------------------


def test_synthetic_batches_have_the_templates_shapes_and_valid_values():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.small, self.large = nn.Embedding(4, 3), nn.Embedding(9, 3)
            self.head = nn.Linear(3, 5)
            self.dropout = nn.Dropout(0.5)

        def forward(self, ids, attention_mask, x, flag):
            h = self.small(ids) + self.large(ids)
            return self.head(self.dropout(h.mean(1) + x))

    inputs = {
        "ids": torch.full((1, 6), 8),
        "attention_mask": torch.ones(1, 6, dtype=torch.int64),
        "x": torch.full((1, 3), 1e9, dtype=torch.bfloat16),
        "flag": torch.zeros(1, dtype=torch.bool),
    }
    model = Model().to(torch.bfloat16)
    make = synthesiser_like(Batch(inputs, torch.tensor([7])), model)
    batch = make(64, torch.Generator().manual_seed(0))
    for name, x in batch.inputs.items():
        assert x.shape == (64, *inputs[name].shape[1:])
        assert x.dtype == inputs[name].dtype
    assert set(batch.inputs["ids"].unique().tolist()) == {0, 1, 2, 3}
    assert set(batch.inputs["attention_mask"].unique().tolist()) == {0, 1}
    assert batch.inputs["x"].abs().max() <= 1, "values of the template do not matter"
    assert set(batch.targets.unique().tolist()) == {0, 1, 2, 3, 4}
    assert model.training
    again = make(64, torch.Generator().manual_seed(0))
    assert torch.equal(batch.inputs["ids"], again.inputs["ids"])


def test_inputs_become_arguments_by_their_structure():
    x, y = torch.zeros(1), torch.ones(1)
    assert as_call(x) == ((x,), {})
    assert as_call((x, y)) == ((x, y), {})
    assert as_call([x, y]) == ((x, y), {})
    assert as_call({"a": x}) == ((), {"a": x})


# -- the reference ---------------------------------------------------------------------


def test_the_reference_gradient_is_autograds_an_example_at_a_time():
    model = nn.Linear(2, 1, bias=False)
    x, y = torch.tensor([[1.0, 2.0], [3.0, -1.0]]), torch.tensor([1.0, 2.0])
    gradients = per_example_gradients(
        model, lambda out, target: out.squeeze(1) * target, x, y
    )
    assert gradients["weight"].dtype == torch.float64
    assert gradients["weight"].tolist() == [[[1.0, 2.0]], [[6.0, -2.0]]]
    assert model.weight.grad is None


@pytest.mark.parametrize("net", composed()[:8:3], ids=str)
def test_the_reference_is_the_same_with_a_forward_pass_together(net):
    model = net.make()
    batch = net.batch(SIZE, torch.Generator().manual_seed(3))
    alone = per_example_gradients(model, loss, batch.inputs, batch.targets)
    together = per_example_gradients(
        model, loss, batch.inputs, batch.targets, together=True
    )
    assert (flat(alone) - flat(together)).norm() <= SAME * flat(alone).norm()


def test_the_reference_sum_by_hand():
    gradients = {
        "a": torch.tensor([[3.0, 0.0], [0.3, 0.0], [float("nan"), 0.0], [1e20, 0.0]]),
        "b": torch.tensor([[4.0], [0.4], [1.0], [0.0]]),
    }
    flat_sum = clipped_sum(gradients, "flat", 1.0)
    assert flat_sum["a"].tolist() == pytest.approx([0.6 + 0.3, 0.0])
    assert flat_sum["b"].tolist() == pytest.approx([0.8 + 0.4])
    normalised = clipped_sum(gradients, "normalised", 1.0, gamma=0.5)
    assert normalised["b"].tolist() == pytest.approx([4 / 5.5 + 0.4 / 1.0])
    per_layer = clipped_sum(gradients, "per-layer", 2**0.5, layers=[["a"], ["b"]])
    assert per_layer["a"].tolist() == pytest.approx([1.0 + 0.3, 0.0])
    assert per_layer["b"].tolist() == pytest.approx([1.0 + 0.4])
    only_second = clipped_sum(gradients, "flat", 1.0, present=[False, True, True, True])
    assert only_second["b"].tolist() == pytest.approx([0.4])
    with pytest.raises(ValueError, match="no such rule"):
        clipped_sum(gradients, "flatt", 1.0)


# -- conformance of what the package ships ---------------------------------------------


def test_the_identity_conforms():
    model, ios = recorded(net_called("sequence-layer-norm"))
    check_whitener(IdentityWhitener(), dict(model.named_parameters()), ios)


class Halved(IdentityWhitener):
    """Applies one map and takes norms of another."""

    def apply(self, values):
        return {name: v / 2 for name, v in values.items()}


class Optimistic(IdentityWhitener):
    def sq_norms(self, io):
        return super().sq_norms(io) * 0.99


@pytest.mark.parametrize(
    ("broken", "message"),
    [(Halved(), "materialize"), (Optimistic(), "below")],
)
def test_a_broken_whitener_does_not_conform(broken, message):
    model, ios = recorded(net_called("sequence-layer-norm"))
    with pytest.raises(AssertionError, match=message):
        check_whitener(broken, dict(model.named_parameters()), ios)


class Momentum(Transform):
    def init(self, parameters):
        return {name: torch.zeros_like(p) for name, p in parameters.items()}

    def update(self, gradient, state):
        state = {name: 0.9 * state[name] + g for name, g in gradient.values.items()}
        return Gradient(state), state


class InPlace(Momentum):
    def update(self, gradient, state):
        for name, g in gradient.values.items():
            state[name].mul_(0.9).add_(g)
        return Gradient(dict(state)), state


class Jittered(Momentum):
    def update(self, gradient, state):
        jittered = {n: g + torch.randn_like(g) for n, g in gradient.values.items()}
        return Gradient(jittered), state


class Referring(Momentum):
    def stepped(self, before, after, state):
        return dict(after)


class Unstorable(Momentum):
    def stepped(self, before, after, state):
        return {**state, "dtype": torch.float32}


def test_transforms_that_are_pure_conform_and_others_do_not():
    parameters = {"w": torch.zeros(3, 2), "b": torch.zeros(())}
    for pure in (Momentum(), Chain(), Chain((Momentum(), Momentum()))):
        check_transform(pure, parameters)
    with pytest.raises(AssertionError, match="changed its arguments"):
        check_transform(InPlace(), parameters)
    with pytest.raises(AssertionError, match="not a function"):
        check_transform(Jittered(), parameters)
    with pytest.raises(AssertionError, match="keeps a reference"):
        check_transform(Referring(), parameters)
    with pytest.raises(AssertionError, match="cannot be stored"):
        check_transform(Unstorable(), parameters)
