"""How much noise a budget needs, and how many steps it buys.

The search runs on a coarse grid, which is fast and still an upper bound. What it finds
is checked with the accountant that will print epsilon, so the printed figure is never
above the target.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import ROUND_CEILING, Decimal
from functools import lru_cache

from curvedp.accounting._validate import (
    check_count,
    check_delta,
    check_epsilon,
    check_noise,
    check_rate,
    check_sampled,
)
from curvedp.accounting.accountants import Accountant, PLDAccountant, get_accountant
from curvedp.accounting.events import PoissonGaussianEvent, repeated
from curvedp.barrier import Relation
from curvedp.errors import ConfigurationError

__all__ = ["calibrate_sigma", "calibrate_steps", "epsilon_of", "solve_sigma"]

_CALIBRATION_GRID = 1e-3
# Below this share of the target the coarse grid has wasted budget (it does so where
# one step costs far less than the grid's width), and the search is done again.
_WASTEFUL = 0.99
_MIN_SIGMA, _MAX_SIGMA = 0.01, 1e8
_MAX_STEPS = 10**9
# Width of the last bracket in log sigma: less than what rounding up may add.
_LOG_SIGMA_TOLERANCE = 2e-5


def epsilon_of(
    sigma: float,
    *,
    sample_rate: float,
    steps: int,
    delta: float,
    relation: Relation | str,
    accountant: Accountant | str = "pld",
) -> float:
    """Epsilon of ``steps`` Poisson-sampled Gaussian steps.

    Args:
        sigma: noise multiplier, the noise's standard deviation over the clip bound.
        sample_rate: the declared probability q of an example being in a batch.
        steps: number of steps; zero steps cost nothing.
        delta: the declared delta.
        relation: when two datasets count as neighbours.
        accountant: ``"pld"``, ``"rdp"`` or an accountant.

    Returns:
        An upper bound, infinity where there is none (zero noise).

    >>> args = dict(steps=1170, delta=1e-5, relation="add-remove")
    >>> round(epsilon_of(1.0, sample_rate=256 / 60000, **args), 4)
    0.7834
    """
    event = repeated(PoissonGaussianEvent(sigma, sample_rate), steps)
    return get_accountant(accountant).epsilon(event, Relation.parse(relation), delta)


def calibrate_sigma(
    epsilon: float,
    delta: float,
    *,
    sample_rate: float,
    steps: int,
    relation: Relation | str,
    accountant: Accountant | str = "pld",
) -> float:
    """Smallest noise multiplier whose run stays inside (epsilon, delta).

    Solves ``epsilon_of(sigma) = epsilon`` and rounds sigma up, never to nearest, to
    four decimals (four significant digits below 0.1).

    Guarantees: ``epsilon_of`` of the result is at most ``epsilon`` under the given
    accountant; it does not depend on the data.

    Raises:
        ConfigurationError: a value is out of range; or no sigma up to 1e8 meets the
            target; or sigma 0.01 does, and the target promises nothing.
    """
    check_epsilon(epsilon)
    check_delta(delta)
    check_rate(sample_rate)
    check_count(steps, "steps", at_least=1)
    check_sampled(sample_rate, steps, delta)
    return _calibrate_sigma(
        float(epsilon),
        float(delta),
        float(sample_rate),
        steps,
        Relation.parse(relation),
        get_accountant(accountant),
    )


def calibrate_steps(
    epsilon: float,
    delta: float,
    *,
    sigma: float,
    sample_rate: float,
    relation: Relation | str,
    accountant: Accountant | str = "pld",
) -> int:
    """Largest number of steps that stays inside (epsilon, delta) at this sigma.

    Guarantees: ``epsilon_of`` with the result is at most ``epsilon`` and with one step
    more it is above, both under the given accountant.

    Raises:
        ConfigurationError: a value is out of range, the first step alone is beyond the
            budget, or a thousand million steps are still inside it.
    """
    check_epsilon(epsilon)
    check_delta(delta)
    check_noise(sigma)
    check_rate(sample_rate)
    return _calibrate_steps(
        float(epsilon),
        float(delta),
        float(sigma),
        float(sample_rate),
        Relation.parse(relation),
        get_accountant(accountant),
    )


def solve_sigma(
    spent: Callable[[float], float],
    epsilon: float,
    delta: float,
    rate: float,
    steps: int,
    *,
    near: float | None = None,
) -> float:
    """Smallest sigma, rounded up, at which ``spent(sigma)`` is at most ``epsilon``.

    Args:
        spent: epsilon of the whole run, falling in sigma.
        epsilon: the target.
        delta: for the first guess and for messages.
        rate: sample rate, for the first guess.
        steps: number of steps, likewise.
        near: a sigma close to the result, in place of the guess.
    """

    def excess(log_sigma: float) -> float:
        return _log_ratio(spent(math.exp(log_sigma)), epsilon)

    # Central limit: n steps of rate q cost about q sqrt(n) / sigma standard deviations.
    spread = rate * math.sqrt(steps) * math.sqrt(2.0 * math.log(1.0 / delta))
    guess = min(max(0.5, spread / epsilon), _MAX_SIGMA / 2)
    start, stride = (guess, 0.25) if near is None else (near, 0.02)
    bad, good = _bracket_sigma(excess, math.log(start), stride, epsilon, delta)
    _, good = _narrow(
        excess,
        bad,
        good,
        snap=lambda x, _bad, _good: x,
        closed=lambda bad, good: good - bad <= _LOG_SIGMA_TOLERANCE,
    )
    sigma = _round_up(math.exp(good))
    while spent(sigma) > epsilon:  # rounding errors are not monotone
        sigma = _round_up(sigma * (1.0 + 1e-4))
    return sigma


@lru_cache(maxsize=256)
def _calibrate_sigma(
    epsilon: float,
    delta: float,
    rate: float,
    steps: int,
    relation: Relation,
    accountant: Accountant,
) -> float:
    def spent(sigma: float, by: Accountant) -> float:
        event = repeated(PoissonGaussianEvent(sigma, rate), steps)
        return by.epsilon(event, relation, delta)

    def solve(by: Accountant, near: float | None = None) -> float:
        def own(sigma: float) -> float:
            return spent(sigma, by)

        return solve_sigma(own, epsilon, delta, rate, steps, near=near)

    search = _coarser(accountant)
    sigma = solve(search)
    if search != accountant and spent(sigma, accountant) < _WASTEFUL * epsilon:
        search, sigma = accountant, solve(accountant, sigma)
    # The two accountants round differently, and rounding errors are not monotone.
    while max(spent(sigma, search), spent(sigma, accountant)) > epsilon:
        sigma = _round_up(sigma * (1.0 + 1e-4))
    return sigma


@lru_cache(maxsize=256)
def _calibrate_steps(
    epsilon: float,
    delta: float,
    sigma: float,
    rate: float,
    relation: Relation,
    accountant: Accountant,
) -> int:
    step = PoissonGaussianEvent(sigma, rate)

    def excess_by(by: Accountant) -> Callable[[float], float]:
        def excess(log_steps: float) -> float:
            event = repeated(step, round(math.exp(log_steps)))
            return _log_ratio(by.epsilon(event, relation, delta), epsilon)

        return excess

    exact = excess_by(accountant)
    if exact(0.0) > 0:
        raise ConfigurationError(
            f"one step with sigma {sigma:g} and sample rate {rate:g} costs more than "
            f"epsilon {epsilon:g} at delta {delta:g}",
            "raise sigma, lower the sample rate, or allow a larger epsilon",
        )
    # The search on the coarse grid ends close to the answer, and often on it.
    quick = excess_by(_coarser(accountant))
    guess = 1
    if quick(0.0) <= 0:
        guess = _largest(quick, 1, _beyond(quick, 1, epsilon, stride=1.0))
    if exact(math.log(guess)) > 0:
        return _largest(exact, 1, guess)
    return _largest(exact, guess, _beyond(exact, guess, epsilon, stride=0.002))


def _beyond(
    excess: Callable[[float], float], good: int, epsilon: float, stride: float
) -> int:
    """A number of steps beyond the budget, found by ever larger strides."""
    while good < _MAX_STEPS:
        good = min(max(good + 1, round(good * math.exp(stride))), _MAX_STEPS)
        if excess(math.log(good)) > 0:
            return good
        stride = min(2.0 * stride, 3.0)
    raise ConfigurationError(
        f"{_MAX_STEPS} steps stay inside epsilon {epsilon:g}: the budget sets no limit",
        "choose the number of steps yourself, or calibrate sigma to it",
    )


def _largest(excess: Callable[[float], float], good: int, bad: int) -> int:
    """The largest whole number in [good, bad) that is inside the budget."""

    def whole(x: float, bad: float, good: float) -> float:
        low, high = round(math.exp(good)), round(math.exp(bad))
        return math.log(min(max(round(math.exp(x)), low + 1), high - 1))

    _, log_steps = _narrow(
        excess,
        math.log(bad),
        math.log(good),
        snap=whole,
        closed=lambda bad, good: round(math.exp(bad)) - round(math.exp(good)) <= 1,
    )
    return round(math.exp(log_steps))


def _bracket_sigma(
    excess: Callable[[float], float],
    start: float,
    stride: float,
    epsilon: float,
    delta: float,
) -> tuple[float, float]:
    """Log sigmas (bad, good), the target missed at the first and met at the second."""
    low, high = math.log(_MIN_SIGMA), math.log(_MAX_SIGMA)
    met = excess(start) <= 0
    inner = start
    while low < inner < high:
        outer = min(max(inner - stride if met else inner + stride, low), high)
        if (excess(outer) <= 0) != met:
            return (outer, inner) if met else (inner, outer)
        inner, stride = outer, min(2.0 * stride, 2.0)
    target = f"epsilon {epsilon:g} at delta {delta:g}"
    if met:
        raise ConfigurationError(
            f"{target} is met with next to no noise (sigma {_MIN_SIGMA:g}), so that it "
            "promises nothing",
            "lower epsilon, or lower delta well below 1 / (number of examples)",
        )
    raise ConfigurationError(
        f"no sigma up to {_MAX_SIGMA:g} gives {target}",
        "take fewer steps or a lower sample rate; a delta near 1e-15 times the number "
        "of steps is below what floating point can certify",
    )


def _narrow(
    excess: Callable[[float], float],
    bad: float,
    good: float,
    *,
    snap: Callable[[float, float, float], float],
    closed: Callable[[float, float], bool],
) -> tuple[float, float]:
    """Close the bracket (bad, good) around the zero of ``excess``.

    False position with the Illinois rule: an end that stays twice has its value
    halved, so that the bracket shrinks from both sides. The middle is taken where an
    end has no finite value. ``snap`` moves a guess to an admissible one inside.
    """
    above, below = excess(bad), excess(good)
    last_was_good: bool | None = None
    while not closed(bad, good):
        share = 0.5
        if math.isfinite(above) and math.isfinite(below) and above > below:
            share = min(max(above / (above - below), 1e-3), 1.0 - 1e-3)
        x = snap(bad + share * (good - bad), bad, good)
        value = excess(x)
        is_good = value <= 0.0
        halving = 0.5 if is_good is last_was_good else 1.0
        if is_good:
            good, below, above = x, value, halving * above
        else:
            bad, above, below = x, value, halving * below
        last_was_good = is_good
    return bad, good


def _log_ratio(spent: float, target: float) -> float:
    """Log of epsilon over its target: nearly straight in log sigma and log steps."""
    if spent <= 0.0:
        return -math.inf
    return math.log(spent / target)


def _coarser(accountant: Accountant) -> Accountant:
    """A faster accountant that is an upper bound too, for the search."""
    if isinstance(accountant, PLDAccountant):
        return PLDAccountant(max(accountant.discretization, _CALIBRATION_GRID))
    return accountant


def _round_up(sigma: float) -> float:
    """Round up to four decimals, or to four significant digits below 0.1."""
    places = max(4, 3 - math.floor(math.log10(sigma)))
    unit = Decimal(1).scaleb(-places)
    # From the printed digits: 0.4902 stays, though its binary value is a little above.
    # float() is monotone, so the result is never below sigma.
    return float(Decimal(repr(sigma)).quantize(unit, rounding=ROUND_CEILING))
