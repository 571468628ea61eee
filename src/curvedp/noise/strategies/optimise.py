r"""The best banded strategy for a workload.

    minimise tr(W X^-1)   over X = C^T C with X_jj = 1, X_ij = 0 for |i-j| >= b, X > 0

is convex in the free entries of X. L-BFGS in float64, from the best Toeplitz matrix, so
that what is left to find is small. With ``W = A^T A`` and ``Y = X^-1 A^T``, the
gradient in ``X_ij`` is ``-2 (Y Y^T)_ij``; both come from one factorisation of X in
blocks of the band's width, in O(n^2 b) operations, where a dense one has O(n^3).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from curvedp.errors import ConfigurationError
from curvedp.noise.strategies.banded import Banded, BandedToeplitz, inverse_series
from curvedp.noise.strategies.workloads import Floats, Workload

__all__ = ["check_sizes", "optimise_banded", "optimise_toeplitz", "quadratic_form"]

#: Noise of one step beside that of z. A degenerate workload wants it without bound.
LARGEST_STEP = 100.0
#: Relative gain of ten iterations at which the search ends, 1e-5 above the optimum.
_GAIN = 3e-6
_MOST_ITERATIONS = 1000
#: Pairs of steps and gradients that L-BFGS keeps.
_PAIRS = 30
#: Blocks narrower than this spend their time on calls, not on arithmetic.
_LEAST_BLOCK = 32
#: Any workload without a Toeplitz root is a matrix of this size at most (1 GiB).
_LARGEST_DENSE = 8192
#: A search passes over all steps thousands of times.
_MOST_STEPS = 1 << 22
#: Numbers of a strategy's matrix (512 MiB).
_MOST_ENTRIES = 1 << 26


def optimise_banded(
    workload: Workload, steps: int, bands: int, *, block: int | None = None
) -> Banded:
    """The banded strategy of least error.

    Args:
        workload: W.
        steps: n.
        bands: b, at most n.
        block: steps after which noise begins anew (a refresh of the whitener): entries
            of X between two blocks are zero.
    """
    check_sizes(steps, bands)
    if bands == 1:
        return Banded(np.ones((1, steps)))
    if steps > _LARGEST_DENSE:
        raise ConfigurationError(
            f"a banded strategy for {steps} steps would take hours to find",
            "use the strategy 'toeplitz': its error is within one per cent of the best",
        )
    problem = _Problem(workload.root(steps), steps, bands, block)
    start = _start(workload, steps, bands)
    return _bounded(problem.band(_minimise(problem, problem.free(start))))


def _bounded(band: Floats) -> Banded:
    """The strategy of X, moved towards the identity as far as its noise demands.

    ``(1 - share) X + share I`` has a unit diagonal and no eigenvalue below the share,
    so the noise of a step is at most ``share^-1/2``.
    """
    for share in (0.0, 1e-8, 1e-7, 1e-6, 1e-5, LARGEST_STEP**-2):
        moved = (1 - share) * band
        moved[0] = 1.0
        try:
            found = Banded.from_gram(moved)
        except np.linalg.LinAlgError:
            continue
        if found.inverse_row_norms().max() <= LARGEST_STEP:
            break
    return found


def optimise_toeplitz(workload: Workload, steps: int, bands: int) -> BandedToeplitz:
    """The banded Toeplitz strategy of least error, with columns of norm 1."""
    check_sizes(steps, bands)
    if bands == 1:
        return BandedToeplitz(np.ones(1), steps)
    loss = _toeplitz_loss(workload, steps, bands)
    from scipy.optimize import minimize

    found = minimize(
        loss,
        _square_root_series(bands)[1:],
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 2000, "maxfun": 4000, "ftol": 1e-14, "gtol": 1e-10},
    )
    coefficients = np.concatenate([[1.0], found.x])
    return BandedToeplitz(coefficients / np.linalg.norm(coefficients), steps)


def check_sizes(steps: int, bands: int) -> None:
    """Refuse bands that do not fit, and sizes beyond all memory and patience."""
    if not 1 <= bands <= steps:
        raise ConfigurationError(
            f"{bands} bands for {steps} steps", "choose from 1 up to the steps"
        )
    if steps > _MOST_STEPS or steps * bands > _MOST_ENTRIES:
        raise ConfigurationError(
            f"{bands} bands for {steps} steps are more than can be designed",
            f"use up to {_MOST_STEPS} steps and {_MOST_ENTRIES} steps times bands, or "
            "independent noise (dp-sgd)",
        )


# -- Toeplitz --------------------------------------------------------------------------

#: From c_1, ..., c_{b-1} (c_0 = 1) to the log of the error and its gradient.
_Loss = Callable[[Floats], tuple[float, Floats]]


def _square_root_series(count: int) -> Floats:
    """``(1 - x)^(-1/2)``: the best full Toeplitz matrix for prefix sums, nearly."""
    k = np.arange(1, count)
    return np.concatenate([[1.0], np.cumprod((2 * k - 1) / (2 * k))])


def _toeplitz_loss(workload: Workload, steps: int, bands: int) -> _Loss:
    """Log of ``||c||^2 tr(W X^-1)``; with r the first column of C^-1 it is quadratic.

    ``c * r = 1`` as series, so ``dr = -r * dc * r``.
    """
    quadratic = quadratic_form(workload, steps)

    def loss(free: Floats) -> tuple[float, Floats]:
        c = np.concatenate([[1.0], free])
        with np.errstate(over="ignore", invalid="ignore"):
            r = inverse_series(c, steps)
            if not np.isfinite(r).all() or np.abs(r).max() > 1e6:
                return 1e6, np.zeros(bands - 1)  # a step too far: the series explodes
            value, slope = quadratic(r)
            twice = _convolved(r, r)
        by_c = -_correlated(slope, twice)[:bands] / value + 2 * c / (c @ c)
        return math.log(value) + math.log(c @ c), by_c[1:]

    return loss


def quadratic_form(
    workload: Workload, steps: int
) -> Callable[[Floats], tuple[float, Floats]]:
    """``tr(W R R^T)`` of a Toeplitz R with first column r, and its gradient in r."""
    column = workload.toeplitz(steps)
    if column is not None:
        left = np.arange(steps, 0, -1, dtype=np.float64)

        def by_series(r: Floats) -> tuple[float, Floats]:
            summed = _convolved(column, r)
            return float(left @ summed**2), _correlated(2 * left * summed, column)

        return by_series
    if steps > _LARGEST_DENSE:
        raise ConfigurationError(
            f"this workload is a matrix of {steps} x {steps} numbers",
            "use prefix sums, with or without momentum, for runs of this length",
        )
    # all columns of R are r, shifted: their forms add up along the diagonals of W
    form = workload.gram(steps)
    for k in range(steps - 2, -1, -1):
        form[k, :-1] += form[k + 1, 1:]
        form[k + 1 :, k] = form[k, k + 1 :]

    def dense(r: Floats) -> tuple[float, Floats]:
        slope = form @ r
        return float(r @ slope), 2 * slope

    return dense


def _convolved(a: Floats, b: Floats) -> Floats:
    from scipy.signal import fftconvolve

    return np.asarray(fftconvolve(a, b))[: len(a)]


def _correlated(a: Floats, b: Floats) -> Floats:
    """``sum_k a_k b_(k-j)`` for every j: the adjoint of a convolution."""
    from scipy.signal import fftconvolve

    return np.asarray(fftconvolve(a, b[::-1]))[len(b) - 1 :]


def _start(workload: Workload, steps: int, bands: int) -> Floats:
    """The Gram band of the best Toeplitz matrix, scaled to unit columns."""
    columns = optimise_toeplitz(workload, steps, bands).arrays()["coefficients"]
    own = Banded(np.repeat(columns[:, None], steps, axis=1))
    unit = own.arrays()["columns"] / own.column_norms()
    band = np.zeros((bands, steps))
    for d in range(bands):
        n = steps - d
        band[d, :n] = np.einsum("kj,kj->j", unit[d:, :n], unit[: bands - d, d : d + n])
    return band


# -- banded ----------------------------------------------------------------------------


class _Problem:
    """Error and gradient at the free entries of X, ``X[j+d, j]`` for 0 < d < b."""

    def __init__(self, root: Floats, steps: int, bands: int, block: int | None) -> None:
        self._width = max(bands - 1, _LEAST_BLOCK)
        self._count = -(-steps // self._width)
        self._steps, self._bands = steps, bands
        padded = np.zeros((self._count * self._width, len(root)))
        padded[:steps] = root.T
        self._right = padded.reshape(self._count, self._width, len(root))
        inside = np.zeros((bands, steps), dtype=bool)
        for d in range(1, bands):
            own = np.arange(steps - d)
            length = steps if block is None else block
            inside[d, : steps - d] = own // length == (own + d) // length
        self._inside = inside
        places = np.nonzero(inside)
        self._below, self._above = places[0] + places[1], places[1]

    def free(self, band: Floats) -> Floats:
        """The entries that may vary."""
        return np.asarray(band[self._inside])

    def band(self, free: Floats) -> Floats:
        """X as ``[b, n]``, with its unit diagonal."""
        band = np.zeros((self._bands, self._steps))
        band[0] = 1.0
        band[self._inside] = free
        return band

    def __call__(self, free: Floats) -> tuple[float, Floats] | None:
        """Error and gradient; None where X is not positive definite."""
        w, count = self._width, self._count
        own, beside = self._blocks(free)
        from scipy.linalg import get_lapack_funcs

        (potrf, trtri) = get_lapack_funcs(("potrf", "trtri"), (own[0],))
        roots: list[Floats] = []
        links: list[Floats] = []
        solved = np.empty_like(self._right)
        for k in range(count):
            schur = own[k]
            if k:
                links.append(beside[k - 1] @ roots[-1].T)
                schur = schur - links[-1] @ links[-1].T
            factor, info = potrf(schur, lower=1, clean=1)
            if info:
                return None
            inverse, _ = trtri(factor, lower=1)
            roots.append(inverse)
            right = self._right[k]
            if k:
                right = right - links[-1] @ solved[k - 1]
            np.matmul(inverse, right, out=solved[k])
        error = float(np.square(solved).sum())
        for k in range(count - 1, -1, -1):
            right = solved[k]
            if k + 1 < count:
                right = right - links[k].T @ solved[k + 1]
            solved[k] = roots[k].T @ right
        within = np.matmul(solved, solved.transpose(0, 2, 1))
        across = np.matmul(solved[1:], solved[:-1].transpose(0, 2, 1))
        row, column = self._below // w, self._above // w
        i, j = self._below % w, self._above % w
        slope = np.where(
            row == column,
            within[row, i, j],
            across[np.minimum(column, count - 2), i, j] if count > 1 else 0.0,
        )
        return error, -2.0 * slope

    def _blocks(self, free: Floats) -> tuple[Floats, Floats]:
        """Diagonal blocks of X, padded by the identity, and those below them."""
        w, count = self._width, self._count
        own = np.zeros((count, w, w))
        beside = np.zeros((max(0, count - 1), w, w))
        own[:, np.arange(w), np.arange(w)] = 1.0
        row, column = self._below // w, self._above // w
        i, j = self._below % w, self._above % w
        same = row == column
        own[row[same], i[same], j[same]] = free[same]
        own[row[same], j[same], i[same]] = free[same]
        beside[column[~same], i[~same], j[~same]] = free[~same]
        return own, beside


@dataclass
class _Pair:
    step: Floats
    change: Floats
    inner: float


def _minimise(problem: _Problem, start: Floats) -> Floats:
    """L-BFGS; a convex problem whose domain a step must not leave."""
    x, here = start, problem(start)
    while here is None:  # rounding at the edge of the domain
        x = 0.99 * x
        here = problem(x)
    value, slope = here
    pairs: list[_Pair] = []
    values = [value]
    for _ in range(_MOST_ITERATIONS):
        direction = -_two_loops(pairs, slope)
        descent = float(direction @ slope)
        if descent >= 0:
            break
        length = 1.0 if pairs else min(1.0, 0.1 / float(np.abs(direction).max()))
        found = None
        while length > 1e-12:
            there = problem(x + length * direction)
            if there is not None and there[0] <= value + 1e-4 * length * descent:
                found = there
                break
            length *= 0.5
        if found is None:
            break
        step, change = length * direction, found[1] - slope
        inner = float(step @ change)
        if inner > 0:
            pairs = [*pairs[-_PAIRS + 1 :], _Pair(step, change, inner)]
        x, (value, slope) = x + step, found
        values.append(value)
        if len(values) > 10 and values[-11] - value <= _GAIN * value:
            break
    return x


def _two_loops(pairs: list[_Pair], slope: Floats) -> Floats:
    """The inverse Hessian that the pairs tell of, times a gradient."""
    q, shares = slope.copy(), []
    for pair in reversed(pairs):
        share = float(pair.step @ q) / pair.inner
        shares.append(share)
        q -= share * pair.change
    if pairs:
        last = pairs[-1]
        q *= last.inner / float(last.change @ last.change)
    for pair, share in zip(pairs, reversed(shares), strict=True):
        q += (share - float(pair.change @ q) / pair.inner) * pair.step
    return q
