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
from curvedp.layers.precision import ROUNDING
from curvedp.layers.rounding import terms_of
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
    w = root.squared[1].unsqueeze(-2)  # [G, 1, k]
    if t > 1 and method is NormMethod.GRAM:
        au = _projected(a, root)

        def kernel(products: Tensor, i: slice, j: slice) -> Tensor:
            inside = (au[:, :, i] * w) @ au[:, :, j].mT
            return inside + tail[:, None, None] * (products + ones)

        squares, in_a, in_d = gram_sum(a, d, kernel)
        spread = terms_of(in_a + ones * t, in_d)
        return _not_below(squares, spread, root, p + r + t)
    in_a, in_d = _sq(a) + ones * t, _sq(d)  # [b, G]
    spread = terms_of(in_a, in_d)
    if t == 1:
        inside = (_projected(a, root).square() * w).sum((-2, -1))
        squares = (in_d * (tail * in_a + inside)).sum(1)
    else:
        g, column = d.mT @ a, ones * d.sum(2).unsqueeze(-1)
        gu = _gradient_projected(g, d, root)
        inside = (gu.square() * w).sum((-2, -1))
        squares = (tail * (_sq(g) + _sq(column)) + inside).sum(1)
    return _not_below(squares, spread, root, p + r + t)


def _not_below(
    squares: Tensor, spread: Tensor, root: LowRankRoot, terms: int
) -> tuple[Tensor, Tensor]:
    """Raised by what rounding can hide of inner products of so many terms."""
    terms = 8 * (terms + root.vectors.shape[-1])
    hidden = (terms * ROUNDING[torch.float64]) * (root.squared_largest * spread)
    return squares.clamp_min(0) + hidden, spread


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


def times(
    weight: Tensor, bias: Tensor | None, root: LowRankRoot, scale: float
) -> tuple[Tensor, Tensor | None]:
    """``scale g R`` of ``g = [weight [G, r, p], bias [G, r, 1]]``, in the same parts.

    Side by side weight and bias would be copied twice.
    """
    p = weight.shape[-1]
    q = root.vectors.to(weight.dtype)
    own, last = q[:, :p], q[:, p:]
    tail, extra = root.tail[:, None, None].to(weight.dtype), root.extra
    if scale != 1:
        tail, extra = scale * tail, scale * extra
    inside = weight @ own
    if bias is not None:
        inside += bias * last
    inside *= extra.to(weight.dtype)
    mapped = (weight * tail).baddbmm_(inside, own.mT)
    if bias is None:
        return mapped, None
    return mapped, (bias * tail).baddbmm_(inside, last.mT)


def _sq(x: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1))
    return norms.square()
