"""Slow exact twins of correlated noise, and the suite for strategies of your own.

Everything here is dense and straight from the definitions: an inverse where the engine
streams, all patterns where it has a dynamic programme, a general solver where it has
one for bands.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import scipy.optimize

from curvedp.noise.strategies import COLUMN_TOLERANCE, Participation, Strategy, Workload
from curvedp.noise.strategies.workloads import Floats

__all__ = ["check_strategy", "dense_optimum", "largest_pattern"]


def check_strategy(strategy: Strategy) -> None:
    """Lower triangular, columns of norm up to 1, streamed as its own inverse.

    From the first step and from any later one, which begins a block.

    Raises:
        AssertionError: says what is broken.
    """
    c, n = strategy.materialize(), strategy.steps
    assert c.shape == (n, n), "materialize must give all steps"
    assert np.array_equal(c, np.tril(c)), "a step would need noise of the future"
    norms = np.linalg.norm(c, axis=0)
    assert norms.max() <= 1 + COLUMN_TOLERANCE, f"a column has norm {norms.max()}"
    assert np.allclose(strategy.column_norms(), norms), "column_norms are others"
    if strategy.bands is not None:
        assert np.array_equal(c, np.triu(c, 1 - strategy.bands)), "more bands than said"
    for start in (0, n // 3):
        inverse = np.linalg.inv(c[start:, start:])
        close = np.allclose(strategy.inverse(start), inverse, atol=1e-9)
        assert close, f"from step {start} on, inverse is another"
        rows, memory = [], ()
        for k in range(n - start):
            x, memory = strategy.next(np.eye(n - start)[k], memory, start + k)
            assert len(memory) <= strategy.memory, "it remembers more than it says"
            rows.append(x)
        close = np.allclose(np.stack(rows), inverse, atol=1e-9)
        assert close, f"from step {start} on, what is streamed is not the inverse"
        spread = np.linalg.norm(inverse, axis=1)
        assert np.allclose(strategy.inverse_row_norms(start), spread), (
            "inverse_row_norms are others"
        )


def largest_pattern(gram: Floats, participation: Participation) -> float:
    """Root of the largest ``sum |X_ij|`` over a pattern, by looking at all of them."""
    n, best = len(gram), 0.0
    for count in range(1, participation.count(n) + 1):
        for pattern in itertools.combinations(range(n), count):
            gaps = (b - a for a, b in itertools.pairwise(pattern))
            if all(gap >= participation.separation for gap in gaps):
                chosen = gram[np.ix_(pattern, pattern)]
                best = max(best, float(np.abs(chosen).sum()))
    return math.sqrt(best)


def dense_optimum(workload: Workload, steps: int, bands: int) -> float:
    """The least ``tr(W X^-1)`` of a banded strategy, by a general solver."""
    rows, columns = np.tril_indices(steps, -1)
    keep = rows - columns < bands
    rows, columns = rows[keep], columns[keep]
    w = workload.gram(steps)

    def loss(free: Floats) -> tuple[float, Floats]:
        x = np.eye(steps)
        x[rows, columns] = x[columns, rows] = free
        if np.linalg.eigvalsh(x)[0] <= 0:
            return 1e12, np.zeros_like(free)
        inverse = np.linalg.inv(x)
        slope = -inverse @ w @ inverse
        return float(np.trace(w @ inverse)), 2 * slope[rows, columns]

    found = scipy.optimize.minimize(
        loss,
        np.zeros(len(rows)),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 5000, "maxfun": 20000, "ftol": 1e-15, "gtol": 1e-9},
    )
    return float(found.fun)
