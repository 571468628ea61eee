"""Transforms of released gradients: pure ``(init, update)`` pairs that chain.

They see releases and their own state only, so whatever they do is post-processing and
costs no privacy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

__all__ = ["Chain", "Transform"]

Values = Mapping[str, Tensor]


class Transform(Protocol):
    """A pure function of a released mean gradient and a state."""

    def init(self, parameters: Values) -> Any:
        """State before the first step (JSON values and tensors only)."""
        ...

    def update(self, gradient: Values, state: Any) -> tuple[Values, Any]:
        """The transformed gradient and the next state."""
        ...


@dataclass(frozen=True)
class Chain:
    """Transforms one after the other; without any, the identity."""

    transforms: tuple[Transform, ...] = ()

    def init(self, parameters: Values) -> list[Any]:
        return [t.init(parameters) for t in self.transforms]

    def update(self, gradient: Values, state: list[Any]) -> tuple[Values, list[Any]]:
        following = []
        for transform, s in zip(self.transforms, state, strict=True):
            gradient, s = transform.update(gradient, s)
            following.append(s)
        return gradient, following
