r"""Which steps one example may take part in, and what it can do there altogether.

For contributions ``v_j`` of norm at most 1 in the steps j of a pattern P,

    || sum_j C[:,j] v_j^T ||^2 = sum_{i,j in P} X_ij <v_i, v_j> <= sum_{i,j} |X_ij|,

``X = C^T C``, and the directions may be such that nothing is left out. The bound is the
largest of these sums over all patterns that are allowed.

This is the sensitivity *without* amplification. Under cyclic Poisson sampling every
participation is an event of its own instead, and the norm of one column is what counts:
the two are never combined.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from curvedp.errors import ConfigurationError
from curvedp.noise.strategies.workloads import Floats
from curvedp.values import is_whole

__all__ = ["Participation", "pattern_sensitivity"]


@dataclass(frozen=True)
class Participation:
    """Steps that one example may be in.

    Attributes:
        separation: two of them are at least this many steps apart.
        most: how many there are at most; None for as many as fit.
    """

    separation: int = 1
    most: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("separation", self.separation), ("most", self.most)):
            if value is not None and not is_whole(value, 1):
                raise ConfigurationError(
                    f"{name} of a participation is {value!r}",
                    "give a whole number from 1 on",
                )

    def count(self, steps: int) -> int:
        """Most participations in a run of that length."""
        fitting = math.ceil(steps / self.separation)
        return fitting if self.most is None else min(fitting, self.most)


def pattern_sensitivity(
    gram: Floats, bands: int | None, participation: Participation
) -> float:
    """Root of the largest ``sum |X_ij|`` over a pattern.

    Exact by dynamic programming where only neighbours in a pattern interact, that is
    for bands of up to twice the separation. Otherwise an upper bound: each step counts
    what it shares with the best pattern *for it*, and the best pattern of these counts
    is taken.

    Args:
        gram: ``X [n, n]``.
        bands: beyond which X is zero; None for a full matrix.
        participation: the patterns.
    """
    size = np.abs(gram)
    n, apart = len(size), participation.separation
    width = n if bands is None else bands
    most = participation.count(n)
    if width <= 2 * apart:
        return math.sqrt(_best_chain(size, width, apart, most))
    shared = np.array([_best_sum(row, apart, most) for row in size])
    return math.sqrt(_best_sum(shared, apart, most))


def _best_chain(size: Floats, width: int, apart: int, most: int) -> float:
    """Largest sum over a pattern in which only neighbours share anything."""
    n = len(size)
    own = np.diagonal(size)
    ending = own.copy()  # best sum of a pattern that ends in step j
    best = float(ending.max())
    for _ in range(most - 1):
        longer = np.full(n, -np.inf)
        before = np.maximum.accumulate(ending)
        for j in range(apart, n):
            free = j - max(width, apart)  # from there back nothing is shared
            far = before[free] if free >= 0 else -np.inf
            near = range(max(0, j - width + 1), j - apart + 1)
            joined = (
                ending[near.start : near.stop] + 2 * size[near.start : near.stop, j]
            )
            longer[j] = own[j] + max(far, joined.max(initial=-np.inf))
        ending = longer
        best = max(best, float(ending.max()))
    return best


def _best_sum(values: Floats, apart: int, most: int) -> float:
    """Largest sum of entries that are ``apart`` from each other; none is negative."""
    n = len(values)
    best = np.zeros(n + apart)  # of the entries before each place
    for _ in range(most):
        taken = values + best[:n]  # best[k] is of entries up to k - apart
        following = np.zeros_like(best)
        following[apart:] = np.maximum.accumulate(taken)
        best = following
    return float(best.max())
