r"""How much rounding can hide of a norm: proven bounds, and products that keep to them.

u is the unit round-off of the additions, eta the smallest normal number (smaller ones
may be flushed to zero). In whatever order n products are added up
(Higham 2002, "Accuracy and Stability of Numerical Algorithms", 3.1 and 3.5)

    |fl(x . y) - x . y|  <=  gamma_n |x| . |y| + n eta,     gamma_n = n u / (1 - n u),

and ``|x| . |y| <= ||x|| ||y||``. It follows, with ``S = ||d|| ||a||``, which is at
least ``sum_t ||d_t|| ||a_t||`` (Cauchy-Schwarz):

1. *Gram.* ``sum_{t,s} (a_t . a_s)(d_t . d_s)`` has terms of at most
   ``||a_t|| ||a_s|| ||d_t|| ||d_s||``, whose sum is at most ``S^2``. The inner products
   are off by ``gamma_p`` and ``gamma_r`` of that, the sum, a row at a time, by
   ``2 gamma_T``: the square is off by at most ``gamma_{p + r + 2T + 8} S^2``, where 8
   stands for single operations. Underflow adds ``eta T (p ||d||^2 + r ||a||^2)``.
2. *Instantiate.* Every entry of ``g = sum_t d_t a_t^T`` is off by ``gamma_T`` of
   ``sum_t |d_t| |a_t|^T``, a matrix no longer than S: the norm is off by at most
   ``gamma_{T + 8} S``.
3. *Length.* A sum of n squares has no cancellation: it is off by ``gamma_n`` of itself,
   and by ``n eta`` for squares that vanish. Rows (or columns) are added up one by one
   and then in float64, so n is the length of a row.
4. *Map.* For ``x R``, R of rank k beside a multiple of the identity,
   ``x t + ((x Q) E) Q^T``: the first product is off by ``gamma_p |x| |Q|``, not longer
   than ``gamma_p sqrt(k) ||x||``, as ``|| |Q| || <= ||Q||_F = sqrt(k)``; likewise the
   second. Together at most ``gamma_{p + k + 16} sqrt(k) ||R|| ||x||``; for a full R,
   whose ``|| |R| ||`` is at most ``sqrt(p) ||R||``, k is p. In g the rows of x meet the
   d_t, and nothing is longer than ``||R|| S`` times that factor.

Products of bfloat16 numbers are exact in float32. Tensor cores add them up in blocks
with truncation in place of rounding, and align the terms of a block to the largest one:
each addition is off by at most ``2^-23`` of the sum of absolute values, and so is each
alignment (Fasi, Higham, Mikaitis, Pranesh 2021, "Numerical behavior of NVIDIA tensor
cores"). ``u = 2^-22`` covers both. A float32 number is written as two bfloat16 numbers,
``|x - (x_1 + x_2)| <= 2^-16 |x|``: rows are perturbed by ``2^-16`` of their length, and
the norm of g by ``2^-16 S`` for each factor that was split (and the product of both).

*What others round.* The bounds above are about one example. In the sum over a batch,
which way a term is rounded depends on everybody, and an example whose terms are far
longer than what is left of them rounds much. So an example never counts for less than
``S / REACH`` (:func:`counted`): clipped to C, its terms are then ``REACH C`` long at
most, whatever they cancel to. Ordinary gradients are a twentieth of S or more, and keep
their norm; one that cancels to less than ``1 / REACH`` contributes less than C.

*Uses that cancel.* Those of a layer that is called twice, or of a weight that modules
share, each have a sum of their own over the whole batch. It is ``B REACH C`` long at
worst, whatever is left of an example, so these sums are added up in float64
(:func:`curvedp.layers.io.uses_together`). With n terms in all, in whatever order, the
sum is off by ``gamma_n B REACH C`` at most, 2.4e-4 C for two neighbours together at
65,536 rows of two uses; that is less than what contributions are shortened by.

These bounds are worst cases. Rounding errors are mostly independent, and then grow like
``sqrt(n) u``; no guarantee rests on that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from curvedp.layers.precision import ROUNDING, short_products

__all__ = [
    "REACH",
    "SPLIT",
    "TINY",
    "counted",
    "gamma",
    "lost",
    "over_groups",
    "product",
    "raised",
    "sq_length",
    "terms_of",
    "unit",
]

#: How long the terms of a clipped example may be, in bounds, by dtype of the sum.
REACH = {torch.float32: 2.0**7, torch.float64: 2.0**30}

#: Square of the length of rows from which on an example counts as not finite: times its
#: weight, the longer factor of ``c_i d_t a_t^T`` might overflow although the product
#: would not.
LONGEST = 2.0**200

#: Unit round-off of sums on tensor cores; see the module's docstring.
TENSOR_CORE = 2.0**-22

#: What is lost where a float32 number is written as two bfloat16 numbers.
SPLIT = 2.0**-16

#: Since 2.8 torch has products of bfloat16 numbers whose sums it does not round again.
_SHORT_IN_LONG_OUT = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)

#: eta, by dtype of the sums.
TINY = {torch.float32: 2.0**-126, torch.float64: 2.0**-1022}


def unit(x: Tensor) -> float:
    """U of products of ``x``, as :func:`product` computes them."""
    return TENSOR_CORE if short_products(x) else ROUNDING[_summed(x)]


def gamma(n: int, u: float) -> float:
    """``n u / (1 - n u)``; infinite where it bounds nothing any more."""
    return n * u / (1 - n * u) if n * u < 1 else float("inf")


def raised(squares: Tensor, error: Tensor) -> Tensor:
    """``(sqrt(squares) + error)^2``: the norm with a rounding error of that length.

    Raising the square by ``error^2`` instead would do only for an error that is
    orthogonal to the vector, and rounding may point along it.
    """
    return (squares.sqrt() + error).square()


def counted(
    squares: Tensor, terms: Tensor, rounding: float, summed_in: torch.dtype
) -> Tensor:
    """``max(sqrt(squares) + rounding S, S / REACH)^2``: what clipping goes by.

    Args:
        squares: ``||g_i||^2``, not below the truth, ``[B]``.
        terms: S, the length of the terms that ``g_i`` is a sum of, stretched by as much
            as a map may stretch the sum's rounding.
        rounding: of ``g_i``, relative to S.
        summed_in: dtype of the clipped sum.
    """
    norms = squares.sqrt().add(terms, alpha=rounding)
    return torch.maximum(norms, terms / REACH[summed_in]).square()


def terms_of(sq_a: Tensor, sq_d: Tensor) -> Tensor:
    """``S^2 = sum_G ||a||^2 ||d||^2``, ``[B]``; infinite where a factor is too long.

    Args:
        sq_a: ``||a||^2``, ``[B, G]``, float64; groups are disjoint parts of ``g_i``.
        sq_d: ``||d||^2``, likewise.
    """
    longest = torch.maximum(sq_a, sq_d)  # a nan stays one
    return over_groups((sq_a * sq_d).masked_fill_(longest > LONGEST, torch.inf))


def over_groups(x: Tensor) -> Tensor:
    """The sum of ``[B, G]`` over G, ``[B]``; of one group without an operation."""
    return x[:, 0] if x.shape[1] == 1 else x.sum(1)


def lost(*factors: Tensor) -> float:
    """What :func:`product` loses of its factors, relative to their lengths."""
    kept = 1.0
    for x in factors:
        if short_products(x) and x.dtype != torch.bfloat16:
            kept *= 1 + SPLIT
    return kept - 1


def product(x: Tensor, y: Tensor) -> Tensor:
    """``x @ y`` of ``[B, G, m, n]`` and ``[B, G, n, k]``, for norms."""
    if not short_products(x):
        return x @ y
    total: Tensor | None = None
    for part in _short(x):
        for other in _short(y):
            piece = _short_product(part, other)
            total = piece if total is None else total + piece
    assert total is not None
    return total


def _short(x: Tensor) -> tuple[Tensor, ...]:
    """Bfloat16 numbers whose sum it is."""
    if x.dtype == torch.bfloat16:
        return (x,)
    high = x.bfloat16()
    return high, (x - high).bfloat16()


def _short_product(x: Tensor, y: Tensor) -> Tensor:
    if x.device.type != "cuda" or not _SHORT_IN_LONG_OUT:  # the same, a bit better
        return x.float() @ y.float()
    lead = x.shape[:-2]
    with _float32_reductions():
        found = torch.bmm(x.flatten(0, -3), y.flatten(0, -3), out_dtype=torch.float32)
    return found.reshape(*lead, *found.shape[-2:])


@contextmanager
def _float32_reductions() -> Iterator[None]:
    """A product that is cut in pieces may be put together in bfloat16 otherwise."""
    switch = torch.backends.cuda.matmul
    before = switch.allow_bf16_reduced_precision_reduction
    switch.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        switch.allow_bf16_reduced_precision_reduction = before


def sq_length(x: Tensor) -> Tensor:
    """``||x||^2`` over the last two dimensions, float64, not below the truth."""
    if x.dtype == torch.float64:
        norms: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1))
        return norms.square()
    first = -2 if x.stride(-2) == 1 else -1  # whichever lies together in memory
    rows: Tensor = torch.linalg.vector_norm(x, dim=first, dtype=_summed(x))
    n, u = x.shape[first], ROUNDING[torch.float32]
    squares = rows.double().square().sum(-1)
    tiny = x.shape[-1] * x.shape[-2] * TINY[torch.float32]
    return squares * (1 + gamma(n + 8, u)) + tiny


def _summed(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
