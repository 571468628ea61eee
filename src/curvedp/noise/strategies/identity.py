"""Independent noise as a strategy: C is the identity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from curvedp.noise.strategies.base import Memory, Strategy, Vector
from curvedp.noise.strategies.workloads import Floats

__all__ = ["Identity"]


@dataclass(frozen=True)
class Identity(Strategy):
    """``x_t = z_t``; remembers nothing.

    Attributes:
        length: number of steps.
    """

    length: int
    kind: ClassVar[str] = "identity"

    @property
    def steps(self) -> int:
        return self.length

    @property
    def bands(self) -> int:
        return 1

    @property
    def memory(self) -> int:
        return 0

    def materialize(self, steps: int | None = None) -> Floats:
        return np.eye(self.length if steps is None else steps)

    def next(self, noise: Vector, memory: Memory, step: int) -> tuple[Any, Memory]:
        return noise, ()

    def arrays(self) -> dict[str, Floats]:
        return {"length": np.array([float(self.length)])}
