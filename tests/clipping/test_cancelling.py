"""Contributions of one example that cancel, over batches up to 65,536 rows.

A layer that is called twice, a weight that modules share: ``h(x1) - h(x2)`` leaves of
an example next to nothing, and each use has a sum of its own over the whole batch.
"""

import pytest
import torch
from nets_base import Batch
from torch import nn

from curvedp.clipping import FlatClipping
from curvedp.clipping.bounded import clipped_sum
from curvedp.curvature import SecondMoment
from curvedp.layers import io as layer_io
from curvedp.layers.capture import Recording
from curvedp.layers.conv import ConvGeometry
from curvedp.layers.coverage import cover
from curvedp.layers.dense import DenseIO
from curvedp.layers.joined import joined
from curvedp.layers.linear import LinearGeometry
from curvedp.layers.lookup import LookupIO
from curvedp.layers.planned import planned_for
from curvedp.layers.precision import NormPrecision
from curvedp.whitening import (
    Damping,
    DiagonalMap,
    IdentityWhitener,
    JointMap,
    KroneckerMap,
    LayerwiseWhitener,
    damped_root,
)
from curvedp.whitening.roots import IdentityRoot

#: What one example may move the sum by, in bounds.
MOST = 1.0001

P, R = 16, 8
SHAPE = torch.Size((R, P))


def uses(rows, kind, seed=0, dtype=torch.float32):
    """``(a, d)`` of each use: all but the first example cancel to next to nothing.

    mirrored: the second use is the first with another sign, but for a thousandth.
    thirds: ``a d + b d - (a + b) d``, exactly zero, of sums that round differently.
    equal: as mirrored, and everybody is the same.
    """
    generator = torch.Generator().manual_seed(seed)
    some = 1 if kind == "equal" else rows

    def positive(n):
        # of few digits, so that a + b is exact; one entry, so that errors have one sign
        x = torch.zeros(some, n)
        x[:, 0] = (torch.rand(some, generator=generator) * 4096 + 1).round() / 4096
        return x.expand(rows, n).to(dtype).clone()

    a, d = positive(P), 1e3 * positive(R)
    found = [(a, d), (a * 1.001, -d)]
    if kind == "thirds":
        b = positive(P)
        found = [(a, d), (b, d.clone()), (a + b, -d)]
    for x, e in found:
        x[0], e[0] = 0, 0
    found[0][0][0, 0], found[0][1][0, 0] = 1, 3  # one ordinary example: its norm is 3
    return found


def layer(form, calls):
    """The uses as calls of a module, modules with one weight, positions of one call."""
    geometry, weight = LinearGeometry(SHAPE), torch.zeros(SHAPE)
    if form == "conv":
        geometry = ConvGeometry.of(nn.Conv1d(P, R, 1))
        weight = weight.unsqueeze(2)
        calls = [(x.unsqueeze(2), d.unsqueeze(2)) for x, d in calls]
    if form in ("positions", "bias"):
        calls = [tuple(torch.stack(own, 1) for own in zip(*calls, strict=True))]
    bias = "b" if form == "bias" else None
    shapes = {"w": weight} | ({"b": torch.zeros(R)} if bias else {})
    if form == "lookup":
        calls = [(torch.zeros(len(x), 1, dtype=torch.int64), d) for x, d in calls]
        others = sum(d for _, d in calls[:-1])
        calls[-1][1][1:] = -others[1:]
        return LookupIO("l", "w", 2, None, calls), {"w": torch.zeros(2, R)}
    if form == "tied":
        parts = [DenseIO("l", "w", None, [call], geometry) for call in calls]
        return joined("l", parts), shapes
    return DenseIO("l", "w", bias, calls, geometry), shapes


def summed(io, shapes, present, whitener=None, norms=NormPrecision.WIDE):
    total = clipped_sum(
        [io],
        FlatClipping(1.0),
        whitener or IdentityWhitener(),
        parameters=shapes,
        present=present,
        step=0,
        norms=norms,
    )
    return torch.cat([v.double().flatten() for _, v in sorted(total.values.items())])


def moved(form, calls, **how):
    """How far the sum moves without the first example: masked out, or not there."""
    io, shapes = layer(form, calls)
    shapes = {n: w.to(calls[0][0].dtype) for n, w in shapes.items()}
    rows = torch.arange(io.batch_size)
    others, _ = layer(form, [(x.roll(-1, 0), d.roll(-1, 0)) for x, d in calls])
    whole = summed(io, shapes, rows >= 0, **how)
    masked = summed(io, shapes, rows > 0, **how)
    gone = summed(others, shapes, rows < len(rows) - 1, **how)
    return max(float((whole - x).norm()) for x in (masked, gone))


FORMS = ["calls", "tied", "conv", "lookup", "positions", "bias"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "rows", [64, 1024, 4096, pytest.param(65536, marks=pytest.mark.slow)]
)
def test_uses_that_cancel_do_not_round_apart(form, rows):
    worst = 0.0
    for kind in ("mirrored", "thirds", "equal"):
        for device in ("cpu", "cuda"):
            with planned_for(device):
                worst = max(worst, moved(form, uses(rows, kind)))
    assert 0.9 < worst <= MOST, worst


