r"""From a spectrum to a root: damping, exponent, rank.

With eigenvalues ``l_j`` of a second moment of dimension n:

- *relative* damping: ``l_j / (tr / n) + damping``. Scale-free: the mean eigenvalue of
  every factor becomes ``1 + damping``, whatever the layer.
- *absolute* damping: ``l_j + damping``, for reproductions.

The root has the eigenvalues ``(...)^-exponent``. With a rank k, the k largest stay and
all others take the mean of the rest. Directions that probes never reached have the
eigenvalue 0, and then the damping alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from curvedp.curvature import SecondMoment
from curvedp.errors import ConfigurationError
from curvedp.whitening.roots import DiagonalRoot, FullRoot, LowRankRoot, Root

__all__ = ["Damping", "damped_root", "diagonal_root"]


@dataclass(frozen=True)
class Damping:
    """What is added to eigenvalues before the root is taken.

    Attributes:
        amount: lambda, positive.
        relative: to the mean eigenvalue, which is divided out.
    """

    amount: float = 0.05
    relative: bool = True

    def __post_init__(self) -> None:
        if not (self.amount > 0 and math.isfinite(self.amount)):
            raise ConfigurationError(
                f"damping must be a positive number, not {self.amount!r}",
                "without damping, directions that probes never reach have no scale; "
                "0.02 to 0.3 is the usual range",
            )

    def of(self, values: Tensor, mean: Tensor) -> Tensor:
        """Damped eigenvalues; ``mean`` is their mean over all n directions."""
        if not self.relative:
            return values + self.amount
        # a layer that no probe excites has nothing to divide by, and becomes I-like
        return values / torch.where(mean > 0, mean, torch.ones_like(mean)) + self.amount


def damped_root(
    moment: SecondMoment, exponent: float, damping: Damping, rank: int | None = None
) -> Root:
    """``(M + damping)^-exponent`` of a moment's mean.

    Args:
        moment: M, groups at dimension 0.
        exponent: p in [0, 1]; 1/2 whitens.
        damping: lambda.
        rank: keep so many eigenpairs; None keeps all.
    """
    kept = moment.spectrum(rank)
    size = kept.size
    mean = kept.trace / size
    values = damping.of(kept.values, mean[:, None]) ** -exponent
    if kept.values.shape[-1] == size:
        return FullRoot(kept.vectors, values)
    rest = (kept.trace - kept.values.sum(-1)).clamp_min(0)
    tail = rest / (size - kept.values.shape[-1])
    return LowRankRoot(kept.vectors, values, damping.of(tail, mean) ** -exponent)


def diagonal_root(values: Tensor, exponent: float, damping: Damping) -> DiagonalRoot:
    """The same for a diagonal moment, whose values may have any shape."""
    values = values.double()
    return DiagonalRoot(damping.of(values, values.mean()) ** -exponent)
