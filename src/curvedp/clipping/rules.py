r"""How a gradient's length is cut: three rules, one promise.

With ``n_i`` the norm of example i over all layers, ``n_il`` its norm in layer l of L:

==========  ==========================================  ===========================
rule        weight of example i in layer l              L2 bound on its contribution
==========  ==========================================  ===========================
flat        ``min(1, C / n_i)``                         ``C``
normalised  ``C / (n_i + gamma)``                       ``C``
per-layer   ``min(1, C_l / n_il)``, ``C_l = C/sqrt(L)``  ``sqrt(sum_l C_l^2) = C``
==========  ==========================================  ===========================

The bound is what one clipped vector really has *after rounding*: weights are scaled by
``1 - 2^-20``, which covers the rounding of the norm's square root, of the weight and of
the products with it. For the rounding of the sum over a batch they are shortened
further (:func:`curvedp.clipping.bounded.kept_of_bound`); docs/theory.md, "What the
bound rests on", says what of that is proven.

The sensitivity is C under add/remove and zero-out, 2C under replace-one
(:meth:`curvedp.barrier.ClippedSum.sensitivity`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from curvedp.errors import ConfigurationError
from curvedp.layers.io import LayerIO

__all__ = [
    "ClippingRule",
    "FlatClipping",
    "NormalisedClipping",
    "PerLayerClipping",
    "Seen",
]

#: Keeps the bound true after rounding; see the module's docstring.
SHRINK = 1.0 - 2.0**-20

#: Squared norms are float32: below about 1e-19 a norm underflows and would not be cut.
SMALLEST_BOUND = 1e-15


@dataclass(frozen=True)
class Seen:
    """What a rule may measure of a batch beside the gradient. Private.

    Attributes:
        ios: the layers; units that are not finite are replaced by zero in them.
        sq_norms: of the mapped gradients, ``[L, B]``.
        kept: ``[B]``, the units that contribute.
        scale: what gradients are multiplied with to be those of the loss.
    """

    ios: Sequence[LayerIO]
    sq_norms: Tensor
    kept: Tensor
    scale: float = 1.0

    def __repr__(self) -> str:
        # Never the tensors: they are private, and tracebacks end up in logs.
        return f"Seen({len(self.ios)} layers)"


@dataclass(frozen=True)
class ClippingRule(ABC):
    """A clip rule with its bound.

    Attributes:
        bound: C, the L2 bound on one example's contribution over all layers.
    """

    name: ClassVar[str]
    bound: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bound) and self.bound >= SMALLEST_BOUND):
            raise ConfigurationError(
                f"clip_norm must be a number from {SMALLEST_BOUND:g} on, not "
                f"{self.bound!r}",
                "1.0 is a common start; with normalised clipping it only scales the "
                "learning rate",
            )

    @abstractmethod
    def weights(self, sq_norms: Tensor) -> Tensor:
        """Weight of every example in every layer. ``[L, B] -> [L, B]``."""

    def of_part(self, share: float) -> ClippingRule:
        """The rule for an orthogonal part that has a share of the bound."""
        return self if share == 1 else replace(self, bound=share * self.bound)

    def to_json(self) -> dict[str, Any]:
        """The rule as public facts, for ledgers and result files."""
        return {"rule": self.name, "clip_norm": self.bound}

    def describe(self) -> str:
        """The rule in words, for statements."""
        return f"{self.name} clipping to {self.bound:g}"

    # A rule may learn from releases: it then has a threshold, which is public state.

    def first_threshold(self) -> float | None:
        """State before the first step; None for a rule that learns nothing."""
        return None

    def at(self, threshold: float | None) -> ClippingRule:
        """The rule at a threshold that earlier releases have led to."""
        return self

    @property
    def measured_sites(self) -> frozenset[str]:
        """Modules whose inputs ``extras`` looks at, so that they have to be kept."""
        return frozenset()

    def extras(self, seen: Seen) -> dict[str, Tensor]:
        """Further coordinates of the sum, which ``bound`` covers too.

        The same operations whatever the values are, as a CUDA graph needs.
        """
        return {}

    def read(
        self, values: Mapping[str, Tensor], expected_batch_size: float
    ) -> tuple[Mapping[str, Tensor], float | None]:
        """The released gradient sum and the next threshold, from a release's values."""
        return values, None


@dataclass(frozen=True)
class FlatClipping(ClippingRule):
    """``min(1, C / n_i)``: gradients shorter than C pass unchanged."""

    name: ClassVar[str] = "flat"

    def weights(self, sq_norms: Tensor) -> Tensor:
        norms = sq_norms.sum(0).sqrt()
        return (self.bound * SHRINK / norms).clamp_max(1).expand_as(sq_norms)


@dataclass(frozen=True)
class NormalisedClipping(ClippingRule):
    """``C / (n_i + gamma)``: every gradient becomes about C long; no threshold to tune.

    Attributes:
        gamma: keeps tiny gradients from being blown up.
    """

    name: ClassVar[str] = "normalised"
    gamma: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.gamma) and self.gamma > 0):
            raise ConfigurationError(
                f"gamma must be a positive number, not {self.gamma!r}", "0.01 is usual"
            )

    def weights(self, sq_norms: Tensor) -> Tensor:
        norms = sq_norms.sum(0).sqrt()
        return (self.bound * SHRINK / (norms + self.gamma)).expand_as(sq_norms)

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "gamma": self.gamma}


@dataclass(frozen=True)
class PerLayerClipping(ClippingRule):
    """Each layer on its own, to ``C / sqrt(L)``: the bound over all of them is C."""

    name: ClassVar[str] = "per-layer"

    def weights(self, sq_norms: Tensor) -> Tensor:
        each = self.bound * SHRINK / math.sqrt(sq_norms.shape[0])
        return (each / sq_norms.sqrt()).clamp_max(1)
