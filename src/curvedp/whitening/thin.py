r"""A low-rank root of the inputs, at the price of one thin projection.

``P g = g R`` with ``R = t I + Q (L - t) Q^T``, Q ``[p, k]``, the default of DP-KFC.
Nothing of the size of the inputs or of the gradient is mapped to find a norm: with
``R^2 = t^2 I + U diag(w) U^T``, U ``[p, k]``,

- one position: ``||g R||^2 = ||d||^2 (t^2 ||a||^2 + sum w (a U)^2)``;
- Gram: ``sum_{t,s} (d_t . d_s) (t^2 a_t . a_s + (a_t U) diag(w) (a_s U)^T)``;
- instantiate: ``t^2 ||g||^2 + sum w (g U)^2``.

Both are differences: a root is smaller than t along Q. They are taken in float64 and
for roots of a moderate condition only, and are raised by what rounding can hide,
``8 (p + r + T + k) u ||R||^2 S^2`` with ``S = ||d|| ||a||``: each inner product of n
terms is off by n round-offs of the lengths of its factors, and no factor is stretched
by more than ``||R||``. That is below 1e-6 of the square for ordinary examples.

The bias is the last column of ``a``; it is never written beside the inputs, which would
copy them.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor

from curvedp.layers.costs import NormMethod
from curvedp.layers.gram import gram_sum
from curvedp.layers.precision import ROUNDING, square_dtype
from curvedp.layers.rounding import over_groups, terms_of
from curvedp.whitening.roots import IdentityRoot, LowRankRoot, Root, rows_by

__all__ = ["applies", "measures", "sq_norms", "times"]

#: Beyond it the differences lose digits, and mapped inputs are measured instead.
_LARGEST_CONDITION = 300.0


def applies(right: Root, left: Root) -> TypeGuard[LowRankRoot]:
    """Whether the map is ``g R`` with R, here ``right``, of low rank."""
    return isinstance(left, IdentityRoot) and isinstance(right, LowRankRoot)


def measures(right: Root, left: Root) -> TypeGuard[LowRankRoot]:
    """The same, and norms may be taken as differences."""
    return applies(right, left) and right.condition <= _LARGEST_CONDITION


def sq_norms(
    a: Tensor, d: Tensor, root: LowRankRoot, bias: bool, method: NormMethod
) -> tuple[Tensor, Tensor]:
    """``||g_i R||^2``, not below the truth, and ``S^2``, each ``[b]``.

    Args:
        a: ``[b, G, T, p]``, float64, without the bias column.
        d: ``[b, G, T, r]``, float64.
        root: R, over p and the bias column.
        bias: whether there is one.
        method: Gram or instantiate; one position needs neither.
    """
    t, p, r = a.shape[2], a.shape[3], d.shape[3]
    ones = 1.0 if bias else 0.0
    tail = root.squared_tail
    w = root.squared[1]  # [G, k]
    if t > 1 and method is NormMethod.GRAM:
        au = _projected(a, root)

        def kernel(products: Tensor, i: slice, j: slice) -> Tensor:
            inside = (au[:, :, i] * w.unsqueeze(-2)) @ au[:, :, j].mT
            return inside + tail[:, None, None] * (products + ones)

        squares, in_a, in_d = gram_sum(a, d, kernel)
        spread = terms_of(in_a + ones * t, in_d)
        return _not_below(squares, spread, root, p + r + t)
    in_a, in_d = _sq(a) + ones * t, _sq(d)  # [b, G]
    spread = terms_of(in_a, in_d)
    if t == 1:
        inside = _weighted(_projected(a, root), w)
        squares = in_d * torch.addcmul(inside, tail, in_a)
    else:
        g = d.mT @ a
        inside = _weighted(_gradient_projected(g, d, root), w)
        whole = _sq(g) + _sq(d.sum(2).unsqueeze(-1)) if bias else _sq(g)
        squares = torch.addcmul(inside, tail, whole)
    return _not_below(over_groups(squares), spread, root, p + r + t)


def _not_below(
    squares: Tensor, spread: Tensor, root: LowRankRoot, terms: int
) -> tuple[Tensor, Tensor]:
    """Raised by what rounding can hide of inner products of so many terms."""
    u = 8 * (terms + root.vectors.shape[-1]) * ROUNDING[torch.float64]
    squares = squares.clamp_min(0)
    return torch.addcmul(squares, root.squared_largest, spread, value=u), spread


def _weighted(projected: Tensor, w: Tensor) -> Tensor:
    """``sum w (x U)^2`` of ``x U [b, G, t, k]``, ``[b, G]``."""
    return (projected.square().sum(2) * w).sum(-1)


def _projected(a: Tensor, root: LowRankRoot) -> Tensor:
    """``a U``, ``[b, G, T, k]``, the bias column counted."""
    p, u = a.shape[3], root.squared[0]
    au = rows_by(a, u[:, :p])
    return au + u[:, p:] if p < u.shape[1] else au


def _gradient_projected(g: Tensor, d: Tensor, root: LowRankRoot) -> Tensor:
    """``g U``, ``[b, G, r, k]``, likewise."""
    p, u = g.shape[3], root.squared[0]
    gu = rows_by(g, u[:, :p])
    if p == u.shape[1]:
        return gu
    return gu + d.sum(2).unsqueeze(-1) * u[:, p:]


def times(m: Tensor, root: LowRankRoot, scale: float) -> Tensor:
    """``scale m R`` of ``m [G, r, n]``, in float64: a pass over m and two products.

    ``m R = x + (x Q / t) (L - t) Q^T`` with ``x = t m``.
    """
    tail = root.tail[:, None, None].to(square_dtype(m))
    x = m * (tail if scale == 1 else scale * tail)
    over_tail, above = root.apart
    return x.baddbmm_(x @ over_tail.to(x.dtype), above.to(x.dtype))


def _sq(x: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1))
    return norms.square()
