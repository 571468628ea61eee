r"""Cyclic Poisson sampling: b groups take turns, and within a group it is Poisson.

Every example is in one of b groups, for the whole run. Step t draws from group
``t mod b`` alone, each member with probability q. An example so takes part at most once
in b steps, where the columns of a strategy with b bands do not meet, and in at most
``ceil(T / b)`` steps altogether: that many Poisson-sampled Gaussian events are what a
run of T steps costs it.

The groups must not tell anybody who is in the data. Where the number of examples is
protected, each example draws its group by itself, so that one more or less leaves the
law of the others' groups as it is; the draw is secret, because examples have numbers
that shift when one is taken out. Where the number is public, groups are as equal as can
be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from curvedp.errors import ConfigurationError
from curvedp.sampling.poisson import PoissonSampler
from curvedp.values import is_whole

__all__ = ["CyclicSampler", "Sampler"]

Indices = npt.NDArray[np.int64]


class Sampler(Protocol):
    """Says which examples a step sees."""

    def draw(self, step: int, population: int) -> Indices:
        """The indices of a step's batch, in random order. May be empty."""
        ...


@dataclass(frozen=True)
class CyclicSampler:
    """Poisson sampling within one of b groups, which take turns.

    Attributes:
        within: Poisson sampling at the rate of a group's members.
        groups: b.
        generator: gives the secret generator of the groups; always from its beginning.
        equal: groups of equal size, where the number of examples is public; otherwise
            each example's group is drawn by itself.
    """

    within: PoissonSampler
    groups: int
    generator: Callable[[], np.random.Generator] = field(repr=False)
    equal: bool = False
    _members: dict[int, list[Indices]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not is_whole(self.groups, 1):
            raise ConfigurationError(
                f"{self.groups!r} groups of examples", "give a whole number from 1 on"
            )

    def draw(self, step: int, population: int) -> Indices:
        """The indices of a step's batch, all of one group. May be empty."""
        members = self.members(step, population)
        return members[self.within.draw(step, len(members))]

    def members(self, step: int, population: int) -> Indices:
        """The group whose turn it is. Secret, as the groups are."""
        if population not in self._members:
            self._members[population] = self._split(population)
        return self._members[population][step % self.groups]

    def _split(self, population: int) -> list[Indices]:
        rng = self.generator()
        if self.equal:
            group = np.empty(population, dtype=np.int64)
            group[rng.permutation(population)] = np.arange(population) % self.groups
        else:
            group = rng.integers(self.groups, size=population)
        return [np.flatnonzero(group == g).astype(np.int64) for g in range(self.groups)]
