"""Rule 12 where sums are rounded, and rule 11 for what belongs to rows of a batch."""

from __future__ import annotations

import math

import torch

from curvedp.clipping import FlatClipping, bounded
from curvedp.layers import rounding
from curvedp.layers.dense import DenseIO
from curvedp.layers.linear import LinearGeometry
from curvedp.noise import RandomStreams, Stream
from curvedp.whitening import IdentityWhitener

#: The figure that is published: measured over declared sensitivity.
LIMIT = 1.000001


def _sum(a, d, present):
    shape = torch.Size((d.shape[-1], a.shape[-1]))
    io = DenseIO("layer", "w", None, [(a, d)], LinearGeometry(shape))
    total = bounded.clipped_sum(
        [io], FlatClipping(1.0), IdentityWhitener(), present=present, step=0,
        parameters={"w": torch.zeros(shape)},
    )  # fmt: skip
    return total.values["w"].double()


def rounding_along_a_gradient_is_covered():
    """Examples that cancel to a 10 000th, added up in float32."""
    before, rounding.REACH = rounding.REACH, dict.fromkeys(rounding.REACH, math.inf)
    try:
        for seed in range(40):
            generator = torch.Generator().manual_seed(seed)
            a, d = (torch.randn(1, 2, 1, generator=generator) for _ in "ad")
            for _ in range(5):
                scale = 3e4 * torch.rand(1, generator=generator)
                moved = a * (1 + 1e-4 * torch.randn(a.shape, generator=generator))
                rows = torch.cat([a, moved], 1), torch.cat([d, -d], 1) * scale
                length = float(_sum(*rows, torch.ones(1, dtype=torch.bool)).norm())
                assert length <= LIMIT, f"one example contributed {length:.6f} C"
    finally:
        rounding.REACH = before


def what_others_cancel_is_not_rounded_away():
    """One example leaves a batch in which everybody else cancels entirely."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(64, 1, 30, generator=generator)
    d = 1e8 * torch.randn(64, 1, 10, generator=generator)
    a, d = torch.cat([a, a], 1), torch.cat([d, -d], 1)
    a[0], d[0] = 1.0, 2.0
    rows = torch.arange(64)
    moved = float((_sum(a, d, rows >= 0) - _sum(a, d, rows > 0)).norm())
    assert moved <= LIMIT, f"one example moved the sum by {moved:.6f} C"


def _without_the_first(make, calls):
    """How far the sum moves where the first row is not there, and others move up."""
    later = [(x.roll(-1, 0), d.roll(-1, 0)) for x, d in calls]
    rows, sums = torch.arange(len(calls[0][0])), []
    for own, present in ((calls, rows >= 0), (later, rows < len(rows) - 1)):
        io, shapes = make(own)
        total = bounded.clipped_sum(
            [io], FlatClipping(1.0), IdentityWhitener(), present=present, step=0,
            parameters=shapes,
        )  # fmt: skip
        sums.append(total.values)
    return math.hypot(*(float((v - sums[1][n]).norm()) for n, v in sums[0].items()))


def _uses(seed, rows=4096):
    """``h(x) - h(1.001 x)`` of one entry; the first example has a use alone."""
    generator = torch.Generator().manual_seed(seed)
    a, d = torch.zeros(rows, 16), torch.zeros(rows, 8)
    for x in (a, d):
        x[:, 0] = (torch.rand(rows, generator=generator) * 4096 + 1).round() / 4096
    calls = [(a, 1e3 * d), (1.001 * a, -1e3 * d)]
    for x, e in calls:
        x[0], e[0] = 0, 0
    calls[0][0][0, 0], calls[0][1][0, 0] = 1, 3
    return calls


_SHAPE = torch.Size((8, 16))


def uses_that_cancel_do_not_round_apart():
    """A layer that is called twice, in a batch of 4,096 whose uses cancel."""

    def make(calls):
        io = DenseIO("layer", "w", None, calls, LinearGeometry(_SHAPE))
        return io, {"w": torch.zeros(_SHAPE)}

    for seed in range(4):
        moved = _without_the_first(make, _uses(seed))
        assert moved <= LIMIT, f"one example moved the sum by {moved:.6f} C"


def positions_that_cancel_in_a_bias_do_not_round_apart():
    """Positions of one call, which a bias adds up without inputs between them."""

    def make(calls):
        a, d = (torch.stack(own, 1) for own in zip(*calls, strict=True))
        io = DenseIO("layer", "w", "b", [(a, d)], LinearGeometry(_SHAPE))
        return io, {"w": torch.zeros(_SHAPE), "b": torch.zeros(8)}

    for seed in range(4):
        moved = _without_the_first(make, _uses(seed))
        assert moved <= LIMIT, f"one example moved the sum by {moved:.6f} C"


def masks_and_views_are_secret():
    """They belong to rows, and rows move up when one example is not there."""
    for stream in (Stream.FORWARD, Stream.VIEWS):
        seeds = {RandomStreams(5).torch_seed(stream, 0) for _ in range(2)}
        assert len(seeds) == 2, f"{stream.name} follows from the public seed"
