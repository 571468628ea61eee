r"""A subspace and the rest, clipped apart: gradient embedding perturbation (GEP).

With orthonormal columns Q for every layer, a gradient is the sum of two orthogonal
parts, its embedding ``Q Q^T g`` and its residual ``g - Q Q^T g``. The map is

    P g = inside Q Q^T g + outside (g - Q Q^T g)

and each part is clipped by itself (:class:`~curvedp.whitening.base.Part`). With shares
``a`` of the embedding and ``b`` of the residual in the bound C, ``a^2 + b^2 = 1``,
``inside = a`` and ``outside = b C / C1``, one example contributes

    a clip_C(Q Q^T g) + (b C / C1) clip_C1(g - Q Q^T g),    of length at most C,

and noise ``N(0, (s C)^2 I)`` on it is, after ``P^-1``, noise of ``s C / a`` on every
coordinate of the embedding and ``s C1 / b`` on the residual: two Gaussian mechanisms
with the multipliers ``s0 = s / a`` and ``s1 = s / b`` from one draw, and ``s0^-2 +
s1^-2 = s^-2``. White noise is white in every orthonormal basis, so it need not be drawn
in that of Q.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from curvedp.barrier import Provenance
from curvedp.curvature import Factors, SketchFactor
from curvedp.curvature.sketch import orthonormal
from curvedp.errors import ConfigurationError
from curvedp.layers.io import CHUNK_ELEMENTS, LayerIO, together
from curvedp.layers.planned import kind_of
from curvedp.layers.precision import ROUNDING, square_dtype
from curvedp.layers.rounding import counted, gamma
from curvedp.layers.widened import widened
from curvedp.whitening.base import Part
from curvedp.whitening.layerwise import LayerwiseWhitener
from curvedp.whitening.maps import Values, like

__all__ = ["SubspaceMap", "SubspaceWhitener", "SubspaceWhitening"]


@dataclass(frozen=True)
class SubspaceMap:
    """``inside Q Q^T + outside (I - Q Q^T)`` on the whole gradient of a layer.

    A scale of 0 leaves a part out; the inverse is then that of the other part alone.

    Attributes:
        shapes: of the parameters, in the order of the rows of Q.
        basis: Q ``[p, k]``, orthonormal columns, float64; k may be 0.
        inside: scale of the embedding.
        outside: scale of the residual.
    """

    shapes: Mapping[str, tuple[int, ...]]
    basis: Tensor
    inside: float
    outside: float

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.shapes)

    def sq_norms(self, io: LayerIO) -> Tensor:
        one = like(io)
        limit = CHUNK_ELEMENTS.get(kind_of(one), CHUNK_ELEMENTS["cpu"])
        size = max(1, limit // max(1, self.basis.shape[0]))
        parts = [
            self._sq_norms(io.take(slice(start, start + size)), square_dtype(one))
            for start in range(0, io.batch_size, size)
        ]
        return together(parts)

    def sum_dtype(self, io: LayerIO) -> torch.dtype | None:
        # a basis as long as the layer has parameters: float32 would hide too much
        return square_dtype(like(io))

    def _sq_norms(self, io: LayerIO, dtype: torch.dtype) -> Tensor:
        wide = widened(io, dtype)
        rows = self._rows(wide.per_example(), io.batch_size)  # [b, p]
        basis = self.basis.to(rows.device, dtype)
        embedded = rows @ basis  # [b, k]
        squares = self.inside**2 * _sq(embedded)
        if self.outside:  # a vector of its own, never a difference of two squares
            squares = squares + self.outside**2 * _sq(rows - embedded @ basis.mT)
        spread, rounding = wide.spread()
        # lemma 4 of layers.rounding: Q is wide, and |Q| may be sqrt(k) long
        count = 4 * sum(basis.shape) * math.sqrt(max(1, basis.shape[1]))
        error = 2 * rounding + gamma(math.ceil(count), ROUNDING[dtype])
        return counted(squares, max(self.inside, self.outside) * spread, error, dtype)

    def _rows(self, gradients: Values, size: int) -> Tensor:
        """``[b, p]``; a parameter that this batch did not reach has zeros."""
        one = next(iter(gradients.values()))
        pieces = [
            gradients[n].reshape(size, -1)
            if n in gradients
            else one.new_zeros(size, math.prod(shape))
            for n, shape in self.shapes.items()
        ]
        return torch.cat(pieces, 1)

    def apply(self, values: Values) -> dict[str, Tensor]:
        return self._mapped(values, self.inside, self.outside)

    adjoint = apply

    def inverse(self, values: Values) -> dict[str, Tensor]:
        return self._mapped(values, _reciprocal(self.inside), _reciprocal(self.outside))

    def _mapped(
        self, values: Values, inside: float, outside: float
    ) -> dict[str, Tensor]:
        flat = torch.cat([values[n].flatten() for n in self.shapes])
        flat = flat.to(square_dtype(flat))
        basis = self.basis.to(flat.device, flat.dtype)
        embedding = basis @ (basis.mT @ flat)
        return self._split(inside * embedding + outside * (flat - embedding), values)

    def _split(self, flat: Tensor, like: Values) -> dict[str, Tensor]:
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        pieces = torch.split(flat, sizes)
        return {
            n: piece.reshape(shape).to(like[n].dtype)
            for (n, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }

    def row_sq_norms(self, like: Values, *, inverse: bool = False) -> dict[str, Tensor]:
        inside, outside = self.inside, self.outside
        if inverse:
            inside, outside = _reciprocal(inside), _reciprocal(outside)
        in_it = self.basis.square().sum(1).clamp_max(1)  # the diagonal of Q Q^T
        rows = inside**2 * in_it + outside**2 * (1 - in_it)
        return self._split(rows.to(next(iter(like.values())).device), like)

    def tensors(self) -> dict[str, Any]:
        return {"basis": self.basis, "inside": self.inside, "outside": self.outside}


class SubspaceWhitener(LayerwiseWhitener):
    """All layers' maps, and their embeddings and residuals as parts of the whole.

    Args:
        maps: one for every layer; together they have every trainable parameter once.
        shares: of the bound: the embeddings', and the residuals' unless left out.
        parameters: names of all trainable parameters.
        provenance: of the gradients that the bases were made from.
    """

    def __init__(
        self,
        maps: list[SubspaceMap],
        shares: tuple[float, ...],
        parameters: Mapping[str, Tensor],
        provenance: Provenance,
    ) -> None:
        super().__init__(maps, parameters, provenance)
        alone = [
            [replace(own, outside=0.0) for own in maps],
            [replace(own, inside=0.0) for own in maps],
        ]
        self._parts = tuple(
            Part(LayerwiseWhitener(own, parameters, provenance), share)
            for own, share in zip(alone, shares, strict=False)
        )

    @property
    def parts(self) -> tuple[Part, ...]:
        return self._parts


@dataclass(frozen=True)
class SubspaceWhitening:
    """From sketches to a map and its parts.

    Attributes:
        residual_clip: C1 as a multiple of the embedding's C.
        residual_share: ``b^2``, the residual's share of the squared bound; 0 leaves the
            residual out (the biased form).
    """

    residual_clip: float = 1.0
    residual_share: float = 0.5

    def __post_init__(self) -> None:
        if not (self.residual_clip > 0 and math.isfinite(self.residual_clip)):
            raise ConfigurationError(
                f"residual_clip is {self.residual_clip!r}",
                "give the residual's clip norm as a multiple of the embedding's",
            )
        if not 0 <= self.residual_share < 1:
            raise ConfigurationError(
                f"residual_share is {self.residual_share!r}",
                "give a number from 0 (no residual) to below 1 (no embedding); with "
                "0.5 both have the same noise multiplier",
            )

    @property
    def shares(self) -> tuple[float, ...]:
        """Of the bound: their squares add up to 1."""
        embedding = math.sqrt(1 - self.residual_share)
        if not self.residual_share:
            return (embedding,)
        return embedding, math.sqrt(self.residual_share)

    def build(
        self, factors: Factors, parameters: Mapping[str, Tensor], step: int = 0
    ) -> SubspaceWhitener:
        """The whitener of the sketches; what has none is residual as a whole."""
        inside = self.shares[0]
        outside = math.sqrt(self.residual_share) / self.residual_clip
        maps = []
        for factor in factors.layers.values():
            if not isinstance(factor, SketchFactor):
                raise ConfigurationError(
                    "a subspace is found from sketches of gradients, not from factors",
                    "estimate with moments = 'subspace'",
                )
            basis = orthonormal(factor.sketch)
            maps.append(SubspaceMap(factor.shapes, basis, inside, outside))
        known = {name for own in maps for name in own.names}
        for name, p in parameters.items():
            if name not in known:
                none = p.new_zeros(p.numel(), 0, dtype=torch.float64)
                maps.append(SubspaceMap({name: tuple(p.shape)}, none, inside, outside))
        return SubspaceWhitener(maps, self.shares, parameters, factors.provenance)


def _reciprocal(scale: float) -> float:
    return 1 / scale if scale else 0.0


def _sq(rows: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms.double().square()
