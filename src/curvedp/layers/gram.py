r"""Sums over pairs of positions, from products of rows with rows.

.. math::  \sum_{t,s} K_{ts} (d_t \cdot d_s), \qquad K_{ts} = a_t \cdot a_s
    \text{ or a kernel made of it.}

The diagonals of both products are the squared lengths of the rows, so these cost
nothing more. A GPU multiplies matrices in tiles of 32 rows: 65 positions (64 patches of
an image and a class token) take nine tiles where four and a thin strip would do. So a
few positions beyond a multiple of 32 are a block of their own, and a pair of different
blocks counts twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from curvedp.layers.planned import kind_of
from curvedp.layers.precision import ROUNDING, short_products
from curvedp.layers.rounding import TINY, gamma, product, sq_length

__all__ = ["gram_sum"]

#: Rows of a tile, and the most positions beyond a multiple that are taken apart.
TILE, THIN = 32, 4

#: From ``a_i a_j^T [B, G, i, j]`` and both blocks of positions to the kernel's block.
Kernel = Callable[[Tensor, slice, slice], Tensor]


def gram_sum(
    a: Tensor, d: Tensor, kernel: Kernel, *, tile: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum over pairs ``[B]``, ``||a||^2 [B, G]`` and ``||d||^2 [B, G]``.

    The lengths are not below the truth. The sum is off by no more than lemma 1 of
    :mod:`curvedp.layers.rounding` says of one that is taken in one piece.

    Args:
        a: ``[B, G, T, p]``.
        d: ``[B, G, T, r]``.
        kernel: symmetric; by blocks.
        tile: cut positions by it; by default where the device gains from that.
    """
    if tile is None:
        wide = a.dtype == torch.float64
        tile = TILE if wide and kind_of(a) == "cuda" else 0
    parts, in_a, in_d = [], [], []
    for i, j in _pairs(a.shape[2], tile):
        of_a = product(a[:, :, i], a[:, :, j].mT)
        of_d = product(d[:, :, i], d[:, :, j].mT)
        if i == j:
            in_a.append(_diagonal(of_a))
            in_d.append(_diagonal(of_d))
        # a row at a time, and then all of them: two sums of at most T terms
        part = (kernel(of_a, i, j) * of_d).sum(-1).sum((1, 2))
        parts.append(part if i == j else 2 * part)
    total = torch.stack(parts).sum(0)
    if short_products(a):  # their products lose digits that lengths must have
        return total, sq_length(a), sq_length(d)
    return total, _lengths(in_a, a), _lengths(in_d, d)


def _pairs(t: int, tile: int) -> Iterator[tuple[slice, slice]]:
    """Pairs of blocks, each once."""
    beyond = t % tile if tile else 0
    if t <= tile or not 0 < beyond <= THIN:
        yield slice(0, t), slice(0, t)
        return
    most, rest = slice(0, t - beyond), slice(t - beyond, t)
    yield from ((most, most), (most, rest), (rest, rest))


def _diagonal(products: Tensor) -> Tensor:
    """Its sum, ``[B, G]``."""
    return products.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=torch.float64)


def _lengths(traces: list[Tensor], x: Tensor) -> Tensor:
    """Sums of squares: off by rounding relative to themselves (lemma 3), so raised."""
    n, u = x.shape[3], ROUNDING[x.dtype]
    tiny = x.shape[2] * n * TINY[x.dtype]
    return sum(traces, torch.zeros_like(traces[0])) * (1 + gamma(n + 8, u)) + tiny
