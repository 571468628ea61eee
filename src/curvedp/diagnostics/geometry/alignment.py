r"""How well factors from a probe agree with the oracle's (DP-KFC, figures 3, 8, 9)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from curvedp.barrier import Provenance
from curvedp.curvature import (
    DenseFactor,
    DiagonalFactor,
    Factors,
    LookupFactor,
    SecondMoment,
    Spectral,
    spectral,
)
from curvedp.errors import ConfigurationError

__all__ = ["Alignment", "alignment", "identity_factors"]


@dataclass(frozen=True)
class Alignment:
    """Of one factor of one layer with the oracle's.

    Attributes:
        layer: name of the layer's first parameter.
        factor: "A" (inputs), "G" (output gradients), "F" (their Kronecker product) or
            "diagonal" (layers that have only that).
        cosine: in [0, 1]; 1 for equal up to a scale.
        relative_error: 0 for equal; sees the scale.
        shape_error: the same after both were given one trace; relative damping does
            that too, so this is the error that a whitener of this package sees.
    """

    layer: str
    factor: str
    cosine: float
    relative_error: float
    shape_error: float

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class _Products:
    """Inner products and traces of an estimate ``C`` and the oracle's ``O``."""

    cc: float
    co: float
    oo: float
    trace: float
    oracle_trace: float

    def row(self, layer: str, factor: str) -> Alignment:
        scale = self.oracle_trace / self.trace if self.trace > 0 else math.nan
        norms = math.sqrt(self.cc) * math.sqrt(self.oo)
        return Alignment(
            layer,
            factor,
            self.co / norms if norms > 0 else math.nan,
            self._error(1.0),
            self._error(scale),
        )

    def _error(self, scale: float) -> float:
        if self.oo <= 0:
            return math.nan
        square = scale**2 * self.cc - 2 * scale * self.co + self.oo
        # rounding may leave a difference of equals slightly below zero
        return (
            math.sqrt(max(square, 0.0) / self.oo)
            if not math.isnan(square)
            else math.nan
        )


def alignment(factors: Factors, oracle: Factors) -> list[Alignment]:
    r"""Compare factors with the oracle's, layer by layer. Pure; float64.

    With ``O`` the oracle's mean factor, ``C`` the other one and
    ``<X, Y> = tr(X^T Y)``, ``||X||_F = sqrt(<X, X>)`` (DP-KFC, appendix G.1):

    ================  ==============================================
    cosine            ``<O, C> / (||O||_F ||C||_F)``
    relative_error    ``||O - C||_F / ||O||_F``
    shape_error       ``||O - C tr(O) / tr(C)||_F / ||O||_F``
    ================  ==============================================

    Shapes: A is ``[p + 1, p + 1]`` with the bias column, G is ``[r, r]``. F is their
    Kronecker product, whose inner product is ``<A, A'> <G, G'>`` without forming it; so
    the cosine of F is exactly the product of the other two. Groups of a convolution are
    blocks of one block-diagonal matrix: their products are summed. A diagonal factor is
    the diagonal matrix of its mean squares. Where a factor is zero, nan.

    The result is as private as the oracle: not at all.
    """
    if factors.layers.keys() != oracle.layers.keys():
        raise ConfigurationError(
            "the factors are of different layers",
            "estimate both on the same model",
        )
    return [
        row
        for name, factor in factors.layers.items()
        for row in _rows(name, spectral(factor), spectral(oracle.layers[name]))
    ]


def _rows(layer: str, factor: Spectral, oracle: Spectral) -> Iterator[Alignment]:
    if isinstance(factor, DiagonalFactor):
        assert isinstance(oracle, DiagonalFactor)
        mine, theirs = (
            torch.cat([f.mean(n).flatten() for n in factor.squares])
            for f in (factor, oracle)
        )
        yield _total(_diagonal(mine[None], theirs[None])).row(layer, "diagonal")
        return
    if isinstance(factor, LookupFactor):
        assert isinstance(oracle, LookupFactor)
        rows = [f.counts.double() / max(f.tokens, 1e-300) for f in (factor, oracle)]
        inputs = _diagonal(rows[0][None], rows[1][None])
    else:
        assert isinstance(oracle, DenseFactor)
        inputs = _dense(factor.a, oracle.a)
    outputs = _dense(factor.g, oracle.g)
    yield _total(inputs).row(layer, "A")
    yield _total(outputs).row(layer, "G")
    yield _total(inputs * outputs).row(layer, "F")


def _dense(mine: SecondMoment, oracle: SecondMoment) -> Tensor:
    """``[5, G]``: the fields of ``_Products`` for each group."""
    c, o = mine.mean().double(), oracle.mean().double()
    pairs = [(c * c), (c * o), (o * o)]
    inner = [x.sum((-2, -1)) for x in pairs]
    traces = [x.diagonal(dim1=-2, dim2=-1).sum(-1) for x in (c, o)]
    return torch.stack(inner + traces)


def _diagonal(mine: Tensor, oracle: Tensor) -> Tensor:
    parts = [mine * mine, mine * oracle, oracle * oracle, mine, oracle]
    return torch.stack([x.sum(-1) for x in parts])


def _total(products: Tensor) -> _Products:
    return _Products(*products.sum(-1).tolist())


def identity_factors(like: Factors) -> Factors:
    """The identity in the place of every factor: what plain DP-SGD assumes."""

    def one(factor: Spectral) -> Spectral:
        if isinstance(factor, DiagonalFactor):
            ones = {n: torch.ones_like(s) for n, s in factor.squares.items()}
            return DiagonalFactor(ones, 1.0)
        g = _eye(factor.g)
        if isinstance(factor, LookupFactor):
            counts = torch.ones_like(factor.counts)
            return LookupFactor(factor.weight, counts, 1.0, g)
        return DenseFactor(factor.weight, factor.bias, _eye(factor.a), g)

    # made of shapes alone, wherever the other factors came from
    layers = {n: one(spectral(f)) for n, f in like.layers.items()}
    return Factors(layers, Provenance.SYNTHETIC)


def _eye(moment: SecondMoment) -> SecondMoment:
    device = moment.trace().device
    eye = torch.eye(moment.size, dtype=torch.float64, device=device)
    return SecondMoment(1.0, matrix=eye.expand(moment.groups, -1, -1).clone())
