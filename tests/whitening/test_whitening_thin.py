"""Low-rank roots without mapped inputs, against maps that are written out."""

import math

import pytest
import torch
from torch import nn

from curvedp.clipping import FlatClipping
from curvedp.clipping.bounded import clipped_sum
from curvedp.layers import rounding
from curvedp.layers.conv import ConvGeometry
from curvedp.layers.costs import NormMethod
from curvedp.layers.dense import DenseIO
from curvedp.layers.linear import LinearGeometry
from curvedp.layers.precision import ROUNDING
from curvedp.whitening import KroneckerMap, LayerwiseWhitener, maps, thin
from curvedp.whitening.roots import IdentityRoot, LowRankRoot

RANK = 5


def root(groups, size, *, orthonormal=True):
    vectors = torch.linalg.qr(torch.randn(groups, size, RANK, dtype=torch.float64))[0]
    if not orthonormal:
        vectors = vectors + 1e-4 * torch.randn_like(vectors)
    values = torch.logspace(-1.5, 0.3, RANK, dtype=torch.float64).expand(groups, RANK)
    tail = torch.linspace(2.0, 4.0, groups, dtype=torch.float64)
    return LowRankRoot(vectors, values, tail)


def linear(positions, inputs, outputs, bias, method, seed=0):
    torch.manual_seed(seed)
    shape = torch.Size((outputs, inputs))
    x, d = torch.randn(4, positions, inputs), torch.randn(4, positions, outputs)
    geometry = LinearGeometry(shape)
    io = DenseIO("l", "w", "b" if bias else None, [(x, d)], geometry, method)
    found = root(1, inputs + bias)
    return io, KroneckerMap("w", io.bias, shape, 1, IdentityRoot(), found, 0.7)


def convolution(groups, bias, method):
    torch.manual_seed(0)
    module = nn.Conv2d(8, 12, 3, stride=2, padding=1, groups=groups)
    shape = module.weight.shape
    calls = [(torch.randn(4, 8, 6, 6), torch.randn(4, 12, 3, 3)) for _ in range(2)]
    geometry = ConvGeometry.of(module)
    io = DenseIO("l", "w", "b" if bias else None, calls, geometry, method)
    found = root(groups, shape[1:].numel() + bias)
    return io, KroneckerMap("w", io.bias, shape, groups, IdentityRoot(), found)


LAYERS = {
    **{
        f"linear-{t}-{p}-{r}-{bias}-{method}": (linear, (t, p, r, bias, method))
        for t, p, r in ((1, 20, 9), (3, 20, 9), (30, 20, 9), (5, 8, 40))
        for bias in (False, True)
        for method in (None, *NormMethod)
    },
    **{
        f"convolution-{groups}-{bias}-{method}": (convolution, (groups, bias, method))
        for groups in (1, 4)
        for bias in (False, True)
        for method in NormMethod
    },
}


def mapped_norms(layer, io):
    """In float64, of gradients that the whole matrix of the map has multiplied."""
    exact = DenseIO(
        io.name, io.weight, io.bias,
        [(x.double(), d.double()) for x, d in io.calls], io.geometry,
    )  # fmt: skip
    grads = exact.per_example()
    like = {n: g[0] for n, g in grads.items()}
    matrix = LayerwiseWhitener([layer], list(like)).materialize(like)
    flat = torch.cat([grads[n].flatten(1) for n in like], 1)
    return (flat @ matrix.T).square().sum(1)


@pytest.fixture
def wide_sums(monkeypatch):
    """Norms as they are, with nothing on top for sums in float32."""
    monkeypatch.setattr(maps, "SUM_STRETCH", 0.0)


@pytest.fixture
def written_out(monkeypatch):
    """The slow way: mapped inputs, and weight and bias side by side."""

    def switch():
        monkeypatch.setattr(thin, "applies", lambda right, left: False)

    return switch


@pytest.mark.usefixtures("wide_sums")
@pytest.mark.parametrize("name", LAYERS)
def test_norms_and_maps_are_those_of_the_matrix(name, written_out):
    make, arguments = LAYERS[name]
    io, layer = make(*arguments)
    assert thin.measures(layer.right, layer.left)
    found = layer.sq_norms(io)
    values = {n: g[0] for n, g in io.per_example().items()}
    fast = layer.apply(values)
    written_out()
    true = mapped_norms(layer, io)
    assert torch.all(found >= true)
    assert torch.allclose(found, true, rtol=1e-7)
    assert torch.allclose(found, layer.sq_norms(io), rtol=1e-7)
    slow = layer.apply(values)
    assert list(fast) == list(slow)
    for n, v in slow.items():
        assert fast[n].dtype == v.dtype
        assert torch.allclose(fast[n], v, atol=1e-5)


@pytest.mark.usefixtures("wide_sums")
@pytest.mark.parametrize("method", NormMethod)
def test_columns_need_not_be_quite_orthonormal(method):
    io, layer = linear(6, 20, 9, False, method)
    crooked = root(1, 20, orthonormal=False)
    layer = KroneckerMap("w", None, layer.shape, 1, IdentityRoot(), crooked)
    assert torch.allclose(layer.sq_norms(io), mapped_norms(layer, io), rtol=1e-7)


