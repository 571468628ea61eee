"""A positive number for each coordinate: the map of AdaDPS, and of layers without rows.

Entries of a sum are rounded one by one, and each is stretched by its own scale. So what
rounding can do to a mapped gradient follows from mapped terms, entry by entry, and not
from the largest scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from curvedp.layers.dense import DenseIO
from curvedp.layers.io import CHUNK_ELEMENTS, DirectIO, LayerIO, together
from curvedp.layers.planned import kind_of
from curvedp.layers.precision import ROUNDING, norm_dtype
from curvedp.layers.rounding import counted, terms_of
from curvedp.layers.widened import widened
from curvedp.whitening.maps import Values, in_dtype_of, like, wide

__all__ = ["DiagonalMap"]


@dataclass(frozen=True)
class DiagonalMap:
    """A positive number for each coordinate.

    Attributes:
        scales: by parameter name, in the parameter's shape.
    """

    scales: Mapping[str, Tensor]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.scales)

    def sq_norms(self, io: LayerIO) -> Tensor:
        if isinstance(io, DenseIO) and io.shape.positions == 1:
            return self._of_products(io)
        one = like(io)
        limit = CHUNK_ELEMENTS.get(kind_of(one), CHUNK_ELEMENTS["cpu"])
        size = max(1, limit // max(1, sum(s.numel() for s in self.scales.values())))
        parts = [
            self._sq_norms(io.take(slice(start, start + size)), norm_dtype(one))
            for start in range(0, io.batch_size, size)
        ]
        return together(parts)

    def _of_products(self, io: DenseIO) -> Tensor:
        """``sum_jk (d_j s_jk a_k)^2`` of one position: no gradient is written down."""
        a, d = io.rows(dtype=norm_dtype(io.calls[0][1]))  # [B, G, 1, p], [B, G, 1, r]
        scales = self._matrix(io, d.shape[1])
        # directions and lengths apart: squares of small numbers would vanish
        (a, a_lengths), (d, d_lengths) = _directions(a), _directions(d)
        squares = (d.square() @ scales.square().to(d.device, d.dtype)) * a.square()
        # a sum of squares: rounding is relative, nothing can cancel
        rounding = 4 * (a.shape[3] + d.shape[3] + 8) * ROUNDING[d.dtype]
        lengths = (a_lengths * d_lengths).square()  # [B, G]
        found = (squares.double().sum((2, 3)) * lengths).sum(1) * (1 + rounding)
        whole = terms_of(a_lengths.double().square(), d_lengths.double().square())
        return torch.where(whole.isinf(), whole, found)

    def _sq_norms(self, io: LayerIO, dtype: torch.dtype) -> Tensor:
        # written down in the dtype of the sum, or what cancels here is left there
        exactly = widened(io, dtype)
        grads = {
            n: g * self.scales[n].to(dtype) for n, g in exactly.per_example().items()
        }
        mapped = DirectIO(io.name, grads).sq_norms()
        spread, rounding = exactly.spread()
        if isinstance(exactly, DirectIO):
            terms = mapped.sqrt()
        elif isinstance(exactly, DenseIO):
            terms = torch.where(spread.isinf(), spread, self._mapped_terms(exactly))
        else:
            terms = self._largest * spread
        return counted(mapped, terms, 2 * rounding, dtype)

    def _mapped_terms(self, io: DenseIO) -> Tensor:
        """``sum_jk s_jk^2 (sum_t d_tj^2) (sum_t a_tk^2)``, its root, ``[b]``.

        Entries are rounded one by one, and each is stretched by its own scale: this is
        at least the length of the matrix ``s_jk sum_t |d_tj| |a_tk|``.
        """
        a, d = io.rows()
        in_a, in_d = (torch.linalg.vector_norm(wide(x), dim=2) for x in (a, d))
        scales = self._matrix(io, d.shape[1]).to(in_d.device, in_d.dtype)
        squares = (in_d.square().unsqueeze(2) @ scales.square()).squeeze(2)
        # lengths before squares: squares of small numbers would vanish
        lengths: Tensor = torch.linalg.vector_norm(squares.sqrt() * in_a, dim=(1, 2))
        return lengths * (1 + 1e-6)

    def _matrix(self, io: DenseIO, groups: int) -> Tensor:
        """Scales as ``[G, r, p]``, the bias last."""
        scales = self.scales[io.weight]
        scales = scales.reshape(groups, scales.shape[0] // groups, -1)
        if io.bias is None:
            return scales
        bias = self.scales[io.bias].reshape(groups, -1, 1)
        return torch.cat([scales, bias], -1)

    @cached_property
    def _largest(self) -> Tensor:
        return torch.stack([s.max() for s in self.scales.values()]).max()

    def sum_dtype(self, io: LayerIO) -> torch.dtype | None:
        return norm_dtype(like(io))

    def apply(self, values: Values) -> dict[str, Tensor]:
        return {
            n: in_dtype_of(values[n], wide(values[n]) * s) for n, s in self._scales()
        }

    adjoint = apply

    def inverse(self, values: Values) -> dict[str, Tensor]:
        return {
            n: in_dtype_of(values[n], wide(values[n]) / s) for n, s in self._scales()
        }

    def row_sq_norms(self, like: Values, *, inverse: bool = False) -> dict[str, Tensor]:
        squares = {n: s.square() for n, s in self._scales()}
        return {
            n: in_dtype_of(like[n], 1 / s if inverse else s) for n, s in squares.items()
        }

    def _scales(self) -> list[tuple[str, Tensor]]:
        return list(self.scales.items())

    def tensors(self) -> dict[str, Any]:
        return dict(self.scales)


def _directions(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows ``[B, G, 1, n]`` of length 1, or 0, and their lengths ``[B, G]``."""
    lengths = torch.linalg.vector_norm(wide(x), dim=-1, keepdim=True)
    safe = torch.where(lengths == 0, torch.ones_like(lengths), lengths)
    return (wide(x) / safe).to(x.dtype), lengths[..., 0, 0]
