"""From events to epsilon. Accountants are pure: same facts in, same figure out.

Every figure is an upper bound on the true cost, or infinity where no bound can be
given. ``dp_accounting`` is imported when a figure is asked for and not before, so that
training with a given sigma works on machines that do not have it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, singledispatch
from typing import Any, Protocol, runtime_checkable

from curvedp.accounting._validate import check_delta
from curvedp.accounting.events import (
    ComposedEvent,
    Event,
    GaussianEvent,
    PoissonGaussianEvent,
    RepeatAndSelectEvent,
    sequential,
)
from curvedp.barrier import Relation
from curvedp.errors import ConfigurationError, UnknownEventError
from curvedp.values import is_number

__all__ = ["Accountant", "PLDAccountant", "RDPAccountant", "get_accountant"]

_RELATIONS = {
    Relation.ADD_REMOVE: "ADD_OR_REMOVE_ONE",
    Relation.ZERO_OUT: "REPLACE_SPECIAL",
    Relation.REPLACE_ONE: "REPLACE_ONE",
}

# The grid of a privacy loss distribution is kept below this many points (a few
# seconds, tens of megabytes) by coarsening it, which only makes the bound looser.
_MAX_GRID = 1_000_000
# A grid coarser than this carries no information: epsilon is then in the thousands.
_MAX_DISCRETIZATION = 1.0
# Upstream computes (number of grid points)^count as a whole number, which takes many
# seconds for 10^7 steps; beyond this count they are composed in blocks.
_MAX_POWER, _BLOCK = 100_000, 1_000
# FFT rounding moves delta by up to 3e-17 per composition (measured against the exact
# Gaussian for 10^2 to 10^7 compositions), also downwards: without a margin epsilon at
# delta 1e-12 and 10^4 steps comes out 0.2 % too small. Thirty times the measured error.
_ROUNDING = 1e-15


@runtime_checkable
class Accountant(Protocol):
    """Turns events into epsilon. Immutable and hashable, so that results can be cached.

    Guarantees: the figure is an upper bound; an event that the accountant has no rule
    for is refused with :class:`~curvedp.errors.UnknownEventError`, never skipped.
    """

    def __hash__(self) -> int: ...

    @property
    def name(self) -> str:
        """The name that ledgers and tables print beside epsilon."""
        ...

    def epsilon(self, event: Event, relation: Relation, delta: float) -> float:
        """Smallest epsilon that the accountant can prove at this delta."""
        ...

    def delta(self, event: Event, relation: Relation, epsilon: float) -> float:
        """Smallest delta that the accountant can prove at this epsilon."""
        ...


@dataclass(frozen=True)
class PLDAccountant:
    """Composes privacy loss distributions numerically. Tight; the default.

    The loss distribution of one step is put on a grid pessimistically (connect the
    dots), convolved by FFT, and read off as
    ``delta(eps) = E[(1 - exp(eps - L))_+]``.

    ========================  ======================================================
    case                      result
    ========================  ======================================================
    no events, or counts 0    0
    zero noise                infinity
    sample rate 1             as without sampling, composed in closed form
    very small noise          coarser grid, then infinity (epsilon in the thousands)
    delta below rounding      infinity: nothing can be certified there
    ========================  ======================================================

    Attributes:
        discretization: width of the grid of losses. Any width gives an upper bound.
            1e-4 for figures that are printed; 1e-3 is ten times faster and costs
            0.2 % at epsilon near 1, more where one step costs far less than that.

    Reference: Doroshenko et al., "Connect the Dots", arXiv:2207.04380.
    """

    discretization: float = 1e-4

    def __post_init__(self) -> None:
        if not 0.0 < self.discretization <= _MAX_DISCRETIZATION:
            raise ConfigurationError(
                f"discretization is {self.discretization!r}, not in (0, 1]",
                "1e-4 is the usual choice",
            )

    @property
    def name(self) -> str:
        """The name of the accountant."""
        return "pld"

    def epsilon(self, event: Event, relation: Relation, delta: float) -> float:
        """Smallest epsilon that can be proved at this delta."""
        check_delta(delta)
        return _pld_epsilon(sequential(event), relation, delta, self.discretization)

    def delta(self, event: Event, relation: Relation, epsilon: float) -> float:
        """Smallest delta that can be proved at this epsilon."""
        return self.deltas(event, relation, [epsilon])[0]

    def deltas(
        self, event: Event, relation: Relation, epsilons: Sequence[float]
    ) -> list[float]:
        """The same at several epsilons, from one composition."""
        for epsilon in epsilons:
            _check_threshold(epsilon)
        total = sequential(event)
        composed = _composed_pld(total, relation, self.discretization)
        if composed is None:
            return [1.0 for _ in epsilons]
        # one by one: upstream goes through the grid in Python for a list
        found = (float(composed.get_delta_for_epsilon(e)) for e in epsilons)
        margin = _rounding(total)
        return [min(1.0, max(0.0, delta + margin)) for delta in found]


@dataclass(frozen=True)
class RDPAccountant:
    """Composes Renyi divergences analytically. Looser than PLD, by 6 to 18 % of sigma.

    Replace-one is refused: dp-accounting (0.6) does not double the sensitivity there
    and reports 4.73 where the truth is 10.0 (Gaussian, sigma 1, delta 1e-5).
    """

    @property
    def name(self) -> str:
        """The name of the accountant."""
        return "rdp"

    def epsilon(self, event: Event, relation: Relation, delta: float) -> float:
        """Smallest epsilon that can be proved at this delta."""
        check_delta(delta)
        with _quiet_upstream():
            composed = _composed_rdp(sequential(event), relation)
            if composed is None:
                return math.inf
            return max(0.0, float(composed.get_epsilon(delta)))

    def delta(self, event: Event, relation: Relation, epsilon: float) -> float:
        """Smallest delta that can be proved at this epsilon."""
        _check_threshold(epsilon)
        with _quiet_upstream():
            composed = _composed_rdp(sequential(event), relation)
            if composed is None:
                return 1.0
            return min(1.0, max(0.0, float(composed.get_delta(epsilon))))


def get_accountant(accountant: Accountant | str) -> Accountant:
    """The accountant of that name; an accountant passes through."""
    if not isinstance(accountant, str):
        return accountant
    if accountant == "pld":
        return PLDAccountant()
    if accountant == "rdp":
        return RDPAccountant()
    if accountant == "gaussian":
        from curvedp.accounting.gaussian import GaussianAccountant  # a file of its own

        return GaussianAccountant()
    raise ConfigurationError(
        f"unknown accountant {accountant!r}", "choose one of: pld, rdp, gaussian"
    )


@singledispatch
def _loss_distribution(
    event: Event, count: int, relation: Relation, width: float
) -> Any:
    """Loss distribution of ``count`` events; one rule for each kind of event."""
    raise _unknown(event, "PLD")


@_loss_distribution.register
def _(event: GaussianEvent, count: int, relation: Relation, width: float) -> Any:
    # n Gaussian steps are one with sigma / sqrt(n): exact, while the FFT would need a
    # grid that grows with n.
    sigma = event.noise_multiplier / math.sqrt(count)
    return _one_step_pld(sigma, 1.0, relation, width)


@_loss_distribution.register
def _(event: PoissonGaussianEvent, count: int, relation: Relation, width: float) -> Any:
    if event.sample_rate == 1.0:
        gaussian = GaussianEvent(event.noise_multiplier)
        return _loss_distribution(gaussian, count, relation, width)
    step = _one_step_pld(event.noise_multiplier, event.sample_rate, relation, width)
    if count <= _MAX_POWER:
        return step.self_compose(count)
    block, rest = divmod(count, _BLOCK)
    composed = step.self_compose(_BLOCK).self_compose(block)
    return composed.compose(step.self_compose(rest)) if rest else composed


# Building the grid of one step takes longer than composing it, and a run asks for its
# epsilon again and again at the same sigma.
@lru_cache(maxsize=4)
def _one_step_pld(sigma: float, rate: float, relation: Relation, width: float) -> Any:
    dp = _dp_accounting()
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=sigma,
        sampling_prob=rate,
        value_discretization_interval=width,
        neighboring_relation=_relation(relation, dp),
        pessimistic_estimate=True,
    )


@singledispatch
def _renyi_event(event: Event, dp: Any) -> Any:
    """The upstream event for RDP; one rule for each kind of event."""
    raise _unknown(event, "RDP")


@_renyi_event.register
def _(event: GaussianEvent, dp: Any) -> Any:
    return dp.GaussianDpEvent(event.noise_multiplier)


@_renyi_event.register
def _(event: PoissonGaussianEvent, dp: Any) -> Any:
    gaussian = dp.GaussianDpEvent(event.noise_multiplier)
    return dp.PoissonSampledDpEvent(event.sample_rate, gaussian)


@_renyi_event.register
def _(event: ComposedEvent, dp: Any) -> Any:
    parts = [(_renyi_event(e, dp), n) for e, n in event.leaves() if n > 0]
    return dp.ComposedDpEvent([dp.SelfComposedDpEvent(e, n) for e, n in parts])


@_renyi_event.register
def _(event: RepeatAndSelectEvent, dp: Any) -> Any:
    from dp_accounting import dp_event  # the package itself does not list this one

    inner = _renyi_event(sequential(event.event), dp)
    return dp_event.RepeatAndSelectDpEvent(inner, event.mean, event.shape)


def _unknown(event: Event, accountant: str) -> UnknownEventError:
    if isinstance(event, RepeatAndSelectEvent):
        return UnknownEventError(
            f"the {accountant} accountant does not know the cost of the best of "
            "several trials",
            "use the accountant 'rdp'",
        )
    return UnknownEventError(
        f"the {accountant} accountant does not know the cost of {type(event).__name__}",
        "use an accountant that does, or register a rule for it in "
        "curvedp.accounting.accountants",
    )


@lru_cache(maxsize=1024)
def _pld_epsilon(
    total: ComposedEvent, relation: Relation, delta: float, discretization: float
) -> float:
    composed = _composed_pld(total, relation, discretization)
    if composed is None:
        return math.inf
    certifiable = delta - _rounding(total)
    if certifiable <= 0.0:
        return math.inf
    return max(0.0, float(composed.get_epsilon_for_delta(certifiable)))


def _composed_pld(
    total: ComposedEvent, relation: Relation, discretization: float
) -> Any:
    """The loss distribution of all events, or None where the loss is unbounded."""
    _dp_accounting()
    from dp_accounting.pld import privacy_loss_distribution

    parts = [(event, count) for event, count in total.parts if count > 0]
    spread = sum(_loss_range(event, count, relation) for event, count in parts)
    width = max(discretization, spread / _MAX_GRID)
    if width > _MAX_DISCRETIZATION:
        return None
    composed = privacy_loss_distribution.identity(value_discretization_interval=width)
    for event, count in parts:
        composed = composed.compose(_loss_distribution(event, count, relation, width))
    return composed


def _composed_rdp(total: ComposedEvent, relation: Relation) -> Any:
    if relation is Relation.REPLACE_ONE:
        raise ConfigurationError(
            "the RDP accountant does not cover the replace-one relation (dp-accounting "
            "leaves out the doubled sensitivity there, and epsilon would be too small)",
            "use the accountant 'pld'",
        )
    dp = _dp_accounting()
    parts = [(_renyi_event(e, dp), e, n) for e, n in total.parts if n > 0]
    if any(math.isinf(_loss_range(e, n, relation)) for _, e, n in parts):
        return None
    from dp_accounting import rdp

    composed = rdp.RdpAccountant(neighboring_relation=_relation(relation, dp))
    for converted, _, count in parts:
        composed.compose(converted, count)
    return composed


def _loss_range(event: Event, count: int, relation: Relation) -> float:
    """Rough width of the composed loss distribution, for the size of its grid.

    Decides cost and never correctness. The loss of one Gaussian is N(1/2s^2, 1/s^2);
    sampling at rate q bounds the mean by q/2s^2 (convexity) and by q^2 (e^(1/s^2) - 1)
    (chi-square), and the second moment likewise.
    """
    if isinstance(event, RepeatAndSelectEvent):
        inner = sequential(event.event).parts
        return count * sum(_loss_range(e, n, relation) for e, n in inner if n > 0)
    sigma = getattr(event, "noise_multiplier", 1.0)
    rate = getattr(event, "sample_rate", 1.0)
    sigma /= 2.0 if relation is Relation.REPLACE_ONE else 1.0
    if sigma < 1e-6:
        return math.inf
    if rate == 1.0:
        sigma, count = sigma / math.sqrt(count), 1
    gaussian_mean = 0.5 / sigma**2
    largest = gaussian_mean + 10.0 / sigma
    chi_square = rate**2 * math.expm1(min(1.0 / sigma**2, 700.0))
    mean = min(rate * gaussian_mean, chi_square)
    square = min(rate * largest**2, 2.0 * chi_square)
    return 2.0 * (largest + count * mean + 9.0 * math.sqrt(count * square))


def _rounding(total: ComposedEvent) -> float:
    """Margin on delta for the rounding errors of the FFT."""
    convolved = sum(
        1 if getattr(event, "sample_rate", 1.0) == 1.0 else count
        for event, count in total.parts
    )
    return _ROUNDING * convolved


def _relation(relation: Relation, dp: Any) -> Any:
    return getattr(dp.NeighboringRelation, _RELATIONS[relation])


@contextmanager
def _quiet_upstream() -> Iterator[None]:
    """Silence upstream's log lines on orders it leaves out, which is always safe.

    There is one for each order and event, hundreds in a calibration.
    """
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _dp_accounting() -> Any:
    try:
        import dp_accounting
    except ImportError as error:
        raise ConfigurationError(
            "epsilon needs the package 'dp-accounting', which is not installed",
            "pip install dp-accounting; or train with sigma given instead of epsilon, "
            "and have epsilon computed from the ledger on a machine that has it",
        ) from error
    return dp_accounting


def _check_threshold(epsilon: float) -> None:
    if not (is_number(epsilon) and epsilon >= 0.0):
        raise ConfigurationError(f"epsilon is {epsilon!r}, not a number of at least 0")
