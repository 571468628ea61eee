r"""A threshold that follows a quantile of the gradient norms, at a price that is paid.

Andrew et al., "Differentially Private Learning with Adaptive Clipping", NeurIPS 2021:
``C <- C exp(-rate (fraction of norms below C - quantile))``. The fraction is a release
like any other. Here it is *one more coordinate of the same sum*: in units of the
threshold, each example contributes

    ( g_i min(1/C, 1/n_i),  +share if n_i <= C else -share )

whose length is at most ``sqrt(1 + share^2)``, whatever the example is. Noise of ``s``
times that bound on every coordinate makes it one Gaussian event with multiplier ``s``:
the count is paid for, and there is no second event to forget. It is centred: a count of
0 and 1 would have twice the sensitivity for the same information.

With ``share = 0.05`` the noise on the gradient grows by 0.12 %, and the noisy fraction
has standard deviation ``10 s / B``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from curvedp.clipping.rules import SHRINK, SMALLEST_BOUND, ClippingRule, Seen
from curvedp.errors import ConfigurationError

__all__ = ["COUNT", "AdaptiveClipping"]

#: Name of the extra coordinate; no parameter can be called so.
COUNT = "$norms below the threshold"


@dataclass(frozen=True)
class AdaptiveClipping(ClippingRule):
    """Flat clipping at a threshold that follows a quantile.

    Attributes:
        bound: ``sqrt(1 + share^2)``, constant: the sum is in units of the threshold.
        threshold: C of the current step; public, it follows from releases.
        quantile: the share of norms that should be below C.
        rate: how fast C moves.
        share: weight of the count beside the gradient.
    """

    name: ClassVar[str] = "adaptive"
    threshold: float = 1.0
    quantile: float = 0.5
    rate: float = 0.2
    share: float = 0.05

    @classmethod
    def start(cls, clip_norm: float, **settings: float) -> AdaptiveClipping:
        """A rule that begins at ``clip_norm``."""
        share = settings.get("share", cls.share)
        bound = math.sqrt(1.0 + share**2)
        return cls(bound, threshold=clip_norm, **settings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.threshold) and self.threshold >= SMALLEST_BOUND):
            raise ConfigurationError(
                f"clip_norm must be a number from {SMALLEST_BOUND:g} on, not "
                f"{self.threshold!r}",
                "it is where the adaptive threshold starts; 1.0 is a common start",
            )
        if not 0 < self.quantile < 1:
            raise ConfigurationError(
                f"quantile must be between 0 and 1, not {self.quantile!r}",
                "0.5 is usual",
            )
        for name in ("rate", "share"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigurationError(f"{name} must be positive, not {value!r}")
        if self.bound < math.sqrt(1.0 + self.share**2):
            raise ConfigurationError(
                "the bound does not cover the count beside the gradient",
                "make the rule with AdaptiveClipping.start",
            )

    def first_threshold(self) -> float:
        return self.threshold

    def at(self, threshold: float | None) -> AdaptiveClipping:
        return self if threshold is None else replace(self, threshold=threshold)

    def of_part(self, share: float) -> AdaptiveClipping:
        if share != 1:
            raise ConfigurationError(
                "adaptive clipping has one threshold, and this recipe clips parts of a "
                "gradient by themselves",
                "choose flat or normalised clipping",
            )
        return self

    def weights(self, sq_norms: Tensor) -> Tensor:
        norms = sq_norms.sum(0).sqrt()
        weights = (SHRINK / norms).clamp_max(SHRINK / self.threshold)
        return weights.expand_as(sq_norms)

    def extras(self, seen: Seen) -> dict[str, Tensor]:
        below = seen.sq_norms.sum(0).sqrt() <= self.threshold
        signs = torch.where(below, 1.0, -1.0)
        count = torch.where(seen.kept, signs, torch.zeros_like(signs)).sum()
        return {COUNT: self.share * SHRINK * count.float()}

    def read(
        self, values: Mapping[str, Tensor], expected_batch_size: float
    ) -> tuple[dict[str, Tensor], float]:
        count = float(values[COUNT]) / self.share
        fraction = 0.5 + 0.5 * count / expected_batch_size
        # a noisy fraction may be far outside of [0, 1] for a small batch
        error = min(max(fraction, 0.0), 1.0) - self.quantile
        following = self.threshold * math.exp(-self.rate * error)
        scaled = {n: self.threshold * v for n, v in values.items() if n != COUNT}
        return scaled, min(max(following, SMALLEST_BOUND), 1.0 / SMALLEST_BOUND)

    def describe(self) -> str:
        return (
            f"adaptive clipping from {self.threshold:g} to the {self.quantile:g} "
            "quantile, whose count is paid for in the same event"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "rule": self.name,
            "clip_norm": self.threshold,
            "quantile": self.quantile,
            "rate": self.rate,
            "share": self.share,
        }
