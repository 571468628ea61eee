r"""``Factors``: what probes say about each layer's curvature, as sums and counts.

For a layer whose gradient is ``g_i = sum_t d_t a_t^T`` the Fisher matrix is taken as a
Kronecker product ``A (x) G``:

=========  =============================================================
expand     ``A = mean over (i, t) of a a^T``, ``G = mean over i of sum over t of d d^T``
reduce     the same with ``a`` averaged and ``d`` summed over t first
=========  =============================================================

``a`` has the bias column; ``d`` belongs to the *per-example* loss, so factors change
neither with the size of a probe batch nor with the loss's reduction. An embedding's A
is diagonal in the vocabulary. Everything else (norm layers, biases alone, layers served
by vmap) has the diagonal second moment of its gradients. A tied parameter has none.

Factors are a monoid: batches, moving averages and clients are merged by ``+`` and
``scaled``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from curvedp.barrier import Provenance
from curvedp.curvature.moment import SecondMoment
from curvedp.errors import ConfigurationError
from curvedp.layers.dense import DenseIO
from curvedp.layers.io import DirectIO, LayerIO, UnreachedIO
from curvedp.layers.joined import JoinedIO
from curvedp.layers.lookup import LookupIO
from curvedp.layers.precision import compute_dtype

__all__ = [
    "SHARING",
    "DenseFactor",
    "DiagonalFactor",
    "Factor",
    "Factors",
    "LookupFactor",
    "SketchFactor",
    "Spectral",
    "factors_of",
    "spectral",
]

SHARING = ("expand", "reduce")


@dataclass(frozen=True)
class DenseFactor:
    """Of a weight ``[G, r, p]`` and its bias, which is the last column of A.

    Attributes:
        weight: name of the weight.
        bias: name of the bias, or None.
        a: of the inputs, ``[G, p (+ 1), p (+ 1)]``.
        g: of the output gradients, ``[G, r, r]``.
    """

    weight: str
    bias: str | None
    a: SecondMoment
    g: SecondMoment

    def __add__(self, other: DenseFactor) -> DenseFactor:
        return DenseFactor(self.weight, self.bias, self.a + other.a, self.g + other.g)

    def scaled(self, factor: float) -> DenseFactor:
        """All weights times a factor."""
        return DenseFactor(
            self.weight, self.bias, self.a.scaled(factor), self.g.scaled(factor)
        )


@dataclass(frozen=True)
class LookupFactor:
    """Of an embedding's table ``[V, r]``.

    Attributes:
        weight: name of the table.
        counts: ``[V]``, weighted number of times each token was met.
        tokens: weighted number of tokens; ``A = diag(counts / tokens)``.
        g: of the output gradients, ``[1, r, r]``.
    """

    weight: str
    counts: Tensor
    tokens: float
    g: SecondMoment

    def __add__(self, other: LookupFactor) -> LookupFactor:
        return LookupFactor(
            self.weight,
            self.counts + other.counts,
            self.tokens + other.tokens,
            self.g + other.g,
        )

    def scaled(self, factor: float) -> LookupFactor:
        """All weights times a factor."""
        return LookupFactor(
            self.weight,
            factor * self.counts,
            factor * self.tokens,
            self.g.scaled(factor),
        )


@dataclass(frozen=True)
class DiagonalFactor:
    """Squares of per-example gradients, added up.

    Attributes:
        squares: by parameter name.
        examples: weighted number of examples.
    """

    squares: Mapping[str, Tensor]
    examples: float

    def __add__(self, other: DiagonalFactor) -> DiagonalFactor:
        squares = {n: s + other.squares[n] for n, s in self.squares.items()}
        return DiagonalFactor(squares, self.examples + other.examples)

    def scaled(self, factor: float) -> DiagonalFactor:
        """All weights times a factor."""
        squares = {n: factor * s for n, s in self.squares.items()}
        return DiagonalFactor(squares, factor * self.examples)

    def mean(self, name: str) -> Tensor:
        """Mean square of a parameter's gradient, float64."""
        return self.squares[name].double() / max(self.examples, 1e-300)


@dataclass(frozen=True)
class SketchFactor:
    """``sum_i g_i g_i^T W`` with the whole gradient of a layer as one vector of p.

    Attributes:
        shapes: of its parameters, in the order in which they stand in the vector.
        sketch: ``[p, k]``, float64; W is the same at every estimate.
        examples: weighted number of examples.
    """

    shapes: Mapping[str, tuple[int, ...]]
    sketch: Tensor
    examples: float

    def __add__(self, other: SketchFactor) -> SketchFactor:
        examples = self.examples + other.examples
        return SketchFactor(self.shapes, self.sketch + other.sketch, examples)

    def scaled(self, factor: float) -> SketchFactor:
        """All weights times a factor."""
        return SketchFactor(self.shapes, factor * self.sketch, factor * self.examples)


