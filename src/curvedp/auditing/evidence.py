"""From scores to bounds: from which score on the attacker says yes, and what it proves.

A score says how much a run looks as if the canary was in it. The threshold between yes
and no must not be chosen on the runs that it is judged by. So the first quarter of the
scores chooses it, and the rest gives the counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from curvedp.auditing.bounds import (
    CONFIDENCE,
    Claim,
    Rates,
    epsilon_at,
    fitted_epsilon,
    fitted_worth,
)
from curvedp.errors import ConfigurationError

__all__ = [
    "LEAST_SCORES",
    "Evidence",
    "Proof",
    "disentangled_ratio",
    "judge",
    "likelihood_ratio",
]

#: Share of the scores that chooses the threshold, and how many of them are tried.
_CHOOSING, _THRESHOLDS = 0.25, 60
#: Scores that are smoothed at most.
_SMOOTHED = 2000
#: Scores of each kind without which there is nothing to choose a threshold by.
LEAST_SCORES = 8

Array = npt.NDArray[np.float64]
Scores = Sequence[float] | Array


@dataclass(frozen=True)
class Proof:
    """A lower bound on epsilon and the counts behind it.

    Attributes:
        epsilon: the bound.
        threshold: scores above it were called "with the canary".
        rates: counts of the verdicts.
    """

    epsilon: float
    threshold: float
    rates: Rates


@dataclass(frozen=True)
class Evidence:
    """What the scores of many runs prove.

    Attributes:
        clopper_pearson: supposes nothing about the mechanism.
        fitted: supposes the claimed mechanism with noise of unknown strength.
        confidence: of both together: each has half of the error.
    """

    clopper_pearson: Proof
    fitted: Proof
    confidence: float

    @property
    def best(self) -> Proof:
        """The one that proves more."""
        return max(self.clopper_pearson, self.fitted, key=lambda proof: proof.epsilon)


def judge(
    with_canary: Scores,
    without: Scores,
    claim: Claim,
    *,
    confidence: float = CONFIDENCE,
    threshold: float | None = None,
) -> Evidence:
    """Lower bounds on epsilon from independent runs with and without a canary.

    Args:
        with_canary: scores of the runs with it.
        without: scores of the runs without it.
        claim: what is promised.
        confidence: that neither of the bounds is too large.
        threshold: if one was chosen without these scores; then all of them count.

    Raises:
        ConfigurationError: there are too few scores, or one of them is not a number.
    """
    inside, outside = (np.asarray(s, dtype=np.float64) for s in (with_canary, without))
    if not (np.isfinite(inside).all() and np.isfinite(outside).all()):
        raise ConfigurationError(
            "a score is not a finite number", "look at the canaries and at the loss"
        )
    if min(len(inside), len(outside)) < LEAST_SCORES:
        raise ConfigurationError(
            f"{len(inside)} runs with the canary and {len(outside)} without it",
            f"make at least {LEAST_SCORES} of each; some hundreds say more",
        )
    each = 1 - (1 - confidence) / 2
    if threshold is not None:
        thresholds = (threshold, threshold)
    else:
        first_in, first_out = (
            math.ceil(_CHOOSING * len(scores)) for scores in (inside, outside)
        )
        chosen = inside[:first_in], outside[:first_out]
        inside, outside = inside[first_in:], outside[first_out:]
        sizes = len(inside), len(outside)
        thresholds = (
            _choose(*chosen, sizes, lambda rates: epsilon_at(rates, claim.delta, each)),
            _choose(*chosen, sizes, lambda rates: fitted_worth(rates, claim, each)),
        )
    free, fitted = (_rates(inside, outside, t) for t in thresholds)
    return Evidence(
        Proof(epsilon_at(free, claim.delta, each), thresholds[0], free),
        Proof(fitted_epsilon(fitted, claim, each), thresholds[1], fitted),
        confidence,
    )


def _rates(inside: Array, outside: Array, threshold: float) -> Rates:
    return Rates(
        int((inside > threshold).sum()),
        len(inside),
        int((outside > threshold).sum()),
        len(outside),
    )


def _choose(
    inside: Array,
    outside: Array,
    sizes: tuple[int, int],
    worth: Callable[[Rates], Any],
) -> float:
    """The threshold with the largest bound to be expected of as many runs as follow.

    The scores that choose are smoothed: the steps of a few of them would make the
    choice a matter of luck. A bad choice costs power, never truth.
    """
    both = np.concatenate([inside, outside])
    tried = np.unique(np.quantile(both, np.linspace(0.01, 0.99, _THRESHOLDS)))
    shares = [_smooth_tail(x, tried) for x in (inside, outside)]
    counts = [np.rint(p * n).astype(int) for p, n in zip(shares, sizes, strict=True)]
    worths = [
        worth(Rates(int(hits), sizes[0], int(alarms), sizes[1]))
        for hits, alarms in zip(*counts, strict=True)
    ]
    return float(tried[worths.index(max(worths))])


def _smooth_tail(scores: Array, thresholds: Array) -> Array:
    """Share of the scores above each threshold, by normal kernels (Silverman)."""
    some = scores[:_SMOOTHED]
    width = max(0.9 * float(some.std()) * len(some) ** -0.2, 1e-12)
    found: Array = ndtr((some[None] - thresholds[:, None]) / width).mean(1)
    return found


def likelihood_ratio(
    projection: npt.NDArray[np.float64],
    sq_norm: npt.NDArray[np.float64],
    variance: float,
    sample_rate: float,
) -> npt.NDArray[np.float64]:
    r"""How much likelier a release is with a canary, in logarithms; exact for a step.

    With ``r`` what is left of the release without the others, ``v`` the canary's
    clipped gradient and noise of variance ``t`` in every coordinate,

        ``log(1 - q + q exp((<r, v> - ||v||^2 / 2) / t))``.

    No test of one step beats it (Neyman and Pearson), and over the steps it adds up.

    Args:
        projection: ``<r, v>``.
        sq_norm: ``||v||^2``.
        variance: t.
        sample_rate: q, of the claim.
    """
    shift = (projection - sq_norm / 2) / variance
    if sample_rate == 1:
        return shift
    return np.logaddexp(math.log1p(-sample_rate), math.log(sample_rate) + shift)


def disentangled_ratio(
    projections: Array, gram: Array, variance: float, sample_rate: float
) -> Array:
    r"""The same for many canaries at once, whose gradients overlap.

    What is left of a release is ``r = sum_j b_j v_j + z``. To the canary i the others
    are noise, and known in law: each is in the sum with probability ``q / 2``, so
    they have a mean and a covariance, ``S_i = t I + c sum_{j != i} v_j v_j^T`` with
    ``c = q/2 (1 - q/2)``. The ratio is that of one step, with lengths and products in
    ``S_i^-1``; where no two ``v_j`` overlap it is the same as without the others.

    By the push-through identity all of it follows from the Gram matrix: with
    ``K = t I + c G`` and ``A = K^-1 G``,
    ``v_i^T S_i^-1 v_i = A_ii / (1 - c A_ii)``, and products likewise.

    Args:
        projections: ``<r, v_i>``, ``[m]``.
        gram: ``G_ij = <v_i, v_j>``, ``[m, m]``.
        variance: t.
        sample_rate: q, of the claim.
    """
    alone = np.diagonal(gram)
    if not np.any(gram - np.diag(alone)):
        return likelihood_ratio(projections, alone, variance, sample_rate)
    half = sample_rate / 2
    spread = half * (1 - half)
    kernel = variance * np.eye(len(gram)) + spread * gram
    solved = np.linalg.solve(kernel, np.column_stack([gram, projections]))
    overlaps, seen = solved[:, :-1], solved[:, -1]
    own = np.diagonal(overlaps)
    expected = half * (overlaps.sum(1) - own)
    left = 1 - spread * own  # what is left of i's own part in the covariance of all
    return likelihood_ratio((seen - expected) / left, own / left, 1.0, sample_rate)