def test_small_gradients_that_stay_as_rows_are_written_down_to_be_added():
    """A measured layer keeps its inputs; a GPU's product over all positions: 1.02 C."""
    geometry, worst = ConvGeometry.of(nn.Conv1d(1, 1, 1)), 0.0
    index = torch.arange(4096)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        a, d, moved = torch.randn(3, 4096, 1, 2, generator=generator)
        a, d = a.abs(), 1e3 * d.abs()
        a = torch.stack([a, a * (1 + 1e-3 * moved)], 3).flatten(2)  # there and back
        d = torch.stack([d, -d], 3).flatten(2)
        a[0], d[0], a[0, 0, 0] = 0, 3, 1

        def added(order, present, a=a, d=d):
            io = DenseIO("l", "w", None, [(a[order], d[order])], geometry)
            with planned_for("cuda"):
                return summed(io, {"w": torch.zeros(1, 1, 1)}, present)

        whole, gone = added(index, index >= 0), added(index.roll(-1), index < 4095)
        masked = added(index, index > 0)
        worst = max(worst, *(float((whole - x).norm()) for x in (gone, masked)))
    assert 0.9 < worst <= MOST, worst


@pytest.mark.parametrize("form", ["calls", "tied", "lookup"])
def test_where_float64_is_slow_gradients_are_written_down(form, monkeypatch):
    monkeypatch.setattr(layer_io, "fast_float64", lambda x: False)
    monkeypatch.setitem(layer_io.CHUNK_ELEMENTS, "cpu", 2**15)  # several chunks
    for kind in ("mirrored", "thirds", "equal"):
        assert 0.9 < moved(form, uses(1024, kind)) <= MOST
    io, shapes = layer(form, uses(40, "mirrored"))
    weights = torch.rand(40)
    slow = io.weighted_sum(weights)
    monkeypatch.undo()
    fast = io.weighted_sum(weights)["w"].float()
    torch.testing.assert_close(slow["w"], fast, rtol=1e-4, atol=0)
    assert slow.keys() == shapes.keys()


def maps(damping):
    first = torch.zeros(P, dtype=torch.float64)
    first[0] = 1
    moment = SecondMoment(1.0, matrix=torch.outer(first, first).unsqueeze(0))
    one = torch.ones(1, 1, dtype=torch.float64)
    eye = torch.eye(R, dtype=torch.float64).unsqueeze(0)
    yield JointMap(
        "w", None, SHAPE, 1, first.reshape(1, P, 1), one, eye, one.expand(1, R), damping
    )
    for rank in (1, None):
        root = damped_root(moment, 0.5, Damping(damping), rank=rank)
        yield KroneckerMap("w", None, SHAPE, 1, IdentityRoot(), root)
    scales = torch.ones(SHAPE, dtype=torch.float64)
    scales[0, 0] = damping**0.5
    yield DiagonalMap({"w": scales})


@pytest.mark.parametrize("form", ["calls", "tied", "positions"])
@pytest.mark.parametrize("norms", [NormPrecision.WIDE, NormPrecision.FLOAT32])
def test_whitened_uses_that_cancel(form, norms):
    """A tied weight was measured in float32 and added up in float64: 1.05 C."""
    for damping in (0.05, 1e-8):
        for own in maps(damping):
            whitener = LayerwiseWhitener([own], ["w"])
            for kind in ("mirrored", "thirds"):
                a, *others = uses(1024, kind)
                calls = [a, *((x, 1e4 * d) for x, d in others)]
                calls[0][1][1:] *= 1e4
                assert moved(form, calls, whitener=whitener, norms=norms) <= MOST


def test_models_in_float64_keep_the_bound():
    for form in ("calls", "tied"):
        for kind in ("mirrored", "thirds"):
            calls = uses(4096, kind, dtype=torch.float64)
            assert 0.9 < moved(form, calls) <= MOST


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.Linear(P, R, bias=False)

    def forward(self, x):
        return self.h(x[:, 0]) - self.h(x[:, 1])


def dot(output, target):
    return (output * target).sum(1)


@pytest.mark.parametrize("rows", [4096, 65536])
def test_a_siamese_net_in_one_physical_batch(rows):
    torch.manual_seed(0)
    model = Siamese()

    def synthesise(size, generator):
        x = torch.randn(size, 2, P, generator=generator)
        return Batch(x, torch.randn(size, R, generator=generator))

    coverage = cover(model, synthesise, dot)
    worst = 0.0
    for kind in ("mirrored", "equal"):
        (a, d), (b, _) = uses(rows, kind)

        def added(order, present, a=a, b=b, d=d):
            recording = Recording(model, coverage.covered, rows)
            output = recording.forward((torch.stack([a, b], 1)[order],), {})
            dot(output, d[order]).sum().backward()
            (io,) = recording.layer_ios()
            return summed(io, {"h.weight": model.h.weight.detach()}, present)

        index = torch.arange(rows)
        whole = added(index, index >= 0)
        gone = added(index.roll(-1), index < rows - 1)
        worst = max(worst, float((whole - gone).norm()))
    assert 0.9 < worst <= MOST, worst
