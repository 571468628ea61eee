"""Independent Gaussian noise: ``Release = ClippedSum + N(0, (s C)^2 I)``."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from curvedp.accounting.events import Event, PoissonGaussianEvent
from curvedp.barrier import ClippedSum, Release
from curvedp.errors import ConfigurationError
from curvedp.noise.mechanism import NoiseState
from curvedp.noise.randomness import RandomStreams, Stream

__all__ = ["GaussianMechanism"]


@dataclass(frozen=True)
class GaussianMechanism:
    """The Gaussian mechanism on a Poisson-sampled, clipped sum.

    Attributes:
        noise_multiplier: s, noise standard deviation per unit of the clip bound.
        bound: C, the largest bound of the sums it accepts.

    Guarantees:
        Every coordinate of every parameter gets noise of standard deviation ``s C``,
        also when the batch was empty. Under replace-one the standard deviation is the
        same: the accountant takes the pair at distance 2C into account.
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
        draw = _Normals(state, clipped.step)
        values = {
            name: value + self.noise_std * draw.like(value)
            for name, value in clipped.values.items()
        }
        release = Release(values, clipped.frame, clipped.step, self.noise_std)
        return release, NoiseState(state.streams)

    def event(self, sample_rate: float) -> Event:
        return PoissonGaussianEvent(
            noise_multiplier=self.noise_multiplier, sample_rate=sample_rate
        )


class _Normals:
    """Standard normals at a step's address, on the CPU or on the value's device."""

    def __init__(self, state: NoiseState, step: int) -> None:
        self._streams = state.streams
        self._generator = state.streams.generator(Stream.NOISE, step, state.attempt)
        self._cuda: torch.Generator | None = None

    def like(self, value: Tensor) -> Tensor:
        if value.is_cuda:
            # Philox with a 64-bit seed, from the same address and entropy
            if self._cuda is None:
                self._cuda = torch.Generator(device=value.device)
                seed = int(self._generator.integers(2**63 - 1))
                self._cuda.manual_seed(seed)
            return torch.randn(
                value.shape,
                device=value.device,
                dtype=value.dtype,
                generator=self._cuda,
            )
        drawn = self._streams.normals(value.shape, self._generator)
        return drawn.to(value.device, value.dtype)
