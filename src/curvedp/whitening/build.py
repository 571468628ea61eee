r"""From factors to a whitener: which side, which exponent, which rank, which layers.

============  ==========================================================
side          roots taken
============  ==========================================================
``a``         of the inputs; outputs stay as they are (the default)
``g``         of the output gradients
``both``      of both
============  ==========================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from curvedp.curvature import (
    DenseFactor,
    DiagonalFactor,
    Factor,
    Factors,
    LookupFactor,
    SecondMoment,
    Spectral,
    names_of,
    spectral,
)
from curvedp.errors import ConfigurationError
from curvedp.whitening.costs import affordable_rank
from curvedp.whitening.damping import Damping, damped_root, diagonal_root
from curvedp.whitening.diagonal import DiagonalMap
from curvedp.whitening.layerwise import LayerwiseWhitener
from curvedp.whitening.maps import IdentityMap, KroneckerMap, LayerMap
from curvedp.whitening.roots import DiagonalRoot, IdentityRoot, ProductRoot, Root

__all__ = ["SIDES", "KroneckerWhitening", "diagonal_whitening", "lookup_shares"]

SIDES = ("a", "g", "both")
_DAMPING = Damping()


@dataclass(frozen=True)
class KroneckerWhitening:
    """``P g = L g R`` for every layer with a Kronecker factor, diagonal for the rest.

    Attributes:
        side: "a", "g" or "both".
        exponent: p in [0, 1].
        damping: of the inputs' factor.
        output_damping: of the outputs' factor; None takes the same.
        rank: eigenpairs that are kept, fewer in a layer that they would cost more than
            its own pass (:func:`curvedp.whitening.costs.affordable_rank`); None keeps
            all.
        product: whiten channels and places of a convolution's patches apart.
        match_scale: scale each layer's map so that the mean squared norm of probe
            gradients stays what it is, ``tr(P^2 F) = tr(F)``.
        leave_out: names of layers or parameters that stay unwhitened.
        diagonal: the diagonal of ``A (x) G`` alone, which scales every coordinate by
            itself; side, rank, product and match_scale then have no part.
    """

    side: str = "a"
    exponent: float = 0.5
    damping: Damping = _DAMPING
    output_damping: Damping | None = None
    rank: int | None = 32
    product: bool = False
    match_scale: bool = False
    leave_out: tuple[str, ...] = ()
    diagonal: bool = False

    def __post_init__(self) -> None:
        if self.side not in SIDES:
            raise ConfigurationError(
                f"unknown side {self.side!r}", f"choose one of: {', '.join(SIDES)}"
            )
        if not 0 <= self.exponent <= 1:
            raise ConfigurationError(
                f"the exponent must be in [0, 1], not {self.exponent!r}",
                "1/2 whitens, 1/4 is half of that, 0 does nothing",
            )
        if self.rank is not None and self.rank < 1:
            raise ConfigurationError(
                f"the rank must be at least 1, not {self.rank!r}",
                "give a number of eigenpairs, or None for all of them",
            )

    def build(
        self, factors: Factors, parameters: Mapping[str, Tensor], step: int = 0
    ) -> LayerwiseWhitener:
        """The whitener of the factors for parameters of these shapes."""
        maps = [
            IdentityMap(names_of(factor))
            if _left_out(factor, self.leave_out)
            else self._map(spectral(factor), parameters)
            for factor in factors.layers.values()
        ]
        return _whole(maps, parameters, factors)

    def _map(self, factor: Spectral, parameters: Mapping[str, Tensor]) -> LayerMap:
        if isinstance(factor, DiagonalFactor):
            return _diagonal(factor, self.exponent, self.damping)
        shape = parameters[factor.weight].shape
        if self.diagonal:
            return _product_diagonal(factor, shape, self.exponent, self.damping)
        left, right = self._roots(factor, shape)
        bias = factor.bias if isinstance(factor, DenseFactor) else None
        groups = factor.a.groups if isinstance(factor, DenseFactor) else 1
        scale = 1.0
        if self.match_scale:
            scale = _matched_scale(factor, left, right)
        return KroneckerMap(factor.weight, bias, shape, groups, left, right, scale)

    def _roots(
        self, factor: DenseFactor | LookupFactor, shape: torch.Size
    ) -> tuple[Root, Root]:
        """Over the rows and over the columns of the weight's matrix."""
        inputs, outputs = self.side in ("a", "both"), self.side in ("g", "both")
        left: Root = IdentityRoot()
        right: Root = IdentityRoot()
        if isinstance(factor, LookupFactor):  # rows are the vocabulary, the inputs
            exponent = self.exponent if inputs else 0.0
            left = _lookup_root(factor, exponent, self.damping)
            return left, self._output_root(factor.g, shape[0]) if outputs else right
        rank = affordable_rank(self.rank, factor.g.size)
        if inputs and self.product and len(shape) > 2:
            right = _product_root(factor, shape, self.exponent, self.damping, rank)
        elif inputs:
            right = damped_root(factor.a, self.exponent, self.damping, rank)
        if outputs:
            left = self._output_root(factor.g, factor.a.size)
        return left, right

    def _output_root(self, moment: SecondMoment, others: int) -> Root:
        damping = self.output_damping or self.damping
        rank = affordable_rank(self.rank, others)
        return damped_root(moment, self.exponent, damping, rank)


