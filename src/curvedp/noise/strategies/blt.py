r"""Buffered linear Toeplitz: all of the past in a few vectors, for large models.

``c_0 = 1``, ``c_k = sum_i w_i theta_i^(k-1)``, divided by the norm of the first column.
Solving ``C x = z`` needs one vector a term, ``s_i <- theta_i s_i + x``:

    x_t = norm z_t - sum_i w_i s_i.

C has no band: it is for runs in which examples take turns in a fixed order, without
amplification by sampling. (Dvijotham et al., "Efficient and Near-Optimal Noise
Generation for Streaming Differential Privacy", FOCS 2024.) Poles and residues of C and
of its inverse are what is optimised, never the coefficients of polynomials.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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

#: More hardly lower the error: six are within 1e-4 of the least at 10,000 steps.
_MOST_BUFFERS = 16

#: Of the logarithm of the error. A buffer that brought less is followed by none better.
_WORTHWHILE = 1e-8

Indices = NDArray[np.int64]


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
    left = np.arange(steps, 0, -1, dtype=np.float64)

    def found(start: Floats) -> tuple[float, Floats]:
        return _minimum(start, column, starts, left)

    value, best = found(np.array([-math.log(steps), 0.0]))  # as long as the run
    gain = math.inf
    for _ in range(1, buffers):
        # the old ones, before them a pair that cancels: as good as without it
        same = np.concatenate([[best[0] - 1.0, -30.0, 0.0], best[1:]])
        if gain < _WORTHWHILE:
            best = same
            continue
        least, best = min((found(_respaced(best)), found(same)), key=lambda x: x[0])
        gain, value = value - least, least
    decays, _, weights, _ = (x.numpy() for x in _series(torch.from_numpy(best)))
    return BufferedToeplitz(weights, decays, steps)


# -- poles and residues ---------------------------------------------------------------


def _minimum(
    start: Floats, column: Floats, starts: Indices, left: Floats
) -> tuple[float, Floats]:
    """The least that is found from there, and where."""
    from scipy.optimize import minimize

    def loss(free: Floats) -> tuple[float, Floats]:
        x = torch.tensor(free, dtype=torch.float64, requires_grad=True)
        value = _log_cost(x, column, starts, left)
        if not torch.isfinite(value):
            return 1e9, np.zeros_like(free)
        (slope,) = torch.autograd.grad(value, x)
        return value.item(), slope.numpy()

    bounds = [(-30.0, 3.0), *[(-30.0, 5.0)] * (len(start) - 1)]
    options = {"maxiter": 1000, "maxfun": 5000, "ftol": 1e-14, "gtol": 1e-9}
    result = minimize(
        loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options
    )
    return float(result.fun), np.asarray(result.x)


def _respaced(fewer: Floats) -> Floats:
    """Rates that are spread like the old ones, two more of them."""
    rates = np.cumsum(np.concatenate([fewer[:1], np.exp(fewer[1:-1])]))
    rates = np.append(rates, max(0.0, rates[-1] + 0.5))
    more, old = np.linspace(0, 1, len(fewer) + 1), np.linspace(0, 1, len(rates))
    spread = np.interp(more, old, rates)
    return np.concatenate([spread[:1], np.log(np.diff(spread)), [0.0]])


def _series(free: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Decays of C and of its inverse, and their residues.

    With ``y = 1 / x``, ``c = prod (y - lambda_i) / prod (y - theta_i)``. For positive
    weights poles and roots take turns, ``theta_1 > lambda_1 > theta_2 > ...``, so logs
    of the rates ``-log theta`` and ``-log lambda`` rise, by ``exp`` of what is free.
    The last root alone may be negative, down to -1. Differences are those of
    ``1 - theta``, which keep their digits near 1.
    """
    rises = torch.cat([free[:1], free[1:-1].exp()]).cumsum(0).exp()
    gone = -torch.expm1(-rises)
    last = gone[-1] + (2 - gone[-1]) * free[-1].sigmoid()
    of_theta, of_lam = gone[::2], torch.cat([gone[1::2], last.unsqueeze(0)])
    theta = torch.exp(-rises[::2])
    lam = torch.cat([torch.exp(-rises[1::2]), 1 - last.unsqueeze(0)])
    across = of_lam.unsqueeze(0) - of_theta.unsqueeze(1)  # theta_i - lambda_j
    return theta, lam, _residues(across, of_theta), -_residues(-across.mT, of_lam).abs()


def _residues(numerators: Tensor, gone: Tensor) -> Tensor:
    """``prod_j (p_i - q_j) / prod_(j != i) (p_i - p_j)``, a ratio at a time."""
    own = gone.unsqueeze(0) - gone.unsqueeze(1)  # p_i - p_j
    eye = torch.eye(len(gone), dtype=torch.bool)
    return (numerators / torch.where(eye, 1.0, own)).prod(1)


def _log_cost(free: Tensor, column: Floats, starts: Indices, left: Floats) -> Tensor:
    """Log of the squared sensitivity times the error."""
    theta, lam, weights, inverse = _series(free)
    steps = len(left)
    powers = torch.arange(steps - 1, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)

    def summed(decays: Tensor, residues: Tensor) -> Tensor:
        terms = decays.unsqueeze(1) ** powers
        return torch.cat([one, residues @ terms])

    own = summed(theta, weights)
    pattern = torch.zeros(steps, dtype=torch.float64)
    for start in starts.tolist():
        pattern = pattern + torch.nn.functional.pad(own, (start, 0))[:steps]
    n = 2 * steps
    spectrum = torch.fft.rfft(summed(lam, inverse), n)
    spectrum = spectrum * torch.fft.rfft(torch.from_numpy(column), n)
    series = torch.fft.irfft(spectrum, n)[:steps]
    error = torch.from_numpy(left) @ series.square()
    cost: Tensor = error.log() + pattern.square().sum().log()
    return cost


def _column(weights: Floats, decays: Floats, steps: int) -> Floats:
    powers = decays[:, None] ** np.arange(max(0, steps - 1))
    return np.concatenate([[1.0], weights @ powers])


def _inverse(weights: Floats, decays: Floats, steps: int) -> Floats:
    """First column of the inverse, before division by the norm: the recursion itself.

    Roots of a polynomial with so many coefficients would lose all digits: with 12
    buffers they gave inverse rows 6e21 long.
    """
    column, past = np.zeros(steps), np.zeros_like(decays)
    for k in range(steps):
        column[k] = float(k == 0) - weights @ past
        past = decays * past + column[k]
    return column
