r"""What noise does to a run: the matrix W in the error ``tr(W X^-1)`` of a strategy.

Step t of a run gets noise ``x_t = (C^-1 z)_t``, of covariance ``X^-1`` over the steps
with ``X = C^T C``. What counts is not this noise but what becomes of it: of ``A x``,
where A sums up a run's steps, the mean squared size is ``tr(A^T A X^-1)``. A workload
is ``W = A^T A``, or any other positive matrix over steps; it is public, and a wrong one
costs accuracy and never privacy.

==============  ====================================================================
prefix sums     ``A[t,j] = 1`` for j <= t: the noise in the parameters after each step
momentum        ``A[t,j] = 1 + beta + ... + beta^(t-j)``: the same for heavy-ball SGD
schedule        the same with learning rates that change
noise curve     the loss after the last step, on a quadratic with known eigenvalues
==============  ====================================================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from curvedp.errors import ConfigurationError

__all__ = [
    "Floats",
    "Momentum",
    "NoiseCurve",
    "PrefixSums",
    "Schedule",
    "Tail",
    "Workload",
    "workload_from_json",
]

Floats = npt.NDArray[np.float64]

#: Eigenvalues of W below this share of the largest are rounding errors.
_RANK_TOLERANCE = 1e-14


class Workload(ABC):
    """A positive semi-definite matrix over the steps of a run, of any length."""

    @abstractmethod
    def gram(self, steps: int) -> Floats:
        """``W [n, n]``."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Kind and settings; equal documents are equal workloads."""

    def toeplitz(self, steps: int) -> Floats | None:
        """First column of A, where ``W = A^T A`` for a Toeplitz A; otherwise None."""
        return None

    def root(self, steps: int) -> Floats:
        """Some ``A [r, n]`` with ``A^T A = W``."""
        column = self.toeplitz(steps)
        if column is not None:
            return _lower_toeplitz(column)
        values, vectors = np.linalg.eigh(self.gram(steps))
        kept = values > _RANK_TOLERANCE * values[-1]
        rooted: Floats = np.sqrt(values[kept])[:, None] * vectors[:, kept].T
        return rooted

    def error(self, inverse: Floats) -> float:
        """``tr(W X^-1)`` of ``C^-1 [n, n]``: squared error at a noise of size 1."""
        return float(np.square(self.root(len(inverse)) @ inverse).sum())


@dataclass(frozen=True)
class PrefixSums(Workload):
    """``W[i,j] = n - max(i,j)``: squared noise in the parameters, over all steps."""

    def gram(self, steps: int) -> Floats:
        order = np.arange(steps, dtype=np.float64)
        return steps - np.maximum.outer(order, order)

    def toeplitz(self, steps: int) -> Floats | None:
        return np.ones(steps)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "prefix"}


@dataclass(frozen=True)
class Momentum(Workload):
    """Prefix sums of ``v <- beta v + x``, which is what torch's SGD adds up.

    Attributes:
        beta: the momentum.
    """

    beta: float

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise ConfigurationError(
                f"the momentum of a workload is {self.beta!r}", "give 0 up to below 1"
            )

    def gram(self, steps: int) -> Floats:
        root = self.root(steps)
        return root.T @ root

    def toeplitz(self, steps: int) -> Floats | None:
        return np.cumsum(self.beta ** np.arange(steps, dtype=np.float64))

    def to_json(self) -> dict[str, Any]:
        return {"kind": "momentum", "beta": self.beta}


@dataclass(frozen=True)
class Schedule(Workload):
    """As momentum, with a learning rate for every step.

    Attributes:
        rates: of all steps, up to a factor.
        beta: the momentum; 0 without.
    """

    rates: tuple[float, ...]
    beta: float = 0.0

    def __post_init__(self) -> None:
        Momentum(self.beta)
        if not self.rates or not all(np.isfinite(r) and r >= 0 for r in self.rates):
            raise ConfigurationError(
                "a schedule has a learning rate of at least 0 for every step",
                "give as many numbers as there are steps",
            )

    def root(self, steps: int) -> Floats:
        if len(self.rates) != steps:
            raise ConfigurationError(
                f"the schedule has {len(self.rates)} learning rates for {steps} steps",
                "give one for every step",
            )
        filtered = _lower_toeplitz(self.beta ** np.arange(steps, dtype=np.float64))
        summed: Floats = np.cumsum(np.asarray(self.rates)[:, None] * filtered, axis=0)
        return summed

    def gram(self, steps: int) -> Floats:
        root = self.root(steps)
        return root.T @ root

    def to_json(self) -> dict[str, Any]:
        return {"kind": "schedule", "rates": list(self.rates), "beta": self.beta}


@dataclass(frozen=True)
class Tail:
    r"""Eigenvalues beyond those that were computed, as a fitted curve gives them.

    ``log mu_i = slope (log count - log i)^power + log least`` for i up to ``count``.

    Attributes:
        count: ``p+``, how many eigenvalues are positive.
        least: the last of them.
        slope: fitted.
        power: fitted.
    """

    count: int
    least: float
    slope: float
    power: float

    def grouped(self, after: int, groups: int = 200) -> tuple[Floats, Floats]:
        """Eigenvalues of number ``after + 1`` to ``count``, in groups of nearly equal.

        Returns:
            The mean value of each group, and how many are in it.
        """
        if after >= self.count:
            return np.zeros(0), np.zeros(0)
        number = np.arange(after + 1, self.count + 1, dtype=np.float64)
        distance = np.log(self.count) - np.log(number)
        values = self.least * np.exp(self.slope * distance**self.power)
        edges = np.unique(
            np.geomspace(after + 1, self.count + 1, groups + 1).astype(np.int64)
        )
        sums = np.add.reduceat(values, edges[:-1] - after - 1)
        counts = np.diff(edges).astype(np.float64)
        return sums / counts, counts