@pytest.mark.parametrize("method", NormMethod)
def test_what_cancels_stays_within_the_bound(method, monkeypatch):
    torch.manual_seed(0)
    shape = torch.Size((6, 40))
    layer = KroneckerMap("w", None, shape, 1, IdentityRoot(), root(1, 40))
    # pairs of opposite rows along the root's smallest direction, where it shrinks most,
    # with a remainder of which float64 keeps a few digits beside them
    steep = layer.right.vectors[0, :, 0]
    rows = 1e6 * (1 + torch.rand(1, 8, 1, dtype=torch.float64)) * steep
    moved = rows * (1 + 1e-13)
    d = torch.randn(1, 8, 6, dtype=torch.float64)
    call = (torch.cat([rows, moved], 1), torch.cat([d, -d], 1))
    io = DenseIO("l", "w", None, [call], LinearGeometry(shape), method)

    def contribution():
        total = clipped_sum(
            [io],
            FlatClipping(1e-9),
            LayerwiseWhitener([layer], ["w"]),
            parameters={"w": torch.zeros(shape, dtype=torch.float64)},
            present=torch.ones(1, dtype=torch.bool),
            step=0,
        )
        return float(total.values["w"].norm()) / 1e-9

    assert contribution() <= 1 + 1e-6
    monkeypatch.setattr(rounding, "REACH", dict.fromkeys(rounding.REACH, math.inf))
    for module in (thin, maps):
        monkeypatch.setattr(module, "ROUNDING", dict.fromkeys(ROUNDING, 0.0))
    if method is NormMethod.GRAM:  # the other one measures nearly what is added
        assert contribution() > 1.5


def test_steep_roots_are_measured_by_what_they_map():
    io, layer = linear(6, 20, 9, False, None)
    steep = LowRankRoot(
        layer.right.vectors, 1e-5 * layer.right.values, layer.right.tail
    )
    assert not thin.measures(steep, layer.left)
    layer = KroneckerMap("w", None, layer.shape, 1, IdentityRoot(), steep)
    assert torch.allclose(layer.sq_norms(io), mapped_norms(layer, io), rtol=1e-7)


@pytest.mark.parametrize("name", LAYERS)
def test_sums_in_float32_cost_next_to_nothing(name):
    make, arguments = LAYERS[name]
    io, layer = make(*arguments)
    assert layer.sum_dtype(io) is None
    ratio = layer.sq_norms(io) / mapped_norms(layer, io)
    assert torch.all(ratio >= 1)
    assert float(ratio.max()) <= 1 + 1e-3


@pytest.mark.parametrize("positions", [2, 30])
def test_sums_in_float32_stay_within_the_bound(positions, monkeypatch):
    def worst():
        return max(along_the_steepest(positions, seed) for seed in range(20))

    assert worst() <= 1 + 1e-6
    monkeypatch.setattr(rounding, "REACH", dict.fromkeys(rounding.REACH, math.inf))
    assert worst() <= 1 + 1e-6
    # alone, without what covers the norm's own rounding, which is more in this example
    monkeypatch.setattr(thin, "ROUNDING", dict.fromkeys(ROUNDING, 0.0))
    assert worst() <= 1 + 1e-6
    monkeypatch.setattr(maps, "ROUNDING", dict.fromkeys(ROUNDING, 0.0))
    assert worst() > 1.1


def along_the_steepest(positions, seed):
    """The contribution of an example whose gradient all but cancels, and shrinks."""
    torch.manual_seed(seed)
    shape = torch.Size((6, 400))
    found = root(1, 400)
    steep = LowRankRoot(found.vectors, 0.6 * found.values, found.tail)
    layer = KroneckerMap("w", None, shape, 1, IdentityRoot(), steep)
    a = 1e7 * steep.vectors[0, :, 0] * (1 + torch.rand(1, positions, 1))
    d = torch.randn(1, positions, 6)
    call = (torch.cat([a, a * (1 + 1e-5)], 1).float(), torch.cat([d, -d], 1))
    method = NormMethod.INSTANTIATE
    io = DenseIO("l", "w", None, [call], LinearGeometry(shape), method)
    assert layer.sum_dtype(io) is None
    total = clipped_sum(
        [io],
        FlatClipping(1.0),
        LayerwiseWhitener([layer], ["w"]),
        parameters={"w": torch.zeros(shape)},
        present=torch.ones(1, dtype=torch.bool),
        step=0,
    )
    return float(total.values["w"].double().norm())


def test_many_positions_or_a_steep_root_are_added_up_in_float64():
    few, layer = linear(6, 20, 9, False, None)
    assert layer.sum_dtype(few) is None
    many = linear(40_000, 2, 2, False, None)[0]
    assert layer.sum_dtype(many) is torch.float64
    steep = LowRankRoot(
        layer.right.vectors, 1e-5 * layer.right.values, layer.right.tail
    )
    layer = KroneckerMap("w", None, layer.shape, 1, IdentityRoot(), steep)
    assert layer.sum_dtype(few) is torch.float64
