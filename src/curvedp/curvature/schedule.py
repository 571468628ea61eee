"""When factors are estimated anew: at declared steps, never "once per epoch"."""

from __future__ import annotations

from dataclasses import dataclass

from curvedp.errors import ConfigurationError

__all__ = ["Refresh"]


@dataclass(frozen=True)
class Refresh:
    """At step 0 and then every ``every`` steps.

    Attributes:
        every: steps between two estimates; None estimates once and keeps it (frozen).
        decay: weight of the past in an exponential moving average, in [0, 1); 0 takes
            each estimate alone.
    """

    every: int | None = 100
    decay: float = 0.0

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ConfigurationError(
                f"refresh must be at least 1 step, not {self.every!r}",
                "give a number of steps, or None for a whitener that never changes",
            )
        if not 0 <= self.decay < 1:
            raise ConfigurationError(
                f"the decay of factors must be in [0, 1), not {self.decay!r}"
            )

    def is_due(self, step: int) -> bool:
        """Whether factors are estimated before this step."""
        return step == 0 if self.every is None else step % self.every == 0

    def last_due(self, step: int) -> int:
        """The latest step, this one included, at which they were."""
        return 0 if self.every is None else step - step % self.every
