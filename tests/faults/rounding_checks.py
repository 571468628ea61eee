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


def masks_and_views_are_secret():
    """They belong to rows, and rows move up when one example is not there."""
    for stream in (Stream.FORWARD, Stream.VIEWS):
        seeds = {RandomStreams(5).torch_seed(stream, 0) for _ in range(2)}
        assert len(seeds) == 2, f"{stream.name} follows from the public seed"
