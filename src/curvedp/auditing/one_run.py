r"""What one training run proves: many canaries, each in or out by a fair coin.

The attacker guesses some of the coins and abstains from the others. Under pure
epsilon-DP the number of right guesses out of r is stochastically below a binomial with
success probability ``e^eps / (1 + e^eps)``, although all canaries went through one run.
With delta the tail is a little larger:

    ``P[right >= v] <= beta + 2 m delta alpha``,
    ``beta = P[Bin(r, p) >= v]``,  ``p = e^eps / (1 + e^eps)``,
    ``alpha = max_{1 <= i <= v} P[v > Bin(r, p) >= v - i] / i``.

Canaries need not be independent of each other, nor of anything else in the run.

Reference: Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run",
NeurIPS 2023, arXiv:2305.08846, theorem 5.2 and appendix D.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import expit
from scipy.stats import binom

from curvedp.auditing.bounds import CONFIDENCE
from curvedp.errors import ConfigurationError

__all__ = ["Guesses", "guess", "one_run_epsilon", "one_run_p_value"]

#: Shares of the canaries that are guessed "in", and "out". All of them are tried, each
#: with its part of the error. Few guesses are surer; and a canary that was never drawn
#: looks as if it was left out, so "in" is the surer word.
SHARES = (
    (0.05, 0.0), (0.1, 0.0), (0.25, 0.0), (0.05, 0.05), (0.1, 0.1), (0.25, 0.25),
    (0.5, 0.5),
)  # fmt: skip

_BISECTIONS = 40
#: No bound is looked for beyond this.
_LARGEST = 100.0


def one_run_p_value(
    canaries: int, guesses: int, right: int, epsilon: float, delta: float
) -> float:
    """How likely so many right guesses are at most, if (epsilon, delta)-DP holds.

    Args:
        canaries: m, each in or out by a fair coin.
        guesses: r, how many coins were guessed; the others were abstained from.
        right: v, how many guesses were right.
        epsilon: of the hypothesis.
        delta: of the hypothesis.

    >>> round(one_run_p_value(100, 100, 75, 1.0986, 0.0), 3)
    0.553
    """
    if not 0 <= right <= guesses <= canaries:
        raise ConfigurationError(
            f"{right} right guesses of {guesses} about {canaries} canaries"
        )
    p = float(expit(epsilon))
    tail = float(binom.sf(right - 1, guesses, p))
    if not (delta and right):
        return min(1.0, tail)
    # P[v > Bin >= v - i] for i = 1, ..., v
    below = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, p))
    slope = float((below / np.arange(1, right + 1)).max())
    return min(1.0, tail + 2 * canaries * delta * slope)


def one_run_epsilon(
    canaries: int,
    guesses: int,
    right: int,
    delta: float,
    confidence: float = CONFIDENCE,
) -> float:
    """The largest epsilon that the guesses rule out; 0 if there is none.

    >>> round(one_run_epsilon(1000, 100, 75, 1e-4), 3)
    0.673
    """

    def ruled_out(epsilon: float) -> bool:
        p = one_run_p_value(canaries, guesses, right, epsilon, delta)
        return p < 1 - confidence

    if not ruled_out(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while ruled_out(high) and high < _LARGEST:
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if ruled_out(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class Guesses:
    """The guesses about one run that prove most.

    Attributes:
        canaries: m.
        made: r.
        right: v.
        epsilon: what they prove, at ``confidence`` over all shares that were tried.
        confidence: of the bound.
    """

    canaries: int
    made: int
    right: int
    epsilon: float
    confidence: float


def guess(
    scores: npt.NDArray[np.float64],
    included: npt.NDArray[np.bool_],
    delta: float,
    confidence: float = CONFIDENCE,
) -> Guesses:
    """Guess "in" of the highest scores, "out" of the lowest, and abstain in between.

    Args:
        scores: of the canaries, ``[m]``.
        included: how the coins fell, ``[m]``.
        delta: of the claim.
        confidence: of the bound; each share of guesses that is tried has its part of
            the error.
    """
    count = len(scores)
    if count < 2 or len(included) != count:
        raise ConfigurationError(
            f"{count} scores of {len(included)} canaries", "use at least 2 canaries"
        )
    if not np.isfinite(scores).all():  # they would all be called "in"
        raise ConfigurationError(
            "a score is not a finite number", "look at the canaries and at the loss"
        )
    order = np.argsort(scores, kind="stable")
    each = 1 - (1 - confidence) / len(SHARES)
    tried = []
    for share_in, share_out in SHARES:
        highest = order[count - max(1, int(share_in * count)) :]
        lowest = order[: int(share_out * count)]
        right = int(included[highest].sum() + (~included[lowest]).sum())
        made = len(highest) + len(lowest)
        epsilon = one_run_epsilon(count, made, right, delta, each)
        tried.append(Guesses(count, made, right, epsilon, confidence))
    return max(tried, key=lambda found: found.epsilon)
