r"""Noise shares on a grid, for sums that are added up under masks.

Secure aggregation adds whole numbers. So a client rounds its sum to a grid of spacing h
and adds noise that is rounded to it as well:

    v_i = h (clamp(round(a_i S_i / h)) + round(Z_i / h)),   Z_i ~ N(0, std_i^2 I)

**The sum is worth what it was planned to be.** Rounding comes *before* the noise, so it
is paid for as sensitivity: two neighbouring sums are apart by ``a_i C + h sqrt(d)`` at
most. The clamp holds every coordinate within a box and moves no two sums apart. What
the observer sees is ``sum_i v_i``, not rounded once but for every client. Its law is
that of rounding one Gaussian:

- ``round(Z / h)`` has the law, on whole numbers, of the density of ``Z / h + U``, U
  uniform on [-1/2, 1/2]. Adding several of them aliases by a factor of
  ``1 +- 2 exp(-pi^2 r^2)`` each, with r the share's noise in steps.
- For any offset u, the Gaussian density of variance ``R^2 + 16`` at whole numbers is
  that of: draw ``X ~ N(u, R^2)``, then a whole number near X with discrete Gaussian
  weights of variance 16 (by a factor of ``1 +- 2 exp(-32 pi^2)``). The second draw does
  not look at data.

So the sum is a function of one Gaussian release with 16 h^2 less variance than the
shares have together, and every share adds ``16 h^2`` (:data:`ROUNDING_STEPS` squared)
to what was planned. With r of 4 and more the factors differ from 1 by less than 1e-60
per coordinate and client.

Noise is rounded as if it had been drawn without rounding error (:mod:`.grid`). A grid
that fills 32 bits is finer than float32 normals are, and the whole numbers that they
never give would tell the sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from curvedp.barrier import ClippedSum, Release
from curvedp.errors import ConfigurationError
from curvedp.noise.mechanism import NoiseState

__all__ = ["LatticeShare"]

#: Standard deviation, in steps, of the draw that a rounded sum is explained by.
ROUNDING_STEPS = 4.0


@dataclass(frozen=True)
class LatticeShare:
    """One client's share: a scaled sum with noise, both on a grid.

    Attributes:
        multiplier: of the share, over what a unit moves the rounded sum by.
        bound: C, of the sums it accepts.
        scale: a, what the sum is multiplied by; at most 1.
        spacing: h.
        largest: every coordinate of the scaled sum is held within this.
        coordinates: d, of the whole sum.
    """

    multiplier: float
    bound: float
    scale: float
    spacing: float
    largest: float
    coordinates: int

    @property
    def noise_std(self) -> float:
        """``sqrt((m (a C + h sqrt(d)))^2 + (4 h)^2)``."""
        moved = self.scale * self.bound + self.spacing * math.sqrt(self.coordinates)
        return math.hypot(self.multiplier * moved, ROUNDING_STEPS * self.spacing)

    def update(
        self, clipped: ClippedSum, state: NoiseState
    ) -> tuple[Release, NoiseState]:
        """The share, in float64: whole multiples of the spacing."""
        count = sum(value.numel() for value in clipped.values.values())
        if clipped.bound > self.bound or count != self.coordinates:
            raise ConfigurationError(
                f"the sum has {count} coordinates and the bound {clipped.bound}, the "
                f"noise is made for {self.coordinates} and {self.bound}",
                "make clipping and noise from one plan",
            )
        limit, std = math.floor(self.largest / self.spacing), self.noise_std
        noise = state.streams.rounded_normals(
            count, std / self.spacing, clipped.step, state.attempt
        )
        values = {}
        sizes = [value.numel() for value in clipped.values.values()]
        for (name, value), own in zip(
            clipped.values.items(), torch.split(noise, sizes), strict=True
        ):
            steps = value.detach().cpu().double() * (self.scale / self.spacing)
            steps.round_().clamp_(-limit, limit).add_(own.reshape(value.shape))
            values[name] = steps.mul_(self.spacing)
        release = Release(values, clipped.frame, clipped.step, std)
        return release, NoiseState(state.streams)
