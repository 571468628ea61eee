r"""From counts of right and wrong verdicts to a lower bound on epsilon.

An attacker says of each run whether the canary was in. Of the runs with it, ``TPR`` is
the share of right verdicts; of the runs without it, ``FPR`` is the share of wrong ones.
Under (epsilon, delta)-DP

    ``TPR <= e^eps FPR + delta``  and  ``1 - FPR <= e^eps (1 - TPR) + delta``,

so rates that break one of them at some epsilon prove that epsilon is larger. The rates
are only known from counts; their exact binomial intervals (Clopper and Pearson, 1934)
take that into account, half of the error on each side.

===================  ===========================================  ==================
bound                what it supposes of the mechanism            reference
===================  ===========================================  ==================
``epsilon_at``       nothing                                      Jagielski et al.
                                                                  2020
``mu_at``            two Gaussians at an unknown distance mu      Nasr et al. 2023
``fitted_epsilon``   Gaussian noise of unknown strength on        Nasr et al. 2023
                     Poisson samples of the claimed rate,
                     as often as claimed
===================  ===========================================  ==================

The first cannot show more than about ``log(runs)``. The others read the strength of the
noise from the runs and let the accountant say what epsilon that is at the claimed
delta; with sampling rate 1 they are the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from scipy.optimize import brentq
from scipy.special import betaincinv, log_ndtr, ndtr, ndtri

from curvedp.accounting import Event, PoissonGaussianEvent, repeated
from curvedp.accounting.accountants import PLDAccountant
from curvedp.barrier import Relation
from curvedp.errors import ConfigurationError

__all__ = [
    "CONFIDENCE",
    "Claim",
    "Rates",
    "clopper_pearson",
    "epsilon_at",
    "epsilon_of_mu",
    "fitted_epsilon",
    "fitted_worth",
    "mu_at",
]

#: Of every bound, unless another is asked for.
CONFIDENCE = 0.95

#: Where the curve of (epsilon, delta) is compared with the rates.
_EPSILONS = [0.1 * k for k in range(20)] + [2 + 0.25 * k for k in range(41)]
#: The noise is looked for between these multiples of the claimed one.
_LEAST_NOISE, _MOST_NOISE = 1 / 8, 256.0
_BISECTIONS = 7
#: Multiples by which thresholds are compared.
_COARSE = [2 ** (k / 2) for k in range(-2, 5)]


def clopper_pearson(successes: int, trials: int, error: float) -> tuple[float, float]:
    """Exact bounds on a probability: each is missed with at most ``error``.

    ``low`` solves ``P[Bin(n, low) >= k] = error``, ``high`` solves
    ``P[Bin(n, high) <= k] = error``.

    >>> low, high = clopper_pearson(0, 100, 0.025)
    >>> low, round(high, 4)
    (0.0, 0.0362)
    """
    if not 0 <= successes <= trials or trials < 1:
        raise ConfigurationError(f"{successes} successes in {trials} trials")
    if not 0 < error < 1:
        raise ConfigurationError(
            f"the error is {error!r}", "it is between 0 and 1, such as 0.05"
        )
    k, n = successes, trials
    low = 0.0 if k == 0 else float(betaincinv(k, n - k + 1, error))
    high = 1.0 if k == n else float(betaincinv(k + 1, n - k, 1 - error))
    return low, high


@dataclass(frozen=True)
class Rates:
    """How often an attacker was right and wrong.

    Attributes:
        hits: runs with the canary that he said have it.
        with_canary: runs with the canary.
        alarms: runs without it that he said have it.
        without: runs without it.
    """

    hits: int
    with_canary: int
    alarms: int
    without: int

    def bounds(self, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """The least TPR and the largest FPR that the counts leave possible."""
        error = (1 - confidence) / 2
        low, _ = clopper_pearson(self.hits, self.with_canary, error)
        _, high = clopper_pearson(self.alarms, self.without, error)
        return low, high


def epsilon_at(rates: Rates, delta: float, confidence: float = CONFIDENCE) -> float:
    """The smallest epsilon at which both inequalities can hold. Supposes nothing.

    ``max(log((TPR - delta) / FPR), log((1 - FPR - delta) / (1 - TPR)))`` of the least
    TPR and the largest FPR: one statement about the two gives both.
    """
    low, high = rates.bounds(confidence)
    return _least_epsilon(low, high, delta)


def _least_epsilon(low: float, high: float, delta: float) -> float:
    best = 0.0
    for more, less in ((low, high), (1 - high, 1 - low)):
        if more > delta and less > 0:
            best = max(best, math.log((more - delta) / less))
    return best


def mu_at(rates: Rates, confidence: float = CONFIDENCE) -> float:
    """Least distance of two unit Gaussians that can be told apart at these rates."""
    low, high = rates.bounds(confidence)
    if low <= high:
        return 0.0
    return float(ndtri(low) - ndtri(high))


def epsilon_of_mu(mu: float, delta: float) -> float:
    r"""Epsilon of two unit Gaussians at distance mu, exact.

    Solves ``delta = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu)`` in log space
    (Balle and Wang 2018; Dong, Roth and Su 2022).
    """
    if mu <= 0:
        return 0.0

    def excess(epsilon: float) -> float:
        tail = math.exp(epsilon + float(log_ndtr(-mu / 2 - epsilon / mu)))
        return float(ndtr(mu / 2 - epsilon / mu)) - tail - delta

    return 0.0 if excess(0.0) <= 0 else float(brentq(excess, 0.0, 50 * mu + mu**2))


@dataclass(frozen=True)
class Claim:
    """What is promised about a run, and by which mechanism.

    Attributes:
        epsilon: that is claimed.
        delta: of (epsilon, delta).
        noise_multiplier: s.
        sample_rate: q.
        steps: T.
        relation: which datasets are neighbours.
    """

    epsilon: float
    delta: float
    noise_multiplier: float
    sample_rate: float
    steps: int
    relation: Relation = Relation.ADD_REMOVE

    def epsilon_with(self, noise_multiplier: float) -> float:
        """What would have to be claimed with another noise."""
        event = self.event(noise_multiplier)
        return PLDAccountant().epsilon(event, self.relation, self.delta)

    def event(self, noise_multiplier: float) -> Event:
        """All steps with another noise."""
        step = PoissonGaussianEvent(noise_multiplier, self.sample_rate)
        return repeated(step, self.steps)


def fitted_epsilon(rates: Rates, claim: Claim, confidence: float = CONFIDENCE) -> float:
    r"""The epsilon of the weakest noise that the rates still rule out.

    With noise multiplier s the mechanism of the claim has the curve ``delta_s(eps)``,
    and no attacker can break the inequalities at any ``(eps, delta_s(eps))``. More
    noise makes the curve lower. The smallest s whose curve the bounds on both rates
    break is found by bisection; the noise is weaker than that, so epsilon at the
    claimed delta is larger than with it.

    Guarantees:
        If the run is the claimed mechanism with some noise multiplier, its epsilon is
        at least this, with the given confidence. It is above the claimed epsilon only
        if the noise is shown to be weaker than claimed.
    """
    low, high = rates.bounds(confidence)
    if low <= high:
        return 0.0
    factor = 1.0
    if _ruled_out(claim, factor, low, high):
        while factor > _LEAST_NOISE and _ruled_out(claim, factor / 2, low, high):
            factor /= 2
    else:
        while not _ruled_out(claim, factor := 2 * factor, low, high):
            if factor >= _MOST_NOISE:
                return 0.0
    possible = factor / 2
    for _ in range(_BISECTIONS):
        middle = math.sqrt(possible * factor)
        if _ruled_out(claim, middle, low, high):
            factor = middle
        else:
            possible = middle
    return claim.epsilon_with(claim.noise_multiplier * factor)


def fitted_worth(rates: Rates, claim: Claim, confidence: float) -> tuple[float, float]:
    """Grows with what :func:`fitted_epsilon` would say; for comparing, much cheaper."""
    low, high = rates.bounds(confidence)
    if low <= high:
        return -math.inf, 0.0
    broken = [f for f in _COARSE if _ruled_out(claim, f, low, high)]
    return -min(broken, default=math.inf), mu_at(rates, confidence)


def _ruled_out(claim: Claim, factor: float, low: float, high: float) -> bool:
    """Whether rates are impossible with ``factor`` times the claimed noise."""
    pairs = zip(_EPSILONS, _curve(claim, factor), strict=True)
    return any(_least_epsilon(low, high, delta) > epsilon for epsilon, delta in pairs)


@lru_cache(maxsize=64)
def _curve(claim: Claim, factor: float) -> list[float]:
    """Delta at every epsilon that is looked at, of ``factor`` times the noise."""
    noise = factor * claim.noise_multiplier
    # any grid is safe, a wider one rules out less; losses of a step are about 1 / s
    grid = min(0.02, max(5e-4, 0.01 / (noise * math.sqrt(claim.steps))))
    event = claim.event(noise)
    return PLDAccountant(grid).deltas(event, claim.relation, _EPSILONS)
