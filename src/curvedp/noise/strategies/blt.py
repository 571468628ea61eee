r"""Buffered linear Toeplitz: all of the past in a few vectors, for large models.

``c_0 = 1``, ``c_k = sum_i w_i theta_i^(k-1)``, divided by the norm of the first column.
Solving ``C x = z`` needs one vector a term, ``s_i <- theta_i s_i + x``:

    x_t = norm z_t - sum_i w_i s_i.

C has no band: it is for runs in which examples take turns in a fixed order, without
amplification by sampling. (Dvijotham et al., "Efficient and Near-Optimal Noise
Generation for Streaming Differential Privacy", FOCS 2024.)
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from curvedp.errors import ConfigurationError
from curvedp.noise.strategies.base import (
    Memory,
    Strategy,
    Vector,
    combined,
    zeros_like,
)
from curvedp.noise.strategies.optimise import check_sizes
from curvedp.noise.strategies.participation import Participation
from curvedp.noise.strategies.workloads import Floats, Workload

__all__ = ["BufferedToeplitz", "optimise_blt"]

#: More are lost in rounding: their decays are roots of one polynomial.
_MOST_BUFFERS = 16


class BufferedToeplitz(Strategy):
    """A Toeplitz matrix whose columns are sums of a few geometric series.

    Args:
        weights: ``w_i``.
        decays: ``theta_i``, between 0 and 1.
        steps: n.
    """

    kind: ClassVar[str] = "blt"

    def __init__(self, weights: Floats, decays: Floats, steps: int) -> None:
        self.weights = np.array(weights, dtype=np.float64)
        self.decays = np.array(decays, dtype=np.float64)
        same = self.weights.shape == self.decays.shape and self.weights.ndim == 1
        if not (same and ((self.decays >= 0) & (self.decays < 1)).all()):
            raise ConfigurationError(
                "a buffered strategy has as many weights as decays, and decays from 0 "
                "up to below 1"
            )
        self._steps = steps
        plain = _column(self.weights, self.decays, steps)
        self._norm = float(np.linalg.norm(plain))
        self._coefficients = plain / self._norm
        self.check()

    @property
    def steps(self) -> int:
        return self._steps

    @property
    def bands(self) -> None:
        return None

    @property
    def memory(self) -> int:
        return len(self.weights)

    def materialize(self, steps: int | None = None) -> Floats:
        count = self._steps if steps is None else steps
        column = self._coefficients[:count]
        from scipy.linalg import toeplitz

        return np.asarray(toeplitz(column, np.zeros(count)))

    def next(self, noise: Vector, memory: Memory, step: int) -> tuple[Any, Memory]:
        past = memory or tuple(zeros_like(noise) for _ in self.weights)
        x = combined(noise, self._norm, past, self.weights)
        return x, tuple(t * s + x for t, s in zip(self.decays, past, strict=True))

    def column_norms(self) -> Floats:
        squares = np.cumsum(self._coefficients**2)
        norms: Floats = np.sqrt(squares[::-1])
        return norms

    def inverse_row_norms(self, start: int = 0) -> Floats:
        series = self._norm * _inverse(self.weights, self.decays, self._steps - start)
        norms: Floats = np.sqrt(np.cumsum(series**2))
        return norms

    def arrays(self) -> dict[str, Floats]:
        return {
            "weights": self.weights,
            "decays": self.decays,
            "length": np.array([float(self._steps)]),
        }


def optimise_blt(
    workload: Workload,
    steps: int,
    buffers: int = 4,
    participation: Participation | None = None,
) -> BufferedToeplitz:
    """Least ``sensitivity^2 tr(W X^-1)`` over strategies with so many buffers.

    Weights are positive and decays between 0 and 1, so columns fall and are positive,
    and the worst pattern takes part as early and as often as it may.

    Args:
        workload: with a Toeplitz root (prefix sums, momentum).
        steps: n.
        buffers: vectors that are remembered.
        participation: of an example; by default once.
    """
    check_sizes(steps, 1)
    if not 1 <= buffers <= _MOST_BUFFERS:
        raise ConfigurationError(
            f"{buffers} buffers", f"choose from 1 to {_MOST_BUFFERS}; 4 are nearly best"
        )
    column = workload.toeplitz(steps)
    if column is None:
        raise ConfigurationError(
            "a buffered strategy is designed for prefix sums, with or without momentum",
            "use a banded strategy for other workloads",
        )
    taking_part = participation or Participation(most=1)
    starts = np.arange(taking_part.count(steps)) * taking_part.separation
    left = np.arange(steps, 0, -1)

    def loss(free: Floats) -> float:
        weights, decays = _unpacked(free)
        own = _column(weights, decays, steps)
        pattern = np.zeros(steps)
        for start in starts:
            pattern[start:] += own[: steps - start]
        with np.errstate(over="ignore", invalid="ignore"):
            series = _convolved(column, _inverse(weights, decays, steps))
            value = math.log(float(left @ series**2)) + math.log(
                float(pattern @ pattern)
            )
        return value if math.isfinite(value) else 1e9

    # decays whose memories are spread over the run's length, weights of a square root
    spans = np.geomspace(2.0, max(4.0, steps), buffers)
    guess = np.concatenate([np.log(0.5 / spans**0.5 / buffers), np.log(spans)])
    from scipy.optimize import minimize

    found = minimize(
        loss, guess, method="L-BFGS-B", options={"maxiter": 500, "maxfun": 20000}
    )
    return BufferedToeplitz(*_unpacked(found.x), steps)


def _unpacked(free: Floats) -> tuple[Floats, Floats]:
    weights, spans = np.split(np.asarray(free), 2)
    # a decay of exp(-1 / span) forgets in about span steps
    return np.exp(np.clip(weights, -40, 5)), np.exp(-np.exp(-np.clip(spans, -3, 30)))


def _column(weights: Floats, decays: Floats, steps: int) -> Floats:
    powers = decays[:, None] ** np.arange(max(0, steps - 1))
    return np.concatenate([[1.0], weights @ powers])


def _inverse(weights: Floats, decays: Floats, steps: int) -> Floats:
    """First column of the inverse, before division by the norm."""
    from scipy.signal import lfilter

    below = np.poly(decays)[: len(decays) + 1]  # prod (1 - theta x), as a series in x
    above = below.copy()
    for k, weight in enumerate(weights):
        others = np.poly(np.delete(decays, k))
        above[1:] += weight * others
    pulse = np.zeros(steps)
    pulse[0] = 1.0
    return np.asarray(lfilter(below, above, pulse))


def _convolved(a: Floats, b: Floats) -> Floats:
    from scipy.signal import fftconvolve

    return np.asarray(fftconvolve(a, b))[: len(a)]
