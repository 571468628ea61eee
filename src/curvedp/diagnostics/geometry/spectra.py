r"""Eigenvalues of the factors, layer by layer (DP-KFC, figures 2 and 6)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvedp.curvature import (
    DenseFactor,
    Factors,
    LookupFactor,
    SecondMoment,
    Spectral,
    spectral,
)

__all__ = ["LayerSpectrum", "layer_spectra", "thinned"]


#: Of a sum of outer products in float32, relative to its largest eigenvalue.
ROUNDING = 4 * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class LayerSpectrum:
    """Sorted eigenvalues of one factor of a layer.

    Attributes:
        layer: name of the layer's first parameter.
        factor: "A", "G", "F" (Kronecker product) or "diagonal".
        ranks: ``[k]``, from 1 on. All ranks of A and G; of F, which may have millions,
            ranks at equal distances on a logarithmic axis.
        values: ``[k]``, the largest first, not negative.
        size: how many there are in all.
        trace: the sum of all of them.
    """

    layer: str
    factor: str
    ranks: Tensor
    values: Tensor
    size: int
    trace: float

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "layer": self.layer,
            "factor": self.factor,
            "size": self.size,
            "trace": self.trace,
            "participation": self.participation(),
            "ranks": self.ranks.tolist(),
            "values": self.values.tolist(),
        }

    def participation(self) -> float:
        """``(sum l)^2 / sum l^2`` over the values: how many directions carry it.

        nan for F, of which not all values are kept.
        """
        if self.factor == "F":
            return math.nan
        square = float(self.values.square().sum())
        return float(self.values.sum()) ** 2 / square if square > 0 else math.nan


def layer_spectra(factors: Factors, most: int = 400) -> list[LayerSpectrum]:
    """Eigenvalues of every layer's factors, in float64.

    ``A`` and ``G`` are means over the source, as :mod:`curvedp.curvature` defines them;
    ``F = A (x) G`` has the eigenvalues ``l_i(A) l_j(G)``, sorted (DP-KFC, eq. 48).
    Groups of a convolution are taken together.

    Args:
        factors: from one source.
        most: ranks of F that are kept.
    """
    return [
        spectrum
        for name, factor in factors.layers.items()
        for spectrum in _of_layer(name, spectral(factor), most)
    ]


def _of_layer(name: str, factor: Spectral, most: int) -> list[LayerSpectrum]:
    if isinstance(factor, DenseFactor | LookupFactor):
        if isinstance(factor, LookupFactor):
            a = factor.counts.double()[None] / max(factor.tokens, 1e-300)
        else:
            a = _values(factor.a)
        g = _values(factor.g)
        products = g[:, :, None] * a[:, None, :]  # [G, r, p], group by group
        return [
            _sorted(name, "A", a.flatten()),
            _sorted(name, "G", g.flatten()),
            _sorted(name, "F", products.flatten(), most),
        ]
    squares = torch.cat([factor.mean(n).flatten() for n in factor.squares])
    return [_sorted(name, "diagonal", squares)]


def _values(moment: SecondMoment) -> Tensor:
    """``[G, n]``, with the zeros that a thin factorisation leaves out.

    What the rounding of float32 sums cannot tell from zero is zero, too.
    """
    values = moment.spectrum().values
    values = torch.where(values > ROUNDING * values[:, :1], values, 0.0)
    missing = moment.size - values.shape[-1]
    return torch.nn.functional.pad(values, (0, missing))


def _sorted(
    layer: str, factor: str, values: Tensor, most: int | None = None
) -> LayerSpectrum:
    found = values.double().cpu().sort(descending=True).values
    ranks = thinned(len(found), most)
    return LayerSpectrum(
        layer, factor, ranks, found[ranks - 1], len(found), float(found.sum())
    )


def thinned(size: int, most: int | None) -> Tensor:
    """Ranks 1 to size; at most about ``most``, at equal logarithmic distances."""
    if most is None or size <= most:
        return torch.arange(1, size + 1)
    steps = torch.linspace(0, math.log(size), most, dtype=torch.float64).exp()
    ranks: Tensor = torch.unique(steps.round().long().clamp(1, size))
    return ranks
