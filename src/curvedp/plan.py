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
    Event,
    calibrate_sigma,
    get_accountant,
    repeated,
)
from curvedp.accounting._validate import check_repeats
from curvedp.barrier import Relation
from curvedp.clipping.rules import ClippingRule
from curvedp.errors import ConfigurationError
from curvedp.noise import (
    GaussianMechanism,
    Grid,
    Mechanism,
    RandomStreams,
    SecureStreams,
)
from curvedp.sampling import PoissonSampler
from curvedp.values import is_number

__all__ = ["DEFAULT_NOISE_SOURCE", "Plan", "SamplingPlan"]

#: The only source before there was a choice, so also that of a run that names none.
DEFAULT_NOISE_SOURCE = "numpy Philox"


@dataclass(frozen=True)
class SamplingPlan:
    """How examples are sampled, as declared; nothing in it is measured.

    Attributes:
        sample_rate: q, the probability that an example is in a step's batch.
        steps: T, the number of steps that the budget is planned for.
        expected_batch_size: B, the divisor of the noisy sum.
        epoch_steps: steps that one pass of the loader makes (all of them if declared
            by rate).
        public_size: number of examples where the declaration makes it public.
    """

    sample_rate: float
    steps: int
    expected_batch_size: float
    epoch_steps: int
    public_size: int | None = None

    def __post_init__(self) -> None:
        if not (is_number(self.sample_rate) and 0 < self.sample_rate <= 1):
            raise ConfigurationError(
                f"sample_rate must be above 0 and at most 1, not {self.sample_rate!r}",
                "it is the expected batch size divided by the number of examples",
            )
        for name in ("steps", "epoch_steps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(
                    f"{name} must be a whole number from 1 on, not {value!r}",
                    "declare how many there are",
                )
            check_repeats(value, name)
        size = self.expected_batch_size
        if not (is_number(size) and size > 0):
            raise ConfigurationError(
                f"expected_batch_size must be a positive number, not {size!r}",
                "declare a number near the batch size you expect",
            )

    @classmethod
    def by_rate(
        cls, sample_rate: float, steps: int, expected_batch_size: float
    ) -> SamplingPlan:
        """Nothing depends on the number of examples, which stays private."""
        return cls(sample_rate, steps, expected_batch_size, epoch_steps=steps)

    @classmethod
    def by_size(cls, batch_size: int, epochs: int, size: int) -> SamplingPlan:
        """Derived from the number of examples, which is thereby public."""
        for name, value in (("batch_size", batch_size), ("epochs", epochs)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(
                    f"{name} must be a whole number from 1 on, not {value!r}",
                    "declare how many there are",
                )
        if batch_size > size:
            raise ConfigurationError(
                f"batch_size {batch_size} is larger than the dataset of {size}",
                f"choose at most {size}",
            )
        epoch_steps = size // batch_size
        return cls(
            sample_rate=batch_size / size,
            steps=epochs * epoch_steps,
            expected_batch_size=float(batch_size),
            epoch_steps=epoch_steps,
            public_size=size,
        )

    @classmethod
    def declare(
        cls,
        size: int,
        *,
        sample_rate: float | None = None,
        steps: int | None = None,
        expected_batch_size: float | None = None,
        batch_size: int | None = None,
        epochs: int | None = None,
    ) -> SamplingPlan:
        """One of the two ways, whichever was given in full.

        ``size`` is looked at only in the second way, which makes it public.
        """
        by_rate = {
            "sample_rate": sample_rate,
            "steps": steps,
            "expected_batch_size": expected_batch_size,
        }
        by_size = {"batch_size": batch_size, "epochs": epochs}
        rate_given = [n for n, v in by_rate.items() if v is not None]
        size_given = [n for n, v in by_size.items() if v is not None]
        ways = (
            "declare sampling either by sample_rate, steps and expected_batch_size "
            "(the number of examples stays private), or by batch_size and epochs (the "
            "number of examples is then public)"
        )
        if rate_given and size_given:
            raise ConfigurationError(
                f"{' and '.join(rate_given + size_given)} cannot be combined", ways
            )
        if batch_size is not None and epochs is not None:
            return cls.by_size(batch_size, epochs, size)
        if sample_rate is not None and steps is not None:
            if expected_batch_size is None:
                raise ConfigurationError(
                    "expected_batch_size is missing: it divides the noisy sum, and "
                    "sample_rate times the number of examples is private",
                    "declare a number near the batch size you expect; it need not be "
                    "exact, it only scales the learning rate",
                )
            return cls.by_rate(sample_rate, steps, expected_batch_size)
        raise ConfigurationError("the sampling is not declared in full", ways)


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
        """
        chosen = _choose_relation(sampling, relation)
        _check_delta(delta, sampling, allow_large_delta)
        if (epsilon is None) == (noise_multiplier is None):
            raise ConfigurationError(
                "give either epsilon (the noise is calibrated to it) or "
                "noise_multiplier (epsilon follows from it)",
                "epsilon=1.0 is a strong guarantee, 8.0 a weak one",
            )
        if noise_multiplier is None:
            assert epsilon is not None
            noise_multiplier = calibrate_sigma(
                epsilon=epsilon,
                delta=delta,
                sample_rate=sampling.sample_rate,
                steps=sampling.steps,
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
        )
        plan.mechanism()  # refuses an impossible multiplier now
        return plan

    def mechanism(self) -> Mechanism:
        """The noise that fits the clip bound."""
        return GaussianMechanism(self.noise_multiplier, self.clipping.bound)

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

    def sampler(
        self, streams: RandomStreams, attempt: Callable[[int], int]
    ) -> PoissonSampler:
        """The sampler at the declared rate, on the run's secret stream.

        Args:
            streams: the run's random streams.
            attempt: how often a step was paid for before. A step that is made again is
                drawn again: two releases from one draw cost more than two events.
        """
        return streams.sampler(
            self.sampling.sample_rate, lambda step: [step, attempt(step)]
        )

    def step_event(self) -> Event:
        """The event of one step."""
        return self.mechanism().event(self.sampling.sample_rate)

    def epsilon(self, steps: int | None = None) -> float:
        """Epsilon of a number of steps fixed in advance; by default of all of them."""
        count = self.sampling.steps if steps is None else steps
        if count == 0:
            return 0.0
        event = repeated(self.step_event(), count)
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
        return facts


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
