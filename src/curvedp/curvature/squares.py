r"""Squares of gradients, coordinate by coordinate: what AdaDPS scales by.

=================  =======================================================
batch-squares      ``h = mean over batches of (mean over the batch of g_i)^2``
example-squares    ``h = mean over examples of g_i^2``
=================  =======================================================

The first is what Adam would see with batches of that size; it grows with the noise in a
batch's mean, and so depends on ``probe_size``. The second does not. Both are exact, for
every form of layer: a Kronecker product's diagonal is only close to the second.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from curvedp.curvature.factors import DiagonalFactor, Factor
from curvedp.layers.io import CHUNK_ELEMENTS, LayerIO, UnreachedIO
from curvedp.layers.planned import kind_of

__all__ = ["SQUARES", "gradients_in_chunks", "squares_of"]

SQUARES = ("batch-squares", "example-squares")


def squares_of(io: LayerIO, moments: str) -> dict[str, Factor]:
    """Squares of one batch of a layer, by first parameter name.

    Args:
        io: what the layer saw of a probe batch, with per-example losses summed.
        moments: "batch-squares" or "example-squares".
    """
    if isinstance(io, UnreachedIO):
        return {}
    if moments == "batch-squares":
        each = torch.full((io.batch_size,), 1 / io.batch_size, dtype=torch.float64)
        means = io.weighted_sum(each.to(_device(io)), torch.float64)
        squares = {name: mean.square() for name, mean in means.items()}
        return {io.names[0]: DiagonalFactor(squares, 1.0)}
    total: dict[str, Tensor] = {}
    for gradients in gradients_in_chunks(io):
        for name, g in gradients.items():
            squared = g.double().square().sum(0)
            total[name] = total[name] + squared if name in total else squared
    return {io.names[0]: DiagonalFactor(total, float(io.batch_size))}


def gradients_in_chunks(io: LayerIO) -> Iterator[dict[str, Tensor]]:
    """Per-example gradients ``[b, *shape]``, a piece of the batch at a time."""
    one = io.take(slice(0, 1)).per_example()
    each = sum(g.numel() for g in one.values())
    device = kind_of(next(iter(one.values())))
    size = max(1, CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS["cpu"]) // max(1, each))
    for start in range(0, io.batch_size, size):
        yield io.take(slice(start, start + size)).per_example()


def _device(io: LayerIO) -> torch.device:
    return io.spread()[0].device
