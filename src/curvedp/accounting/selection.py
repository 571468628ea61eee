"""Repeat and select: many trials, one of which is released.

A mechanism Q is run K times, K random, and only the best output leaves the room. What
that costs depends on the law of K and not on its value (Papernot and Steinke,
"Hyperparameter tuning with Renyi differential privacy", ICLR 2022):

=============  =========  =======================================================
law of K       ``shape``  Renyi divergence of the selection at order a
=============  =========  =======================================================
Poisson        infinity   e(a) + mean d + log(mean) / (a - 1), d the delta of Q at
                          the epsilon log(1 + 1/(a - 1)). K may be 0
geometric      1          e(a) + log(mean) / (a - 1)
                          + (1 + shape) min_b [(1 - 1/b) e(b) + log(1/g) / b]
logarithmic    0          likewise, g the chance that the law stops
=============  =========  =======================================================

It holds if every trial is drawn from the same law (settings from a fixed prior, never
from the scores of earlier trials), if the score is a part of what Q may output, and if
neither K nor the other trials are shown. The divergences are dp-accounting's.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from curvedp.accounting._validate import check_count, check_delta, check_epsilon
from curvedp.accounting.accountants import RDPAccountant
from curvedp.accounting.calibrate import solve_sigma
from curvedp.accounting.events import (
    Event,
    GaussianEvent,
    PoissonGaussianEvent,
    RepeatAndSelectEvent,
    repeated,
)
from curvedp.barrier import Relation
from curvedp.errors import ConfigurationError
from curvedp.values import is_number

__all__ = ["LAWS", "Repeats", "calibrate_selected_sigma"]

#: Laws of the number of trials, and their shape in the theorem.
LAWS: dict[str, float] = {"poisson": math.inf, "geometric": 1.0, "logarithmic": 0.0}


@dataclass(frozen=True)
class Repeats:
    """How often a mechanism is repeated: a law and its mean. Public.

    Attributes:
        mean: expected number of trials, at least 1.
        law: "poisson", "geometric" or "logarithmic".
    """

    mean: float
    law: str = "poisson"
    names: ClassVar[tuple[str, ...]] = tuple(LAWS)

    def __post_init__(self) -> None:
        if self.law not in LAWS:
            raise ConfigurationError(
                f"unknown law of the number of trials {self.law!r}",
                f"choose one of: {', '.join(LAWS)}",
            )
        if not (is_number(self.mean) and self.mean >= 1):
            raise ConfigurationError(
                f"the expected number of trials is {self.mean!r}", "give 1 or more"
            )

    @property
    def shape(self) -> float:
        """Of the truncated negative binomial; infinity for Poisson."""
        return LAWS[self.law]

    def draw(self) -> int:
        """The number of trials, from the operating system's entropy. A secret."""
        generator = np.random.default_rng(secrets.randbits(128))
        if self.law == "poisson":
            return int(generator.poisson(self.mean))
        if self.mean == 1:
            return 1
        if self.law == "geometric":
            return int(generator.geometric(1 / self.mean))
        return int(generator.logseries(1 - _stopping_chance(self.mean)))

    def event(self, trial: Event) -> RepeatAndSelectEvent:
        """The event of the selection, from that of one trial."""
        return RepeatAndSelectEvent(trial, float(self.mean), self.shape)

    def facts(self) -> dict[str, Any]:
        """As JSON values."""
        return {"law": self.law, "mean": self.mean}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Repeats:
        """Read back what :meth:`facts` gave."""
        return cls(mean=stored["mean"], law=stored["law"])


def calibrate_selected_sigma(
    epsilon: float,
    delta: float,
    *,
    repeats: Repeats,
    sample_rate: float,
    steps: int,
    relation: Relation | str,
) -> float:
    """Smallest noise multiplier whose selection stays inside (epsilon, delta).

    As :func:`~curvedp.accounting.calibrate_sigma`, for the best of several trials of
    ``steps`` Poisson-sampled Gaussian steps each (one Gaussian at sample rate 1), by
    the RDP accountant, the only one that knows the event.
    """
    check_epsilon(epsilon)
    check_delta(delta)
    check_count(steps, "steps", at_least=1)
    return _calibrated(
        float(epsilon),
        float(delta),
        repeats,
        float(sample_rate),
        steps,
        Relation.parse(relation),
    )


@lru_cache(maxsize=64)
def _calibrated(
    epsilon: float,
    delta: float,
    repeats: Repeats,
    rate: float,
    steps: int,
    relation: Relation,
) -> float:
    accountant = RDPAccountant()

    def spent(sigma: float) -> float:
        one = GaussianEvent(sigma) if rate == 1 else PoissonGaussianEvent(sigma, rate)
        event = repeats.event(repeated(one, steps))
        return accountant.epsilon(event, relation, delta)

    return solve_sigma(spent, epsilon, delta, rate, steps)


def _stopping_chance(mean: float) -> float:
    """The g of a logarithmic law with this mean: (1/g - 1) / log(1/g) = mean."""
    low, high = 1e-12, 1.0 - 1e-12  # the mean falls from low to high
    for _ in range(200):
        middle = math.sqrt(low * high)
        if (1 / middle - 1) / math.log(1 / middle) > mean:
            low = middle
        else:
            high = middle
    return high
