"""Second moments that can be added up: ``sum_n w_n x_n x_n^T`` with its weight.

A moment is kept as weighted rows while there are fewer of them than dimensions, and as
a matrix from then on. Eigenvectors come from the Gram matrix of the rows or from the
matrix itself, whichever is smaller; nobody else has to know which.

Leading dimensions (the groups of a convolution) are separate moments side by side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["SecondMoment", "Spectrum"]

#: Eigenpairs are found by iteration if there are this many times more of them, with as
#: many vectors more than asked for and as many rounds.
_FEW, _MORE, _ROUNDS = 4, 16, 4


@dataclass(frozen=True)
class Spectrum:
    """Eigenvectors and eigenvalues, the largest first, of a moment's *mean*.

    Attributes:
        values: ``[G, k]``, not negative.
        vectors: ``[G, n, k]``, orthonormal columns.
        size: n. Where k < n, the other eigenvalues are zero or were left out.
        trace: ``[G]``, the sum of all eigenvalues.
    """

    values: Tensor
    vectors: Tensor
    trace: Tensor

    @property
    def size(self) -> int:
        return self.vectors.shape[-2]

    def top(self, k: int) -> Spectrum:
        """The k largest."""
        return Spectrum(self.values[..., :k], self.vectors[..., :k], self.trace)


@dataclass(frozen=True)
class SecondMoment:
    """A sum of outer products and its weight; a monoid under ``+``.

    Attributes:
        weight: total weight of the vectors.
        rows: ``[G, m, n]`` with ``sum = rows^T rows``, or None.
        matrix: ``[G, n, n]``, the sum itself, or None.
    """

    weight: float
    rows: Tensor | None = None
    matrix: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor, weight: float) -> SecondMoment:
        """Of the rows ``x [G, m, n]``, which count as ``weight`` vectors."""
        return cls(weight, rows=x)._settled()

    @property
    def size(self) -> int:
        """Dimension n."""
        return self._tensor.shape[-1]

    @property
    def groups(self) -> int:
        """G."""
        return self._tensor.shape[0]

    @property
    def _tensor(self) -> Tensor:
        tensor = self.rows if self.matrix is None else self.matrix
        assert tensor is not None
        return tensor

    def __add__(self, other: SecondMoment) -> SecondMoment:
        weight = self.weight + other.weight
        if self.rows is not None and other.rows is not None:
            rows = torch.cat([self.rows, other.rows], -2)
            return SecondMoment(weight, rows=rows)._settled()
        return SecondMoment(weight, matrix=self.total() + other.total())

    def scaled(self, factor: float) -> SecondMoment:
        """All weights times a factor that is not negative; the mean stays."""
        if self.rows is not None:
            return SecondMoment(factor * self.weight, math.sqrt(factor) * self.rows)
        return SecondMoment(factor * self.weight, matrix=factor * self.total())

    def total(self) -> Tensor:
        """``sum_n w_n x_n x_n^T``, ``[G, n, n]``."""
        if self.matrix is not None:
            return self.matrix
        assert self.rows is not None
        return self.rows.mT @ self.rows

    def mean(self) -> Tensor:
        """``total() / weight``; zero where nothing was added."""
        return self.total() / max(self.weight, torch.finfo(torch.float32).tiny)

    def trace(self) -> Tensor:
        """Of the mean, ``[G]``, float64."""
        weight = max(self.weight, torch.finfo(torch.float32).tiny)
        if self.rows is not None:
            return self.rows.double().square().sum((-2, -1)) / weight
        return self.total().double().diagonal(dim1=-2, dim2=-1).sum(-1) / weight

    def spectrum(self, largest: int | None = None) -> Spectrum:
        """Eigenvalues and eigenvectors of the mean, in float64.

        Args:
            largest: how many; all that are not known to be zero by default. A few of
                many are found by iteration (:func:`_leading`): where eigenvalues are
                close to each other the vectors may be others of nearly the same value.
        """
        weight = max(self.weight, torch.finfo(torch.float32).tiny)
        if largest is not None and _FEW * (largest + _MORE) < min(
            self._tensor.shape[1:]
        ):
            values, vectors = _leading(self, largest)
            return Spectrum(values / weight, vectors, self.trace())
        if self.rows is not None:
            values, vectors = _thin(self.rows.double())
            values = values / weight
        else:
            values, vectors = torch.linalg.eigh(self.total().double() / weight)
            values, vectors = values.flip(-1).clamp_min(0), vectors.flip(-1)
        found = Spectrum(values, vectors, self.trace())
        return found if largest is None else found.top(largest)

    def _settled(self) -> SecondMoment:
        """As a matrix, if that is smaller."""
        if self.rows is not None and self.rows.shape[-2] >= self.rows.shape[-1]:
            return SecondMoment(self.weight, matrix=self.rows.mT @ self.rows)
        return self


def _leading(moment: SecondMoment, count: int) -> tuple[Tensor, Tensor]:
    """The largest eigenpairs of a moment's total, by iteration on a subspace.

    All eigenvectors of a large matrix take seconds; these take a few products with it.
    The start is the same every time. The vectors are orthonormal, and the values, those
    of the matrix in their span, are at most the true ones.
    """
    x = moment._tensor.double()
    of_rows = moment.rows is not None
    generator = torch.Generator().manual_seed(0)
    shape = (x.shape[0], x.shape[-1], count + _MORE)
    start = torch.randn(shape, generator=generator, dtype=torch.float64).to(x.device)

    def times(y: Tensor) -> Tensor:
        return x.mT @ (x @ y) if of_rows else x @ y

    q, _ = torch.linalg.qr(times(start))
    for _ in range(_ROUNDS):
        q, _ = torch.linalg.qr(times(times(q)))
    values, turned = torch.linalg.eigh(q.mT @ times(q))
    vectors = q @ turned.flip(-1)[..., :count]
    return values.flip(-1)[..., :count].clamp_min(0), vectors


def _thin(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenpairs of ``rows^T rows`` from the smaller ``rows rows^T``, largest first.

    Much faster than an SVD, on GPUs above all. Eigenvalues below 1e-10 of the largest
    are zero to the precision of the probes, and so is what remains of their vectors.
    """
    values, left = torch.linalg.eigh(rows @ rows.mT)
    values, left = values.flip(-1).clamp_min(0), left.flip(-1)
    kept = int((values > 1e-10 * values[..., :1]).sum(-1).max())
    values, left = values[..., : max(1, kept)], left[..., : max(1, kept)]
    lengths = values.clamp_min(torch.finfo(values.dtype).tiny).sqrt()
    vectors = rows.mT @ left / lengths.unsqueeze(-2)
    if rows.shape[0] == 1:
        return values, vectors
    # groups keep equally many; a pair too small for its own group is orthonormalised
    q, r = torch.linalg.qr(vectors)
    signs = r.diagonal(dim1=-2, dim2=-1).sign()
    return values, q * torch.where(signs == 0, 1.0, signs).unsqueeze(-2)
