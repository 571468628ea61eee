"""What a mechanism is: the only thing that makes a :class:`Release`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from curvedp.accounting.events import Event
from curvedp.barrier import ClippedSum, Release
from curvedp.noise.randomness import RandomStreams

__all__ = ["Mechanism", "NoiseState", "restore_release"]


@dataclass(frozen=True)
class NoiseState:
    """Where a mechanism's randomness comes from and which try of a step this is.

    Attributes:
        streams: the run's random streams (secret inside).
        attempt: 0, or how often this step was paid for before without a surviving
            release; another attempt draws other noise.
    """

    streams: RandomStreams
    attempt: int = 0


class Mechanism(Protocol):
    """Adds noise, and says what that costs."""

    def init(self, streams: RandomStreams) -> NoiseState:
        """State before the first step."""
        ...

    def update(
        self, clipped: ClippedSum, state: NoiseState
    ) -> tuple[Release, NoiseState]:
        """Release a noisy sum. The payment must be on disk when this is called."""
        ...

    def event(self, sample_rate: float) -> Event:
        """The event of one step whose examples were Poisson-sampled at this rate."""
        ...


def restore_release(
    values: Mapping[str, Tensor], frame: str, step: int, *, noise_std: float
) -> Release:
    """A release read back from where it was stored.

    The one way besides a mechanism to have one, and it lives here so that no other
    package constructs releases. What was released once may be read as often as wanted.
    """
    return Release(values, frame, step, noise_std)
