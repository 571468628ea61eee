"""The Plan: sampling, clipping, noise and accounting in one object, made whole.

A guarantee fails when its parts come from different places: a sampler that shuffles
under an accountant that assumes Poisson, a clip bound changed after calibration. Here
they come from one frozen value. The engine asks it for the sampler, the mechanism and
the event; nobody sets them separately.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from curvedp.accounting import (
    CyclicGaussianEvent,
    Event,
    LedgerRecord,
    PLDAccountant,
    calibrate_sigma,
    get_accountant,
    repeated,
    tally,
)
from curvedp.barrier import Relation
from curvedp.clipping.rules import ClippingRule
from curvedp.errors import ConfigurationError
from curvedp.noise import (
    CorrelatedMechanism,
    GaussianMechanism,
    Grid,
    Mechanism,
    RandomStreams,
    SecureStreams,
    Stream,
)
from curvedp.plan.correlation import (
    Correlation,
    PlannedCorrelation,
    best_bands,
    largest_bands,
)
from curvedp.plan.sampling import SamplingPlan
from curvedp.sampling import CyclicSampler, Sampler
from curvedp.values import is_number

__all__ = ["DEFAULT_NOISE_SOURCE", "Plan"]

#: The only source before there was a choice, so also that of a run that names none.
DEFAULT_NOISE_SOURCE = "numpy Philox"


@dataclass(frozen=True)
class Plan:
    """Everything that the guarantee depends on, fixed before data is touched.

    Attributes:
        sampling: declared sampling.
        clipping: clip rule with its bound.
        relation: which datasets count as neighbours.
        delta: the delta of (epsilon, delta).
        noise_multiplier: s.
        target_epsilon: what s was calibrated for; None if s was given instead.
        accountant: name of the accountant.
        examples_per_person: K, declared, if the unit is a person; None for examples.
        secure: noise and sampling come from a cryptographic generator, and the noise
            stands on a grid (see ``docs/secure_noise.md``).
        correlation: of the noise of different steps, whose examples take turns in
            groups; None for independent noise and plain Poisson sampling.
    """

    sampling: SamplingPlan
    clipping: ClippingRule
    relation: Relation
    delta: float
    noise_multiplier: float
    target_epsilon: float | None = None
    accountant: str = "pld"
    examples_per_person: int | None = None
    secure: bool = False
    correlation: PlannedCorrelation | None = None

    @classmethod
    def make(
        cls,
        sampling: SamplingPlan,
        clipping: ClippingRule,
        *,
        delta: float,
        epsilon: float | None = None,
        noise_multiplier: float | None = None,
        relation: Relation | str | None = None,
        accountant: str = "pld",
        allow_large_delta: bool = False,
        examples_per_person: int | None = None,
        secure: bool = False,
        correlation: Correlation | None = None,
        refresh: int = 0,
    ) -> Plan:
        """Check the settings against each other and calibrate the noise.

        Args:
            sampling: declared sampling.
            clipping: clip rule.
            delta: refused at or above 1/size unless ``allow_large_delta``: such a
                guarantee allows publishing one example in full.
            epsilon: target; the noise is calibrated to it. Or
            noise_multiplier: given; epsilon follows.
            relation: by default add-remove, or zero-out where the size is public.
            accountant: "pld" or "rdp".
            allow_large_delta: see ``delta``.
            examples_per_person: declared number of slots, if the unit is a person.
            secure: cryptographic, float-safe noise.
            correlation: of the noise of different steps.
            refresh: steps between two whiteners, which end a block of such noise.
        """
        chosen = _choose_relation(sampling, relation)
        _check_delta(delta, sampling, allow_large_delta)
        if (epsilon is None) == (noise_multiplier is None):
            raise ConfigurationError(
                "give either epsilon (the noise is calibrated to it) or "
                "noise_multiplier (epsilon follows from it)",
                "epsilon=1.0 is a strong guarantee, 8.0 a weak one",
            )
        planned = None
        if correlation is not None:
            _check_correlated(clipping, secure)
            bands = correlation.bands
            if isinstance(bands, str):
                bands = _best_bands(
                    correlation, sampling, delta, epsilon, chosen, accountant, refresh
                )
            planned = correlation.planned(sampling.steps, bands, refresh)
        if noise_multiplier is None:
            assert epsilon is not None
            noise_multiplier = calibrate_sigma(
                epsilon=epsilon,
                delta=delta,
                sample_rate=_event_rate(sampling, planned),
                steps=sampling.steps if planned is None else planned.rounds,
                relation=chosen,
                accountant=accountant,
            )
        plan = cls(
            sampling,
            clipping,
            chosen,
            delta,
            noise_multiplier,
            epsilon,
            accountant,
            examples_per_person,
            secure,
            planned,
        )
        # refuse an impossible multiplier, or more bands than the batches allow, now
        plan.step_event()
        plan.mechanism()
        return plan

    def mechanism(self) -> Mechanism:
        """The noise that fits the clip bound."""
        sigma, bound = self.noise_multiplier, self.clipping.bound
        if self.correlation is None:
            return GaussianMechanism(sigma, bound)
        strategy = self.correlation.design.strategy()
        return CorrelatedMechanism(sigma, bound, strategy, self.correlation.keep)

    @property
    def event_rate(self) -> float:
        """Sampling rate of a step's event: of all examples, or of a group's members."""
        return _event_rate(self.sampling, self.correlation)

    @property
    def rounds(self) -> int:
        """How many draws an example is in at most: every step's, or its group's."""
        return (
            self.sampling.steps if self.correlation is None else self.correlation.rounds
        )

    def streams(
        self, seed: int | None = None, *, unsafe_reproducible_noise: int | None = None
    ) -> RandomStreams:
        """New random streams of the planned kind, for one process.

        Raises:
            ConfigurationError: the noise cannot be both secure and reproducible, or
                the package that secure noise needs is not installed.
        """
        if not self.secure:
            return RandomStreams(
                seed, unsafe_reproducible_noise=unsafe_reproducible_noise
            )
        if unsafe_reproducible_noise is not None:
            raise ConfigurationError(
                "secure and unsafe_reproducible_noise exclude each other: noise that "
                "anybody can recompute is not secure",
                "leave one of them out",
            )
        return SecureStreams(seed)

    @property
    def noise_source(self) -> str:
        """The generator of noise and sampling, and the grid of the noise."""
        if not self.secure:
            return DEFAULT_NOISE_SOURCE
        planned_std = self.noise_multiplier * self.clipping.bound
        return f"AES-256-CTR, grid 2^{Grid.of(planned_std).exponent}"

    def sampler(self, streams: RandomStreams, attempt: Callable[[int], int]) -> Sampler:
        """The sampler at the declared rate, on the run's secret stream.

        Args:
            streams: the run's random streams.
            attempt: how often a step was paid for before. A step that is made again is
                drawn again: two releases from one draw cost more than two events.
        """
        within = streams.sampler(self.event_rate, lambda step: [step, attempt(step)])
        if self.correlation is None:
            return within
        return CyclicSampler(
            within,
            self.correlation.bands,
            lambda: streams.generator(Stream.GROUPS),
            equal=self.sampling.public_size is not None,
        )

    def step_event(self, step: int = 0, assignment: str = "") -> Event:
        """The event of a step.

        Args:
            step: decides which group's turn it is, if groups take turns.
            assignment: public name of how the groups were drawn.
        """
        if self.correlation is None:
            return self.mechanism().event(self.event_rate)
        groups = self.correlation.bands
        return CyclicGaussianEvent(
            self.noise_multiplier, self.event_rate, groups, step % groups, assignment
        )

    def run_event(self, steps: int | None = None) -> Event:
        """All events of the run, or of its first steps."""
        count = self.sampling.steps if steps is None else steps
        if self.correlation is None:
            return repeated(self.step_event(), count)
        return tally(self.step_event(step) for step in range(count))

    def steps_left(self, ledger: LedgerRecord, step: int, assignment: str = "") -> int:
        """Steps from ``step`` on that the budget allows after what was paid."""
        if self.correlation is None:
            return max(0, self.sampling.steps - ledger.count())
        return self.correlation.steps_left(ledger, step, assignment)

    def epsilon(self, steps: int | None = None) -> float:
        """Epsilon of a number of steps fixed in advance; by default of all of them."""
        count = self.sampling.steps if steps is None else steps
        if count == 0:
            return 0.0
        event = self.run_event(count)
        accountant = get_accountant(self.accountant)
        return accountant.epsilon(event, self.relation, self.delta)

    @property
    def unit(self) -> str:
        """What one epsilon protects."""
        return "example" if self.examples_per_person is None else "person"

    def facts(self) -> dict[str, Any]:
        """The plan as JSON values; all of them are public."""
        facts: dict[str, Any] = {
            "unit": self.unit,
            "relation": self.relation.value,
            "delta": self.delta,
            "target_epsilon": self.target_epsilon,
            "noise_multiplier": self.noise_multiplier,
            "clipping": self.clipping.to_json(),
            "sampling": "poisson",
            "sample_rate": self.sampling.sample_rate,
            "planned_steps": self.sampling.steps,
            "epoch_steps": self.sampling.epoch_steps,
            "expected_batch_size": self.sampling.expected_batch_size,
            "accountant": self.accountant,
            "noise_source": self.noise_source,
        }
        if self.examples_per_person is not None:
            facts["examples_per_person"] = self.examples_per_person
        if self.sampling.public_size is not None:
            facts["public_size"] = self.sampling.public_size
        if self.correlation is not None:
            facts |= {
                "sampling": "cyclic-poisson",
                "groups": self.correlation.bands,
                "group_rate": self.event_rate,
                "rounds": self.rounds,
                "noise": self.correlation.facts(),
            }
        return facts


def _event_rate(
    sampling: SamplingPlan, correlation: PlannedCorrelation | None
) -> float:
    if correlation is None:
        return sampling.sample_rate
    return correlation.rate(sampling)


def _check_correlated(clipping: ClippingRule, secure: bool) -> None:
    if secure:
        raise ConfigurationError(
            "secure noise stands on a grid, and correlated noise is a sum of many that "
            "would leave it",
            "leave out secure, or use a recipe with independent noise (dp-sgd)",
        )
    if clipping.first_threshold() is not None:
        raise ConfigurationError(
            "adaptive clipping changes the unit of the sum from step to step, and the "
            "noise of one step could not cancel that of another",
            "use clipping = 'flat' or 'normalised', or a recipe with independent noise",
        )


def _best_bands(
    correlation: Correlation,
    sampling: SamplingPlan,
    delta: float,
    epsilon: float | None,
    relation: Relation,
    accountant: str,
    refresh: int,
) -> int:
    if largest_bands(sampling) == 1:
        return 1
    if epsilon is None:
        raise ConfigurationError(
            "bands = 'auto' weighs more noise against less of it left at the end, for "
            "a target epsilon, and noise_multiplier was given instead",
            "give epsilon, or a number of bands",
        )
    # a coarse grid is enough to compare, and ten times as fast
    by = PLDAccountant(1e-3) if accountant == "pld" else get_accountant(accountant)

    def sigma(rate: float, steps: int) -> float:
        return calibrate_sigma(
            epsilon, delta, sample_rate=rate, steps=steps, relation=relation,
            accountant=by,
        )  # fmt: skip

    return best_bands(correlation, sampling, sigma, refresh)


def _choose_relation(
    sampling: SamplingPlan, relation: Relation | str | None
) -> Relation:
    size_is_public = sampling.public_size is not None
    if relation is None:
        return Relation.ZERO_OUT if size_is_public else Relation.ADD_REMOVE
    chosen = Relation.parse(relation)
    if size_is_public and not chosen.size_is_public:
        raise ConfigurationError(
            "batch_size and epochs make the number of examples public, and add-remove "
            "protects that number",
            "declare sample_rate, steps and expected_batch_size instead, or choose the "
            "relation zero-out (same noise, the size is said to be public)",
        )
    return chosen


def _check_delta(delta: float, sampling: SamplingPlan, allow_large: bool) -> None:
    if not (is_number(delta) and 0 < delta < 1):
        raise ConfigurationError(
            f"delta must be between 0 and 1, not {delta!r}", "1e-5 is a common choice"
        )
    size = sampling.public_size or sampling.expected_batch_size / sampling.sample_rate
    if delta >= 1 / size and not allow_large:
        raise ConfigurationError(
            f"delta {delta:g} is not below 1/{size:.0f}, one over the number of "
            "examples: the guarantee would allow publishing an example in full",
            f"choose a smaller one, such as {_rounded_down(0.1 / size):g}, or allow it "
            "with allow_large_delta=True (--allow-large-delta)",
        )


def _rounded_down(x: float) -> float:
    """The power of ten at or below x."""
    return float(10.0 ** math.floor(math.log10(x)))
