"""The barrier between private values and released ones.

A :class:`ClippedSum` is private but bounded: adding or removing one example moves it
by at most ``bound`` in L2 norm. A :class:`Release` is what is left after a mechanism
has added noise to it; it is differentially private and everything downstream of it
(optimisers, logs, plots, checkpoints) accepts nothing else.

They are two types, so that handing a private sum to an optimiser is a type error and
not a leak. Who may construct them is checked by ``tests/test_architecture.py``: only
``clipping.bounded`` makes a ``ClippedSum``, only ``noise`` makes a ``Release``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from curvedp.errors import ConfigurationError

__all__ = ["IDENTITY_FRAME", "ClippedSum", "Provenance", "Relation", "Release"]

#: The frame of unwhitened gradients.
IDENTITY_FRAME = "identity"


class Relation(Enum):
    """When two datasets count as neighbours: what one epsilon protects.

    ==============  ==========================================  ==============
    relation        neighbours                                  size is public
    ==============  ==========================================  ==============
    ADD_REMOVE      one has an example more than the other      no
    ZERO_OUT        one example is replaced by the zero record  yes
    REPLACE_ONE     one example is replaced by any other        yes
    ==============  ==========================================  ==============
    """

    ADD_REMOVE = "add-remove"
    ZERO_OUT = "zero-out"
    REPLACE_ONE = "replace-one"

    @property
    def size_is_public(self) -> bool:
        """Whether the number of examples is taken as known to everybody."""
        return self is not Relation.ADD_REMOVE

    @classmethod
    def parse(cls, value: Relation | str) -> Relation:
        """Read a relation from its printed name."""
        if isinstance(value, Relation):
            return value
        try:
            return cls(value)
        except ValueError:
            names = ", ".join(r.value for r in cls)
            raise ConfigurationError(
                f"unknown relation {value!r}", f"choose one of: {names}"
            ) from None


class Provenance(Enum):
    """Where the inputs of a curvature estimate came from: may it steer a private run?

    ===========  ==================================================  =========
    provenance   made from                                           is_public
    ===========  ==================================================  =========
    SYNTHETIC    random numbers and declared facts                   yes
    PUBLIC       data or weights that are declared public            yes
    RELEASED     values that a mechanism has already paid for        yes
    ORACLE       private data, unprotected: research only            no
    ===========  ==================================================  =========

    An ORACLE value voids the guarantee of every run that it steers.
    """

    SYNTHETIC = "synthetic"
    PUBLIC = "public"
    RELEASED = "released"
    ORACLE = "oracle"

    @property
    def is_public(self) -> bool:
        """Whether it may steer a private run without being paid for."""
        return self is not Provenance.ORACLE

    def combine(self, other: Provenance) -> Provenance:
        """Provenance of what is made from both: the weaker of the two.

        SYNTHETIC < PUBLIC < RELEASED < ORACLE; associative, commutative, idempotent.
        """
        weakest_last = list(Provenance)
        return max(self, other, key=weakest_last.index)


@dataclass(frozen=True)
class ClippedSum:
    """Sum over the sampled examples of their clipped gradients. Private, bounded.

    Attributes:
        values: one tensor per parameter name, in the frame ``frame``.
        bound: L2 bound on what one example contributes, over all tensors together.
        frame: id of the whitening in whose coordinates the values stand.
        step: the logical step that the examples were sampled for.
    """

    values: Mapping[str, Tensor]
    bound: float
    frame: str
    step: int

    def sensitivity(self, relation: Relation) -> float:
        """Largest L2 distance between the sums of two neighbouring datasets."""
        return (2.0 if relation is Relation.REPLACE_ONE else 1.0) * self.bound

    def merge(self, other: ClippedSum) -> ClippedSum:
        """Add the sum over *other* examples of the same step (a virtual batch, a rank).

        The parts must be disjoint: every example is in one of them. The bound then
        stays what it is, because each example still contributes once.
        """
        if (self.bound, self.frame, self.step) != (
            other.bound,
            other.frame,
            other.step,
        ):
            raise ConfigurationError(
                "two clipped sums of different steps, bounds or frames cannot be "
                f"merged: {self._facts()} and {other._facts()}",
                "merge only the parts of one logical batch",
            )
        if self.values.keys() != other.values.keys():
            raise ConfigurationError("the clipped sums are of different parameters")
        merged = {name: v + other.values[name] for name, v in self.values.items()}
        return ClippedSum(merged, self.bound, self.frame, self.step)

    def _facts(self) -> str:
        return f"(step {self.step}, bound {self.bound}, frame {self.frame})"

    def __repr__(self) -> str:
        # Never the values: a traceback or a log line must not carry private sums.
        return f"ClippedSum{self._facts()}"


@dataclass(frozen=True)
class Release:
    """A noisy clipped sum. Differentially private; may be logged, stored and shared.

    Attributes:
        values: one tensor per parameter name, float32.
        frame: id of the whitening in whose coordinates the values stand.
        step: the logical step it was released for.
        noise_std: standard deviation of the noise on every coordinate of the sum.
    """

    values: Mapping[str, Tensor]
    frame: str
    step: int
    noise_std: float

    def is_finite(self) -> bool:
        """Whether every coordinate is a number; releases, so anybody may ask."""
        return all(bool(torch.isfinite(v).all()) for v in self.values.values())
