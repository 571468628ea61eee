"""Independent Gaussian noise: ``Release = ClippedSum + N(0, (s C)^2 I)``."""

from __future__ import annotations

import math
from dataclasses import dataclass

from curvedp.accounting.events import Event, PoissonGaussianEvent
from curvedp.barrier import ClippedSum, Release
from curvedp.errors import ConfigurationError
from curvedp.noise.mechanism import NoiseState
from curvedp.noise.randomness import RandomStreams

__all__ = ["GaussianMechanism"]


@dataclass(frozen=True)
class GaussianMechanism:
    """The Gaussian mechanism on a Poisson-sampled, clipped sum.

    Attributes:
        noise_multiplier: s, noise standard deviation per unit of the clip bound.
        bound: C, the largest bound of the sums it accepts.

    Guarantees:
        Every coordinate of every parameter gets noise of standard deviation ``s C``
        (or as much more as the streams need for what they round), also when the batch
        was empty. Under replace-one the standard deviation is the same: the accountant
        takes the pair at distance 2C into account.
    """

    noise_multiplier: float
    bound: float

    def __post_init__(self) -> None:
        for name in ("noise_multiplier", "bound"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigurationError(
                    f"{name} must be a positive number, not {value!r}"
                )

    @property
    def noise_std(self) -> float:
        """``s C``."""
        return self.noise_multiplier * self.bound

    def init(self, streams: RandomStreams) -> NoiseState:
        return NoiseState(streams)

    def update(
        self, clipped: ClippedSum, state: NoiseState
    ) -> tuple[Release, NoiseState]:
        if clipped.bound > self.bound:
            raise ConfigurationError(
                f"the sum is bounded by {clipped.bound}, the noise is made for "
                f"{self.bound}",
                "make clipping and noise from one Plan",
            )
        values, std = state.streams.add_gaussian(
            clipped.values,
            self.noise_multiplier,
            self.bound,
            clipped.step,
            state.attempt,
        )
        release = Release(values, clipped.frame, clipped.step, std)
        return release, NoiseState(state.streams)

    def event(self, sample_rate: float) -> Event:
        return PoissonGaussianEvent(
            noise_multiplier=self.noise_multiplier, sample_rate=sample_rate
        )
