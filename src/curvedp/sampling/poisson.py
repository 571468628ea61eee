"""Exact Poisson sampling at a declared rate, with a secret seed.

Amplification by sampling holds because nobody knows who was drawn. So the generator
comes from outside (a secret stream of the run), and neither the draws nor their number
are ever logged, returned or stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from curvedp.errors import ConfigurationError

__all__ = ["PoissonSampler"]


@dataclass(frozen=True)
class PoissonSampler:
    """Each example is in each step's batch with probability q, independently.

    Attributes:
        sample_rate: q, declared.
        generator: gives the secret generator of a step.
    """

    sample_rate: float
    generator: Callable[[int], np.random.Generator] = field(repr=False)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.sample_rate) and 0 < self.sample_rate <= 1):
            raise ConfigurationError(
                f"sample_rate must be above 0 and at most 1, not {self.sample_rate!r}",
                "it is the expected batch size divided by the number of examples",
            )

    def draw(self, step: int, population: int) -> npt.NDArray[np.int64]:
        """The indices of a step's batch, in random order. May be empty.

        A binomial count and then a uniform subset of that size have the same law as
        one coin per example, in time proportional to the batch.
        """
        rng = self.generator(step)
        count = rng.binomial(population, self.sample_rate)
        return rng.choice(population, size=count, replace=False).astype(np.int64)
