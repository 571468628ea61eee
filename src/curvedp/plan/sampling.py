"""How examples are sampled, as declared; nothing of it is measured."""

from __future__ import annotations

from dataclasses import dataclass

from curvedp.accounting._validate import check_repeats
from curvedp.errors import ConfigurationError
from curvedp.values import is_number

__all__ = ["SamplingPlan"]


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
