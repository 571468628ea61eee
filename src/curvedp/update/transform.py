"""What a transform is: a pure step between a release and the optimiser.

It sees releases, the parameters that came of them and its own state, so whatever it
does is post-processing and costs no privacy. What it may know besides the gradient is
how much noise is in it: that is public too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Gradient", "LookAhead", "Transform", "Values"]

Values = Mapping[str, Tensor]


@dataclass(frozen=True)
class Gradient:
    """A released mean gradient, and the variance of the noise in each coordinate.

    Attributes:
        values: by parameter name.
        noise_variance: by parameter name, a number (a tensor without dimensions) for
            all coordinates or a tensor of the parameter's shape. ``(s C / B)^2`` for a
            release as it is; a back-map and every transform on the way change it. None
            where it is not known or nobody asks.
    """

    values: Values
    noise_variance: Values | None = None


@dataclass(frozen=True)
class LookAhead:
    """Where the next gradient is to be taken, relative to the parameters x.

    Per example: ``weight grad(x + offsets) + (1 - weight) grad(x)``, clipped as one
    vector. With a weight of 1 that is one gradient.

    Attributes:
        offsets: by parameter name.
        weight: of the gradient ahead.
    """

    offsets: Values
    weight: float = 1.0


class Transform(ABC):
    """A pure function of a released mean gradient and a state.

    The first two methods make a transform. The others are for transforms that use the
    noise, look ahead, or follow the parameters; by default nothing of the kind.

    A frozen dataclass is best: fields that are numbers, words or yes and no become
    settings of the recipe that uses it.
    """

    @abstractmethod
    def init(self, parameters: Values) -> Any:
        """State before the first step (JSON values and tensors only)."""

    @abstractmethod
    def update(self, gradient: Gradient, state: Any) -> tuple[Gradient, Any]:
        """The transformed gradient and the next state; arguments stay as they are."""

    @property
    def reads_noise(self) -> bool:
        """Whether it needs ``gradient.noise_variance``."""
        return False

    @property
    def tracks_noise(self) -> bool:
        """Whether its output says how much noise is in it, if its input does."""
        return False

    @property
    def looks_ahead(self) -> bool:
        """Whether gradients are to be taken elsewhere than at the parameters."""
        return False

    def look_ahead(self, state: Any) -> LookAhead | None:
        """Where to take the next gradient; None for the parameters themselves."""
        return None

    def stepped(self, before: Values, after: Values, state: Any) -> Any:
        """The state after the optimiser moved the parameters.

        ``before`` and ``after`` may change later: keep copies, not references.
        """
        return state

    def averaged(self, state: Any) -> Values | None:
        """An average of the parameters so far, where the transform keeps one."""
        return None
