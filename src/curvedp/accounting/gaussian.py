r"""The exact cost of Gaussian noise on sums in which everybody takes part.

Any number of Gaussian steps is one Gaussian step: with ``mu`` the distance of two
neighbouring outputs in standard deviations, ``mu^2 = sum_t mu_t^2`` and

``delta(eps) = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu)``.

There is no grid, so no grid that becomes too coarse. A unit that takes part in a round
by a coin that everybody sees has the mean of that curve over the number of rounds.

>>> accountant = GaussianAccountant()
>>> from curvedp.accounting.events import repeated
>>> rounds = repeated(GaussianEvent(62.0), 70)
>>> round(accountant.epsilon(rounds, Relation.REPLACE_ONE, 1e-5), 3)
1.008
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from curvedp.accounting._validate import check_delta
from curvedp.accounting.events import (
    Event,
    GaussianEvent,
    PoissonGaussianEvent,
    SeenGaussianEvent,
    tally,
)
from curvedp.barrier import Relation
from curvedp.errors import UnknownEventError

__all__ = ["GaussianAccountant", "gaussian_epsilon", "gaussian_log_delta"]

# Rounding of the two terms moves log delta by far less (see the tests), so that a
# figure with this margin is an upper bound.
_MARGIN = 1e-9
#: Where the search for epsilon ends; beyond it nothing is promised.
_LARGEST_EPSILON = 1e6


def gaussian_log_delta(epsilon: float, mu: float) -> float:
    """Logarithm of the exact delta of one Gaussian step at distance ``mu``.

    Written with the Mills ratio ``R(x) = (1 - Phi(x)) / phi(x)``, as ``phi(a) (R(-a) -
    R(-b))``: both terms have the factor ``phi(a)``, which may be as small as it likes.
    """
    from scipy.special import erfcx, log_ndtr

    if mu == 0.0:
        return -math.inf
    a, b = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
    if a > 0:
        first = float(log_ndtr(a))
        ratio = epsilon + float(log_ndtr(b)) - first
        return first + math.log(-math.expm1(min(ratio, -1e-300)))
    scale = math.sqrt(math.pi / 2)
    mills = [scale * float(erfcx(-x / math.sqrt(2))) for x in (a, b)]
    # never below the truth: what rounding may hide, but no more than the mean value
    # theorem allows (R falls by less than 1 / (1 + x^2) per unit)
    hidden = 1e-15 * mills[0]
    gap = min(max(mills[0] - mills[1], 0.0) + hidden, mu / (1.0 + a**2))
    return -(a**2) / 2 - math.log(2 * math.pi) / 2 + math.log(gap)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Smallest epsilon of one Gaussian step at distance ``mu``; rounded upwards."""
    return _solved(lambda epsilon: gaussian_log_delta(epsilon, mu), delta)


@dataclass(frozen=True)
class GaussianAccountant:
    """The exact formula; refuses what is not Gaussian with everybody in it.

    ==========================  ====================================================
    case                        result
    ==========================  ====================================================
    no events, or counts 0      0
    zero noise                  infinity
    seen participation          mean of the curve over the binomial number of rounds
    secret sampling             refused: PLD knows it
    ==========================  ====================================================
    """

    @property
    def name(self) -> str:
        """The name of the accountant."""
        return "gaussian"

    def epsilon(self, event: Event, relation: Relation, delta: float) -> float:
        """Smallest epsilon at this delta."""
        check_delta(delta)
        always, seen = _distances(event, relation)
        return _solved(lambda epsilon: _log_delta(epsilon, always, seen), delta)

    def delta(self, event: Event, relation: Relation, epsilon: float) -> float:
        """Smallest delta at this epsilon."""
        always, seen = _distances(event, relation)
        if math.isinf(always) or any(math.isinf(s) for s, _, _ in seen):
            return 1.0
        found = math.exp(_log_delta(epsilon, always, seen))
        return min(1.0, found * (1 + _MARGIN))


#: Squared distance of a step, its rate and how many there were.
_Seen = list[tuple[float, float, int]]


def _distances(event: Event, relation: Relation) -> tuple[float, _Seen]:
    """``sum mu_t^2`` of the steps that happened, and those of the seen coins."""
    kappa = 2.0 if Relation.parse(relation) is Relation.REPLACE_ONE else 1.0
    always, seen = 0.0, []
    for part, count in tally([event]).parts:
        if count == 0:
            continue
        plain = isinstance(part, GaussianEvent) or (
            isinstance(part, PoissonGaussianEvent) and part.sample_rate == 1.0
        )
        if not plain and not isinstance(part, SeenGaussianEvent):
            raise UnknownEventError(
                f"the exact Gaussian formula has no rule for {part!r}",
                "use the accountant 'pld'",
            )
        noise = getattr(part, "noise_multiplier", 0.0)
        square = math.inf if noise == 0 else (kappa / noise) ** 2
        if isinstance(part, SeenGaussianEvent) and part.rate < 1.0:
            seen.append((square, part.rate, count))
        else:
            always += count * square
    return always, seen


def _log_delta(epsilon: float, always: float, seen: _Seen) -> float:
    """Log of the mean of the curve over how often the coins fell."""
    if not seen:
        return gaussian_log_delta(epsilon, math.sqrt(always))
    from scipy.special import logsumexp
    from scipy.stats import binom

    (square, rate, count), rest = seen[0], seen[1:]
    terms = [
        float(binom.logpmf(k, count, rate))
        + _log_delta(epsilon, always + k * square, rest)
        for k in range(count + 1)
    ]
    return float(logsumexp(terms))


def _solved(log_delta: Callable[[float], float], delta: float) -> float:
    """The upper end of a narrow bracket around ``log_delta(eps) = log(delta)``."""
    target = math.log(delta) - _MARGIN

    def met(epsilon: float) -> bool:
        try:
            return log_delta(epsilon) <= target
        except (OverflowError, ZeroDivisionError, ValueError):
            return False

    if met(0.0):
        return 0.0
    high = 1.0
    while not met(high):
        high *= 2.0
        if high > _LARGEST_EPSILON:
            return math.inf
    low = high / 2 if high > 1.0 else 0.0
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if met(middle) else (middle, high)
    return high
