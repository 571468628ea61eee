r"""Gaussian noise on a public grid, drawn without rounding error.

Adding floating-point noise to a floating-point sum leaks: which values can come out
depends on the sum (Mironov, CCS 2012). Here both are whole multiples of ``g = 2^k``,
``k`` fixed by the planned standard deviation alone, and are added exactly:

    Y = g (round(S / g) + round(Z / g)),   Z ~ N(0, std^2)

``round(S/g)`` is a whole number, so ``Y = g round((g round(S/g) + Z) / g)``: a function
of the Gaussian mechanism on the rounded sum. What float32 makes of Y is a function of Y
again. Rounding S moves two neighbouring sums apart by at most g per coordinate, so

    std = s (C + g sqrt(d))

pays for it: the multiplier is s, whatever was rounded. ``docs/secure_noise.md`` has
the proof and the distance of the law that is drawn from the one that is promised.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Decimal, localcontext

import torch
from torch import Tensor

from curvedp.errors import ConfigurationError
from curvedp.noise.keystream import Words

__all__ = ["Grid", "exact_normals", "rounded_normals"]

#: 2^26 to 2^27 grid points to a standard deviation: the largest normal, 13.4, is then
#: still a 32-bit number of grid steps.
GRID_BITS = 26

#: sqrt(2 ln 2^128), rounded up: no uniform of 128 bits gives a larger normal.
LARGEST_NORMAL = 13.33

#: A sum is held within this many grid steps, so that float64 adds noise exactly.
LARGEST_SUM = 2.0**52

#: Error of a float64 Box-Muller normal, over ``r + 1/r``. The sum of all roundings is
#: under a quarter of it if log, sin and cos are right to 4 units in the last place.
FLOAT64_ERROR = 2.0**-47

#: Pairs of normals that are made at once; they fit into a core's cache.
CHUNK = 1 << 12

_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230782")
_DIGITS = 60


@dataclass(frozen=True)
class Grid:
    """The grid of a planned noise.

    Attributes:
        exponent: k of the spacing ``g = 2^k``.
    """

    exponent: int

    @classmethod
    def of(cls, planned_std: float) -> Grid:
        """The grid for noise of a standard deviation; it depends on nothing else."""
        return cls(math.frexp(planned_std)[1] - 1 - GRID_BITS)

    @property
    def spacing(self) -> float:
        """``g``."""
        return math.ldexp(1.0, self.exponent)

    def widened(self, multiplier: float, bound: float, coordinates: int) -> float:
        """``s (C + g sqrt(d))``: the noise for a sum that is rounded to the grid."""
        root = math.isqrt(coordinates) + 1  # not below sqrt(d)
        std = multiplier * (bound + self.spacing * root)
        if LARGEST_NORMAL * std / self.spacing >= 2**31:
            raise ConfigurationError(
                f"secure noise of multiplier {multiplier:g} on {coordinates} "
                "coordinates does not fit its grid",
                "train fewer parameters, or use the default noise",
            )
        return std

    def add(self, value: Tensor, steps: Tensor) -> Tensor:
        """A tensor, rounded to the grid, plus whole grid steps; exact in float64."""
        # float64 everywhere but on devices that have none
        device = value.device if value.is_cuda else torch.device("cpu")
        rounded = (value.to(device, torch.float64) / self.spacing).round_()
        rounded.clamp_(-LARGEST_SUM, LARGEST_SUM).add_(steps.to(device))
        return rounded.mul_(self.spacing).to(value.device, value.dtype)


def rounded_normals(
    words: Callable[[int], Words], count: int, scale: float
) -> torch.Tensor:
    """``round(scale z)`` for independent standard normals z, as int32.

    Box-Muller on pairs of 128-bit uniforms. It is computed in float64; where the error
    of that might decide which way a number is rounded, it is computed again with 60
    digits. So the law is that of *exact* Box-Muller.

    Args:
        words: gives uniform 64-bit words.
        count: how many numbers.
        scale: standard deviation in grid steps, below 2^27.
    """
    drawn = torch.empty(count, dtype=torch.int32)
    for start in range(0, count, 2 * CHUNK):
        size = min(2 * CHUNK, count - start)
        pairs = (size + 1) // 2
        uniforms = words(4 * pairs).reshape(4, pairs)
        normals, error = float64_normals(uniforms)
        scaled = normals.mul_(scale)
        steps = scaled.round()
        certain = scaled.sub_(steps).abs_().add_(error.mul_(scale)) < 0.5
        for row, column in torch.nonzero(~certain).tolist():
            exact = exact_normals(*(int(w) for w in uniforms[:, column]))[row]
            steps[row, column] = _nearest(exact, scale)
        drawn[start : start + size] = steps.view(-1)[:size]
    return drawn


def float64_normals(uniforms: Words) -> tuple[Tensor, Tensor]:
    """Pairs of normals and a bound on their error. ``[4, n] -> [2, n], [n]``.

    The first two words are one uniform in (0, 1], the other two one in [0, 1).
    """
    high, low, turn, _ = uniforms
    first = torch.from_numpy(high * 2.0**-64 + (low * 2.0**-128 + 2.0**-128))
    angle = torch.from_numpy(turn * (2 * math.pi * 2.0**-64))
    radius = first.log_().abs_().mul_(2).sqrt_()
    normals = torch.empty(2, len(radius), dtype=torch.float64)
    torch.cos(angle, out=normals[0])
    torch.sin(angle, out=normals[1])
    normals *= radius
    return normals, radius.reciprocal().add_(radius).mul_(FLOAT64_ERROR)


def exact_normals(high: int, low: int, turn: int, rest: int) -> tuple[Decimal, Decimal]:
    """The pair of normals of four words, to 50 digits and more."""
    with localcontext() as context:
        context.prec = _DIGITS
        one = Decimal(2) ** 128
        radius = (-2 * ((Decimal((high << 64 | low) + 1)) / one).ln()).sqrt()
        quadrant, within = divmod((turn << 64 | rest) * 4, 1 << 128)
        cos, sin = _cos_sin(Decimal(within) / one * _PI / 2)
        for _ in range(quadrant):
            cos, sin = -sin, cos
        return radius * cos, radius * sin


def _cos_sin(angle: Decimal) -> tuple[Decimal, Decimal]:
    """Their Taylor series; the angle is in the first quadrant."""
    sums = [Decimal(1), Decimal(0), Decimal(0), Decimal(0)]
    term, n = Decimal(1), 0
    while term > Decimal(10) ** -_DIGITS:
        n += 1
        term = term * angle / n
        sums[n % 4] += term
    return sums[0] - sums[2], sums[1] - sums[3]


def _nearest(normal: Decimal, scale: float) -> int:
    with localcontext() as context:
        context.prec = _DIGITS
        scaled = normal * Decimal(scale)
        return int(scaled.to_integral_value(rounding=ROUND_HALF_EVEN))
