"""The settings that all tiers share: what is promised, and how data is sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from curvedp.barrier import Relation
from curvedp.errors import ConfigurationError
from curvedp.plan import DesignedFor, Plan, SamplingPlan
from curvedp.recipes import Recipe

__all__ = ["PrivacySettings", "default_physical_batch_size", "even_parts"]

#: Largest physical batch that is chosen without being asked for.
LARGEST_DEFAULT = 512
#: On a CPU, activations of a part: with less, the cost of each call begins to show.
CPU_PART_BYTES = 2**24
SMALLEST_PART = 16


@dataclass(frozen=True)
class PrivacySettings:
    """Keyword arguments of ``make_private`` and ``Trainer`` that make the plan.

    Attributes:
        epsilon: target; or
        noise_multiplier: given noise, from which epsilon follows.
        delta: of (epsilon, delta).
        batch_size: with ``epochs``: expected batch size; the number of examples is
            then public (relation zero-out).
        epochs: passes over the data, each of ``size // batch_size`` steps.
        sample_rate: with ``steps`` and ``expected_batch_size``: nothing depends on the
            number of examples (relation add-remove).
        steps: number of steps.
        expected_batch_size: divisor of the noisy sum.
        relation: "add-remove", "zero-out" or "replace-one".
        accountant: "pld" (default, tight) or "rdp".
        allow_large_delta: accept a delta at or above one over the number of examples.
        secure: noise and sampling from a cryptographic generator, safe against attacks
            on floating-point noise. Needs the extra ``secure``.
        independent_process: the process is one of several that a launcher started, and
            each is a run of its own, whose epsilons add up.
    """

    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float = 1e-5
    batch_size: int | None = None
    epochs: int | None = None
    sample_rate: float | None = None
    steps: int | None = None
    expected_batch_size: float | None = None
    relation: Relation | str | None = None
    accountant: str = "pld"
    allow_large_delta: bool = False
    secure: bool = False
    independent_process: bool = False

    @classmethod
    def of(cls, settings: dict[str, Any]) -> PrivacySettings:
        """From keyword arguments; an unknown one is refused by name."""
        known = [f.name for f in fields(cls)]
        unknown = sorted(settings.keys() - set(known))
        if unknown:
            raise ConfigurationError(
                f"unknown setting {', '.join(unknown)}",
                f"the privacy settings are: {', '.join(known)}",
            )
        return cls(**settings)

    @property
    def hides_size(self) -> bool:
        """Whether neighbouring data sets differ in size, which is then protected."""
        if self.relation is not None:
            return not Relation.parse(self.relation).size_is_public
        return self.sample_rate is not None

    def sampling(self, size: int) -> SamplingPlan:
        """The declared sampling; ``size`` matters only when it is made public."""
        return SamplingPlan.declare(
            size,
            sample_rate=self.sample_rate,
            steps=self.steps,
            expected_batch_size=self.expected_batch_size,
            batch_size=self.batch_size,
            epochs=self.epochs,
        )

    def first_plan(
        self, recipe: Recipe, size: int, examples_per_person: int | None = None
    ) -> Plan:
        """The plan; or what is fixed of it before noise is designed for a spectrum.

        Sampling and clipping are then those of the plan, and the noise is made up: the
        spectrum is found with it, and no step is made.
        """
        if recipe.eigenvalues is None:
            return self.plan(recipe, size, examples_per_person)
        made_up = replace(self, epsilon=None, noise_multiplier=1.0)
        alone = replace(recipe, correlation=None, eigenvalues=None, search={})
        return made_up.plan(alone, size, examples_per_person)

    def plan(
        self,
        recipe: Recipe,
        size: int,
        examples_per_person: int | None = None,
        designed_for: DesignedFor | None = None,
    ) -> Plan:
        """The whole plan of a private recipe; ``size`` counts units.

        A recipe whose noise is for a spectrum that was not looked for yet gets a plan
        with noise for prefix sums: the guarantee is the same, the bands may not be.
        """
        return Plan.make(
            self.sampling(size),
            recipe.clipping_rule(),
            delta=self.delta,
            epsilon=self.epsilon,
            noise_multiplier=self.noise_multiplier,
            relation=self.relation,
            accountant=self.accountant,
            allow_large_delta=self.allow_large_delta,
            examples_per_person=examples_per_person,
            secure=self.secure,
            correlation=recipe.correlation,
            refresh=0 if recipe.curvature is None else recipe.curvature.refresh,
            designed_for=designed_for,
        )


def default_physical_batch_size(
    expected_batch_size: float, activation_bytes: int = 0, device: str = "cpu"
) -> int:
    """Room for most draws (two standard deviations), within reason.

    The others take two parts. More room would be padding in every step.

    On a CPU, large batches gain no speed: parts whose activations stay near the caches
    are as fast, take less memory and leave less room for padding.

    Args:
        expected_batch_size: rows that a step draws on average.
        activation_bytes: of an example, from the coverage.
        device: type of the device that computes.
    """
    largest = LARGEST_DEFAULT
    if device == "cpu" and activation_bytes:
        largest = min(largest, max(SMALLEST_PART, CPU_PART_BYTES // activation_bytes))
    return min(LARGEST_DEFAULT, even_parts(expected_batch_size, largest))


def even_parts(expected_batch_size: float, largest: int) -> int:
    """Rows of a part where most draws take as few parts as ``largest`` allows.

    Parts are even, so that padding is little: a multiple of 8 rows, which may be up to
    7 more than ``largest`` where that is none.
    """
    room = expected_batch_size + 2 * math.sqrt(expected_batch_size)
    parts = math.ceil(room / largest)
    return 8 * math.ceil(room / parts / 8)