#: Factors with eigenvalues, which a root can be taken of.
Spectral = DenseFactor | LookupFactor | DiagonalFactor
Factor = Spectral | SketchFactor


def spectral(factor: Factor) -> Spectral:
    """The factor, if it has eigenvalues; a sketch has none and is refused."""
    if isinstance(factor, SketchFactor):
        raise ConfigurationError(
            "a sketch of gradients spans a subspace and has no eigenvalues",
            "estimate with moments = 'kronecker'",
        )
    return factor


@dataclass(frozen=True)
class Factors:
    """The factors of all layers, with where they come from.

    Attributes:
        layers: by the name of the layer's first parameter. A parameter in none of them
            (a tied one) has no factor.
        provenance: the weakest of all that went into it.
    """

    layers: Mapping[str, Factor]
    provenance: Provenance

    def __add__(self, other: Factors) -> Factors:
        if self.layers.keys() != other.layers.keys():
            raise ConfigurationError(
                "factors of different models cannot be added",
                "add factors that were estimated on the same layers",
            )
        merged: dict[str, Factor] = {}
        for name, factor in self.layers.items():
            merged[name] = factor + other.layers[name]  # type: ignore[operator]
        return Factors(merged, self.provenance.combine(other.provenance))

    def scaled(self, factor: float) -> Factors:
        """All weights times a factor that is not negative; the means stay."""
        scaled = {name: layer.scaled(factor) for name, layer in self.layers.items()}
        return Factors(scaled, self.provenance)

    @cached_property
    def parameters(self) -> dict[str, str]:
        """Parameter name to the layer that knows it."""
        found = {}
        for layer, factor in self.layers.items():
            for name in names_of(factor):
                found[name] = layer
        return found


def names_of(factor: Factor) -> tuple[str, ...]:
    """Names of the parameters that a factor is about."""
    if isinstance(factor, DenseFactor):
        return (factor.weight,) if factor.bias is None else (factor.weight, factor.bias)
    if isinstance(factor, LookupFactor):
        return (factor.weight,)
    return tuple(factor.shapes if isinstance(factor, SketchFactor) else factor.squares)


def factors_of(io: LayerIO, sharing: str = "expand") -> dict[str, Factor]:
    """Factors of one batch of a layer, by first parameter name.

    Args:
        io: what the layer saw of a probe batch, inputs kept.
        sharing: "expand" or "reduce", for weights that several positions share.
    """
    if isinstance(io, UnreachedIO):
        return {}
    if isinstance(io, JoinedIO):
        return _joined_factors(io, sharing)
    if isinstance(io, DenseIO):
        return {io.weight: _dense_factor(io, sharing)}
    if isinstance(io, LookupIO):
        return {io.weight: _lookup_factor(io)}
    assert isinstance(io, DirectIO)
    squares = {n: g.double().square().sum(0) for n, g in io.per_example().items()}
    return {io.names[0]: DiagonalFactor(squares, float(io.batch_size))}


def _joined_factors(io: JoinedIO, sharing: str) -> dict[str, Factor]:
    names = [name for part in io.parts for name in part.names]
    if len(names) > len(set(names)):
        return {}  # one gradient of several layers: no factor fits it
    found: dict[str, Factor] = {}
    for part in io.parts:
        found |= factors_of(part, sharing)
    return found


def _dense_factor(io: DenseIO, sharing: str) -> DenseFactor:
    a, d = io.rows()  # [B, G, T, p], [B, G, T, r]
    examples, positions = float(a.shape[0]), a.shape[2]
    if sharing == "reduce":
        a, d = a.mean(2, keepdim=True), d.sum(2, keepdim=True)
        positions = 1
    inputs, outputs = (x.transpose(0, 1).flatten(1, 2) for x in (a, d))
    return DenseFactor(
        io.weight,
        io.bias,
        SecondMoment.of(inputs, examples * positions),
        SecondMoment.of(outputs, examples),
    )


def _lookup_factor(io: LookupIO) -> LookupFactor:
    ids, d = io.tokens()
    counts = torch.bincount(ids.flatten(), minlength=io.rows).to(compute_dtype(d))
    if io.padding is not None:
        counts[io.padding] = 0
    return LookupFactor(
        io.weight,
        counts,
        float(counts.sum()),
        SecondMoment.of(d.reshape(1, -1, d.shape[-1]), float(ids.shape[0])),
    )
