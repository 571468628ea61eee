r"""Correlated noise in a plan: its settings, its bands, and what has been spent.

With b bands, examples are in b groups that take turns (:mod:`curvedp.sampling.cyclic`).
A group's members are sampled at b times the rate, so that batches are as large as they
would be, and an example is in ``ceil(T / b)`` draws instead of T. More bands cancel
more noise and need more of it; ``bands="auto"`` takes those of least predicted error
``sigma(b)^2 tr(W X_b^-1)`` at the target epsilon.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from curvedp.accounting import CyclicGaussianEvent, LedgerRecord
from curvedp.errors import ConfigurationError, LedgerError
from curvedp.noise.correlated import KEEPING
from curvedp.noise.design import Design, error_of
from curvedp.noise.strategies import Momentum, PrefixSums, Workload, optimise_toeplitz
from curvedp.noise.strategies.optimise import check_sizes
from curvedp.plan.sampling import SamplingPlan
from curvedp.values import is_number, is_whole

__all__ = [
    "Correlation",
    "DesignedFor",
    "PlannedCorrelation",
    "best_bands",
    "largest_bands",
]

#: A block of noise shorter than this many bands has little to cancel.
LEAST_BLOCK = 4
#: Share of a rate that its rounding can be: 1.1 - 0.6 is above one half.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Correlation:
    """How the noise of different steps is correlated; settings of a recipe.

    Attributes:
        strategy: "banded" (the best matrix) or "toeplitz" (nearly as good, found at
            once, for any number of steps).
        bands: how many steps the noise of one reaches; 1 is independent noise; "auto"
            takes what has the least predicted error at the target epsilon.
        most_bands: that "auto" looks at; it bounds the memory.
        noise_momentum: the momentum that the strategy is designed for; 0 is for plain
            steps. It changes the noise and not the optimiser.
        noise_memory: "buffer" keeps ``bands - 1`` vectors of the model's size,
            "regenerate" none, and draws the noise of all steps again in each.
    """

    strategy: str = "banded"
    bands: int | str = "auto"
    most_bands: int = 32
    noise_momentum: float = 0.0
    noise_memory: str = "buffer"

    def __post_init__(self) -> None:
        if self.strategy == "blt":
            raise ConfigurationError(
                "a buffered strategy has no bands, so that its examples would have to "
                "take turns in a fixed order, without amplification by sampling",
                "use the strategy 'banded' or 'toeplitz' to train; for a large model "
                "set noise_memory = 'regenerate'",
            )
        for name, known in (
            ("strategy", ("banded", "toeplitz")),
            ("noise_memory", KEEPING),
        ):
            if getattr(self, name) not in known:
                raise ConfigurationError(
                    f"unknown {name} {getattr(self, name)!r}",
                    f"choose one of: {', '.join(known)}",
                )
        if self.bands != "auto" and not is_whole(self.bands, 1):
            raise ConfigurationError(
                f"bands is {self.bands!r}", "give 'auto' or a whole number from 1 on"
            )
        if not is_whole(self.most_bands, 1):
            raise ConfigurationError(
                f"most_bands is {self.most_bands!r}", "give a whole number from 1 on"
            )
        if not is_number(self.noise_momentum):
            raise ConfigurationError(
                f"noise_momentum is {self.noise_momentum!r}", "give a number"
            )
        self.workload()

    @staticmethod
    def setting_names() -> list[str]:
        """What a user may set."""
        return [f.name for f in fields(Correlation)]

    def facts(self) -> dict[str, Any]:
        """All settings as JSON values."""
        return {name: getattr(self, name) for name in self.setting_names()}

    def workload(self) -> Workload:
        """What the noise is designed for."""
        return Momentum(self.noise_momentum) if self.noise_momentum else PrefixSums()

    def planned(
        self,
        steps: int,
        bands: int,
        refresh: int = 0,
        designed_for: DesignedFor | None = None,
    ) -> PlannedCorrelation:
        """For a run of so many steps, and so many bands.

        Args:
            steps: T.
            bands: b.
            refresh: steps after which a new whitener ends a block; 0 for never.
            designed_for: a workload that was found, in place of the settings' own.
        """
        if refresh and bands > 1 and refresh < LEAST_BLOCK * bands:
            raise ConfigurationError(
                f"a new whitener every {refresh} steps ends the block of noise, and "
                f"{bands} bands have little to cancel in it",
                f"set refresh to {LEAST_BLOCK * bands} or more, or to 0 to keep the "
                "first whitener, or use fewer bands",
            )
        block = refresh if self.strategy == "banded" and bands > 1 else 0
        workload = self.workload() if designed_for is None else designed_for.workload
        design = Design.of(self.strategy, steps, bands, workload, block)
        origin = "" if designed_for is None else designed_for.origin_text()
        return PlannedCorrelation(design, self.noise_memory, origin)


@dataclass(frozen=True)
class DesignedFor:
    """A workload that was found from public values before the first step.

    Attributes:
        workload: what the noise is designed for.
        origin: how it was found and from what, as JSON values. Public.
    """

    workload: Workload
    origin: dict[str, Any]

    def origin_text(self) -> str:
        """The origin as JSON text, so that equal ones are equal."""
        return json.dumps(self.origin, sort_keys=True)


@dataclass(frozen=True)
class PlannedCorrelation:
    """Correlated noise with all numbers fixed.

    Attributes:
        design: of the strategy.
        keep: how earlier noise is had at hand.
        origin: how the workload was found, as JSON text; "" if it was not.
    """

    design: Design
    keep: str
    origin: str = ""

    @property
    def spectrum(self) -> dict[str, Any] | None:
        """Facts of the spectrum that the noise is designed for, if it is for one."""
        return json.loads(self.origin) if self.origin else None

    @property
    def bands(self) -> int:
        """b: also the number of groups that take turns."""
        return self.design.bands

    @property
    def rounds(self) -> int:
        """``ceil(T / b)``: draws that one example is in, at most."""
        return math.ceil(self.design.steps / self.bands)

    def rate(self, sampling: SamplingPlan) -> float:
        """Probability of a group's member to be in its step's batch."""
        return group_rate(sampling, self.bands)

    def steps_left(self, ledger: LedgerRecord, step: int, assignment: str) -> int:
        """Steps from ``step`` on until one group would be drawn once too often.

        A step that was paid for and made again has used up a turn of its group, so the
        run ends up to b steps earlier. Groups that are drawn anew start counting where
        the largest of the others has stopped.
        """
        counts: dict[str, dict[int, int]] = {assignment: {}}
        for payment in ledger.payments():
            event = payment.event
            if not isinstance(event, CyclicGaussianEvent):
                raise LedgerError(
                    f"the ledger has a payment of another kind ({event.kind}) than the "
                    "steps of this run",
                    "restore the ledger from a copy",
                )
            own = counts.setdefault(event.assignment, {})
            own[event.group] = own.get(event.group, 0) + 1
        present = counts.pop(assignment)
        left = self.rounds - sum(max(own.values()) for own in counts.values())
        stop = self.design.steps
        for group in range(self.bands):
            turn = step + (group - step) % self.bands
            turns = max(0, left - present.get(group, 0))
            stop = min(stop, turn + turns * self.bands)
        return max(0, stop - step)

    def facts(self) -> dict[str, Any]:
        """As JSON values; all of them are public."""
        own = {k: v for k, v in self.design.to_json().items() if k != "steps"}
        found = {} if self.spectrum is None else {"spectrum": self.spectrum}
        return {**own, "noise_memory": self.keep, **found}


def group_rate(sampling: SamplingPlan, bands: int) -> float:
    """Sampling rate within one of ``bands`` groups, for batches of the same size.

    ``B / floor(N / b)`` where N is public. Otherwise ``b q``: with groups that examples
    draw for themselves, each example is in a step's batch with the declared chance q.
    """
    if sampling.public_size is None:
        rate = bands * sampling.sample_rate
    else:
        rate = sampling.expected_batch_size / max(1, sampling.public_size // bands)
    if rate > 1 + _ROUNDING:
        drawn = (
            f"a sampling rate of {sampling.sample_rate:g}"
            if sampling.public_size is None
            else f"a batch of {sampling.expected_batch_size:g}"
        )
        raise ConfigurationError(
            f"{bands} bands need {bands} groups of examples, and {drawn} is more than "
            "a group has",
            f"use up to {largest_bands(sampling)} bands, or smaller batches",
        )
    return min(1.0, rate)


def largest_bands(sampling: SamplingPlan) -> int:
    """Most bands that batches of the declared size allow."""
    if sampling.public_size is None:
        most = math.floor(1 / sampling.sample_rate * (1 + _ROUNDING))
    else:
        most = sampling.public_size // math.ceil(sampling.expected_batch_size)
    return max(1, min(most, sampling.steps))


def best_bands(
    correlation: Correlation,
    sampling: SamplingPlan,
    sigma: Callable[[float, int], float],
    refresh: int = 0,
    workload: Workload | None = None,
) -> int:
    """Bands of least predicted error.

    The error of b bands is taken from the best Toeplitz matrix, which is quick to find
    and close to the best of all. Powers of two first, then what lies between.

    Args:
        correlation: strategy and workload.
        sampling: declared.
        sigma: noise multiplier that a sample rate and a number of draws need.
        refresh: of the whitener; it bounds the bands.
        workload: in place of the settings' own.
    """
    check_sizes(sampling.steps, 1)  # before minutes go into the first of them
    most = min(largest_bands(sampling), correlation.most_bands)
    if refresh:
        most = max(1, min(most, refresh // LEAST_BLOCK))
    workload, steps = workload or correlation.workload(), sampling.steps
    errors: dict[int, float] = {}

    def error(bands: int) -> float:
        if bands not in errors:
            needed = sigma(group_rate(sampling, bands), math.ceil(steps / bands))
            own = error_of(optimise_toeplitz(workload, steps, bands), workload)
            errors[bands] = needed**2 * own
        return errors[bands]

    powers: list[int] = [2**k for k in range(most.bit_length()) if 2**k <= most]
    best = min(powers, key=error)
    stride = best // 2
    while stride >= max(1, best // 8):
        near = [b for b in (best - stride, best + stride) if 1 <= b <= most]
        best = min([best, *near], key=error)
        stride //= 2
    return best