def lookup_shares(factor: LookupFactor) -> Tensor:
    """The diagonal of A: how much of all tokens each is, ``[V]``, float64."""
    return factor.counts.double() / max(factor.tokens, 1e-300)


def diagonal_whitening(
    factors: Factors,
    parameters: Mapping[str, Tensor],
    exponent: float = 0.5,
    damping: Damping = _DAMPING,
) -> LayerwiseWhitener:
    """The diagonal of each Kronecker product: a cheap map to compare with."""
    how = KroneckerWhitening(exponent=exponent, damping=damping, diagonal=True)
    return how.build(factors, parameters)


def _product_diagonal(
    factor: DenseFactor | LookupFactor,
    shape: torch.Size,
    exponent: float,
    damping: Damping,
) -> LayerMap:
    """Scales ``(mean a_i^2 mean d_j^2 + damping)^-exponent`` of a weight's entries."""
    if isinstance(factor, LookupFactor):
        left = _lookup_root(factor, exponent, damping)
        columns = diagonal_root(_diag(factor.g)[0], exponent, damping)
        return KroneckerMap(factor.weight, None, shape, 1, left, columns)
    a, g = _diag(factor.a), _diag(factor.g)
    values = (g.unsqueeze(-1) * a.unsqueeze(-2)).double()  # [G, r, p (+ 1)]
    scales = diagonal_root(values, exponent, damping).values
    weight = scales if factor.bias is None else scales[..., :-1]
    found = {factor.weight: weight.reshape(shape)}
    if factor.bias is not None:
        found[factor.bias] = scales[..., -1].flatten()
    return DiagonalMap(found)


def _diag(moment: SecondMoment) -> Tensor:
    return moment.mean().diagonal(dim1=-2, dim2=-1)


def _diagonal(factor: DiagonalFactor, exponent: float, damping: Damping) -> DiagonalMap:
    scales = {
        n: diagonal_root(factor.mean(n), exponent, damping).values
        for n in factor.squares
    }
    return DiagonalMap(scales)


def _lookup_root(
    factor: LookupFactor, exponent: float, damping: Damping
) -> DiagonalRoot:
    return diagonal_root(lookup_shares(factor), exponent, damping)


def _product_root(
    factor: DenseFactor,
    shape: torch.Size,
    exponent: float,
    damping: Damping,
    rank: int | None,
) -> ProductRoot:
    """``A ~ A_channel (x) A_spatial``, each the partial trace of A."""
    channels, places = shape[1], math.prod(shape[2:])
    whole = factor.a.mean()
    patch = whole if factor.bias is None else whole[:, :-1, :-1]
    cut = patch.reshape(factor.a.groups, channels, places, channels, places)
    over_channels = torch.einsum("gcsds->gcd", cut)
    over_places = torch.einsum("gcsct->gst", cut)
    roots = [
        damped_root(SecondMoment(1.0, matrix=m), exponent, damping, rank)
        for m in (over_channels, over_places)
    ]
    bias = None
    if factor.bias is not None:  # the column of ones, beside the patch's mean square
        mean = patch.diagonal(dim1=-2, dim2=-1).double().mean(-1)
        bias = damping.of(torch.ones_like(mean), mean) ** -exponent
    return ProductRoot(roots[0], roots[1], places, bias)


def _matched_scale(
    factor: DenseFactor | LookupFactor, left: Root, right: Root
) -> float:
    """``sqrt(tr F / tr(P^2 F))`` with F the Kronecker product of the factors."""
    if isinstance(factor, LookupFactor):
        rows = factor.counts.double()
        g = factor.g.mean().double()
        before = rows.sum() * _trace(g)
        mapped = left.times(rows.sqrt()).square().sum()
        after = mapped * _trace(right.times(right.times(g)))
    else:
        a, g = factor.a.mean().double(), factor.g.mean().double()
        mapped_a, mapped_g = right.times(right.times(a)), left.times(left.times(g))
        # F is one product for each group, so traces multiply within a group
        before = (_traces(a) * _traces(g)).sum()
        after = (_traces(mapped_a) * _traces(mapped_g)).sum()
    return math.sqrt(float(before / after)) if float(after) > 0 else 1.0


def _trace(m: Tensor) -> Tensor:
    return _traces(m).sum()


def _traces(m: Tensor) -> Tensor:
    """``[G, n, n]`` to ``[G]``."""
    return m.diagonal(dim1=-2, dim2=-1).sum(-1)


def _whole(
    maps: list[LayerMap], parameters: Iterable[str], factors: Factors
) -> LayerwiseWhitener:
    """With the identity for parameters that have no factor."""
    known = {name for layer in maps for name in layer.names}
    rest = tuple(name for name in parameters if name not in known)
    if rest:
        maps = [*maps, IdentityMap(rest)]
    return LayerwiseWhitener(maps, parameters, factors.provenance)


def _left_out(factor: Factor, names: tuple[str, ...]) -> bool:
    own = names_of(factor)
    return any(n in names or n.rpartition(".")[0] in names for n in own)