@dataclass(frozen=True)
class NoiseCurve(Workload):
    r"""Excess loss of noisy gradient descent on a quadratic, by its eigenvalues.

    ``W_last = V^T M V`` with ``V[i,j] = (1 - eta mu_i)^(n-j-1)``, ``M = diag(mu)``: the
    expected loss after n steps is above that without noise by ``eta^2/2 tr(W_last
    X^-1)``, for a constant learning rate and no momentum (Gu et al., theorem 1).

    With few distinct eigenvalues ``W_last`` is nearly singular and its best strategy
    degenerate: noise that grows a thousandfold, to cancel in the last step. So the
    workload is ``W_last + weight W_all / n``; W_all sums the same form over all ends.

    Attributes:
        eigenvalues: of the Hessian, without their multiplicities; negatives count as 0.
        counts: how often each of them occurs; by default once.
        learning_rate: eta.
        weight: of the other ends; 0 is the theorem alone.
    """

    eigenvalues: tuple[float, ...]
    learning_rate: float
    counts: tuple[float, ...] = ()
    weight: float = 0.01

    def __post_init__(self) -> None:
        if not np.isfinite([*self.eigenvalues, *self.counts]).all():
            raise ConfigurationError(
                "an eigenvalue of the spectrum is not a finite number",
                "leave it out",
            )
        if not self.eigenvalues or max(self.eigenvalues) <= 0:
            raise ConfigurationError(
                "the spectrum has no positive eigenvalue",
                "give those of a Hessian or of a Gauss-Newton matrix",
            )
        if self.counts and len(self.counts) != len(self.eigenvalues):
            raise ConfigurationError(
                f"{len(self.counts)} counts for {len(self.eigenvalues)} eigenvalues",
                "give one for each, or none",
            )
        if not self.learning_rate > 0:
            raise ConfigurationError(
                f"the learning rate of a noise curve is {self.learning_rate!r}",
                "give a positive number",
            )
        if not self.learning_rate * max(self.eigenvalues) < 2:
            raise ConfigurationError(
                f"gradient descent with learning rate {self.learning_rate:g} diverges "
                f"where the curvature is {max(self.eigenvalues):g}",
                f"use one below {2 / max(self.eigenvalues):.3g}",
            )

    @classmethod
    def of(
        cls,
        eigenvalues: Sequence[float] | Floats,
        learning_rate: float,
        tail: Tail | None = None,
        weight: float = 0.01,
    ) -> NoiseCurve:
        """From the largest eigenvalues, with multiplicities, and a fitted tail."""
        known = np.maximum(np.asarray(eigenvalues, dtype=np.float64), 0.0)
        values, counts = np.unique(known, return_counts=True)
        if tail is not None:
            more, often = tail.grouped(len(known))
            values, counts = np.append(values, more), np.append(counts, often)
        return cls(
            tuple(map(float, values)), learning_rate, tuple(map(float, counts)), weight
        )

    def gram(self, steps: int) -> Floats:
        mu = np.maximum(np.asarray(self.eigenvalues), 0.0)
        often = np.asarray(self.counts) if self.counts else np.ones(len(mu))
        often, mu = often[mu > 0], mu[mu > 0]
        decay = 1.0 - self.learning_rate * mu
        order = np.arange(steps)
        # sums of mu rho^s over the spectrum, for every s that occurs
        moments = _moments(often * mu, decay, 2 * steps - 1)
        last: Floats = moments[2 * steps - 2 - np.add.outer(order, order)]
        if not self.weight:
            return last
        geometric = self.learning_rate * mu * (2 - self.learning_rate * mu)
        series = _moments(often * mu / geometric, decay, 2 * steps + 1)
        apart = np.abs(np.subtract.outer(order, order))
        left = steps - np.maximum.outer(order, order)
        ends: Floats = series[apart] - series[apart + 2 * left]
        total: Floats = last + self.weight / steps * ends
        return total

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "noisecurve",
            "eigenvalues": list(self.eigenvalues),
            "counts": list(self.counts),
            "learning_rate": self.learning_rate,
            "weight": self.weight,
        }


def workload_from_json(document: dict[str, Any]) -> Workload:
    """Read back what ``to_json`` wrote."""
    own = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in document.items()
        if name != "kind"
    }
    kinds: dict[str, type[Workload]] = {
        "prefix": PrefixSums,
        "momentum": Momentum,
        "schedule": Schedule,
        "noisecurve": NoiseCurve,
    }
    if document.get("kind") not in kinds:
        raise ConfigurationError(
            f"unknown workload {document.get('kind')!r}",
            f"choose one of: {', '.join(kinds)}",
        )
    return kinds[document["kind"]](**own)


def _moments(weights: Floats, bases: Floats, count: int) -> Floats:
    """``sum_i w_i rho_i^s`` for s = 0, ..., count - 1."""
    sums, powers = np.empty(count), weights.copy()
    for s in range(count):
        sums[s] = powers.sum()
        powers *= bases
    return sums


def _lower_toeplitz(column: Floats) -> Floats:
    n = len(column)
    padded = np.concatenate([np.zeros(n - 1), column])
    rows = np.lib.stride_tricks.sliding_window_view(padded, n)
    return np.ascontiguousarray(rows[:, ::-1])
