r"""What a strategy is: how the noise of different steps is correlated.

A strategy is an invertible lower-triangular matrix C over the n steps of a run. Step t
gets ``x_t = (C^-1 z)_t`` with z independent: lower triangular, so that it needs no z of
the future. Releasing sums S with noise ``C^-1 z`` is releasing ``C S`` with noise z and
multiplying by C^-1 afterwards, so what an example may do is measured in the *columns*
of C: in step j it moves ``C S`` by at most the norm of column j times the clip bound.

Guarantees of every strategy here, checked when it is made:

- all column norms are at most ``1 + COLUMN_TOLERANCE``;
- the diagonal is positive.

A *block* is a range of steps with noise of its own. To begin one at step t is to forget
all x before it: the strategy is then ``C[t:, t:]``, whose columns are those of C, and
the columns of the block before lose entries. So norms never grow.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from curvedp.errors import ConfigurationError
from curvedp.noise.strategies.participation import Participation, pattern_sensitivity
from curvedp.noise.strategies.workloads import Floats

__all__ = ["COLUMN_TOLERANCE", "Strategy", "Vector"]

#: Rounding that a column norm may have above 1.
COLUMN_TOLERANCE = 1e-9

#: The noise of a step, for as many coordinates as it has.
Vector = Tensor | Floats

#: What is remembered of the noise of a block so far; secret.
Memory = tuple[Any, ...]


class Strategy(ABC):
    """A lower-triangular matrix over the steps, applied inversely and step by step."""

    kind: ClassVar[str]

    @property
    @abstractmethod
    def steps(self) -> int:
        """n, the steps it is made for."""

    @property
    @abstractmethod
    def bands(self) -> int | None:
        """Diagonals that are not zero, or None if all may be."""

    @property
    @abstractmethod
    def memory(self) -> int:
        """Vectors of a model's size that streaming has to remember."""

    @abstractmethod
    def materialize(self, steps: int | None = None) -> Floats:
        """``C [n, n]``, or its first steps."""

    @abstractmethod
    def next(self, noise: Vector, memory: Memory, step: int) -> tuple[Any, Memory]:
        """``x_t`` of a block from z_t and what is remembered; ``()`` begins a block.

        Linear in both and pure: arguments are left alone.
        """

    def column_norms(self) -> Floats:
        """Of C: what one example may do in each step, in units of the clip bound."""
        norms: Floats = np.linalg.norm(self.materialize(), axis=0)
        return norms

    def inverse(self, start: int = 0, steps: int | None = None) -> Floats:
        """Rows of C^-1 for the block from ``start`` on, ``[m, m]``."""
        count = (self.steps if steps is None else steps) - start
        rows, memory = np.zeros((count, count)), ()
        for k in range(count):
            unit = np.zeros(count)
            unit[k] = 1.0
            rows[k], memory = self.next(unit, memory, start + k)
        return rows

    def inverse_row_norms(self, start: int = 0) -> Floats:
        """Standard deviation of each step's noise, in units of that of z."""
        norms: Floats = np.linalg.norm(self.inverse(start), axis=1)
        return norms

    def sensitivity(self, participation: Participation) -> float:
        """Bound on how far one example moves ``C S``, in units of the clip bound.

        For contributions of any direction: the root of the largest sum of ``|X_ij|``
        over the steps of an admissible pattern. Without amplification by sampling.
        """
        c = self.materialize()
        return pattern_sensitivity(c.T @ c, self.bands, participation)

    @abstractmethod
    def arrays(self) -> dict[str, Floats]:
        """All that makes it, for a file."""

    def digest(self) -> str:
        """Equal for equal matrices."""
        found = hashlib.sha256(self.kind.encode())
        for name, array in sorted(self.arrays().items()):
            found.update(f"{name}{array.shape}".encode())
            found.update(np.ascontiguousarray(array, dtype="<f8").tobytes())
        return found.hexdigest()

    def check(self) -> None:
        """Refuse a matrix whose columns would let an example do more than is paid for.

        Raises:
            ConfigurationError: a column norm is above 1, or a value is no number.
        """
        norms = self.column_norms()
        largest = float(norms.max()) if np.isfinite(norms).all() else np.inf
        if not largest <= 1 + COLUMN_TOLERANCE:
            raise ConfigurationError(
                f"a column of the noise strategy has norm {largest:.6g}: an example "
                "could contribute more than the noise is made for",
                "divide it by that norm; C comes from X = C^T C by the *reversed* "
                "Cholesky factor, the plain one has unit rows instead",
            )


def combined(noise: Vector, scale: float, past: Memory, weights: Floats) -> Vector:
    """``scale z - sum_k w_k x_k``, in the precision of z."""
    if isinstance(noise, Tensor):
        mixed = noise * scale
        for x, weight in zip(past, weights, strict=False):
            mixed.add_(x, alpha=-float(weight))
        return mixed
    total = noise * scale
    for x, weight in zip(past, weights, strict=False):
        total = total - weight * x
    return total


def zeros_like(noise: Vector) -> Vector:
    """Zeros of the same form."""
    if isinstance(noise, Tensor):
        return torch.zeros_like(noise)
    return np.zeros_like(noise)
