r"""Maps of one layer: how its gradient is reshaped before it is clipped.

A dense layer's gradient is a matrix ``g [G, r, p]``, its bias the last column. The
Kronecker map is ``P g = s L g R`` with roots ``L [r, r]`` of the output gradients and
``R [p, p]`` of the inputs. Norms are those of the mapped gradient itself:

- gradients written down: mapped, and measured;
- inputs and output gradients: mapped (``a R``, ``d L``) before they are multiplied
  where that is cheaper (a root of T rows instead of r or p), otherwise after.

All of it happens in float64 where the device is not much slower at that. Elsewhere the
norm is raised by what float32 can hide, ``e ||P|| S`` with e from lemma 4 of
:mod:`curvedp.layers.rounding`.

The clipped sum is added up before it is mapped, and a map may stretch its rounding more
than the gradient, which may lie where the map shrinks most. An example's rounding is at
most ``e = (T + 8) v S`` with v the round-off of the sum and
``S >= sum_t ||d_t|| ||a_t||``, and a norm is raised to ``||P g|| + ||P|| e``, and to
``||P|| S / REACH`` if that is more (:func:`curvedp.layers.rounding.counted`). A map
that could make much of it, by its condition, is added up in float64 where norms are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from curvedp.layers.costs import NormMethod
from curvedp.layers.dense import DenseIO, outer_sq_norms
from curvedp.layers.io import CHUNK_ELEMENTS, DirectIO, LayerIO, together
from curvedp.layers.joined import JoinedIO
from curvedp.layers.lookup import LookupIO
from curvedp.layers.planned import kind_of
from curvedp.layers.precision import (
    ROUNDING,
    compute_dtype,
    norm_dtype,
    square_dtype,
)
from curvedp.layers.rounding import (
    REACH,
    counted,
    gamma,
    lost,
    over_groups,
    product,
    terms_of,
    unit,
)
from curvedp.layers.widened import widened
from curvedp.whitening import thin
from curvedp.whitening.costs import inputs_first, outputs_first
from curvedp.whitening.roots import (
    DiagonalRoot,
    FullRoot,
    IdentityRoot,
    LowRankRoot,
    ProductRoot,
    Root,
)

__all__ = [
    "DenseMap",
    "IdentityMap",
    "KroneckerMap",
    "LayerMap",
    "in_dtype_of",
    "like",
    "wide",
]

Values = Mapping[str, Tensor]

#: Round-offs of a float32 sum times the map's condition, up to which it is added up so.
#: Real gradients lie far from where a map shrinks most: a hundredth of it is typical.
SUM_STRETCH = 2.0**-7


class LayerMap(Protocol):
    """An invertible linear map on the gradients of one layer."""

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters that it maps."""

    def sq_norms(self, io: LayerIO) -> Tensor:
        """``||P g_i||^2``, ``[B]``, float64."""

    def sum_dtype(self, io: LayerIO) -> torch.dtype | None:
        """As :meth:`curvedp.whitening.Whitener.sum_dtype`."""

    def apply(self, values: Values) -> dict[str, Tensor]:
        """``P u``."""

    def adjoint(self, values: Values) -> dict[str, Tensor]:
        """``P^T v``."""

    def inverse(self, values: Values) -> dict[str, Tensor]:
        """``P^-1 v``."""

    def row_sq_norms(self, like: Values, *, inverse: bool = False) -> dict[str, Tensor]:
        """Squared norms of the rows of ``P^T`` (of ``P^-1``), in the values' shapes."""

    def tensors(self) -> dict[str, Any]:
        """All that it consists of."""


@dataclass(frozen=True)
class IdentityMap:
    """Leaves parameters as they are: tied ones, and layers that a user leaves out."""

    names: tuple[str, ...]

    def sq_norms(self, io: LayerIO) -> Tensor:
        return io.sq_norms()

    def sum_dtype(self, io: LayerIO) -> torch.dtype | None:
        return None

    def apply(self, values: Values) -> dict[str, Tensor]:
        return {name: values[name] for name in self.names}

    adjoint = apply
    inverse = apply

    def row_sq_norms(self, like: Values, *, inverse: bool = False) -> dict[str, Tensor]:
        return {name: torch.ones_like(like[name]) for name in self.names}

    def tensors(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class DenseMap:
    """What maps of a matrix ``[G, r, p]`` have in common.

    Attributes:
        weight: name of the weight.
        bias: name of the bias, which is the last column; None without one.
        shape: of the weight; ``[G, r, p]`` reshapes to it.
        groups: G.
    """

    weight: str
    bias: str | None
    shape: torch.Size
    groups: int

    @property
    def names(self) -> tuple[str, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def matrix(self, values: Values) -> Tensor:
        """``[..., G, r, p (+ 1)]`` of values with any leading dimensions."""
        weight = values[self.weight]
        lead = weight.shape[: weight.dim() - len(self.shape)]
        rows = self.shape[0] // self.groups
        m = weight.reshape(*lead, self.groups, rows, -1)
        if self.bias is None:
            return m
        bias = values[self.bias].reshape(*lead, self.groups, rows, 1)
        return torch.cat([m, bias.to(m.dtype)], -1)

    def written(self, io: LayerIO) -> tuple[Tensor, Tensor, float]:
        """Gradients as matrices, in the dtype of norms; S, and their own rounding.

        Uses of a tied weight may cancel: what float32 leaves of them is not what their
        sum in float64 does.
        """
        exactly = widened(io, norm_dtype(like(io)))
        spread, rounding = exactly.spread()
        return self.matrix(exactly.per_example()), spread, rounding

    def values(self, m: Tensor, like: Values) -> dict[str, Tensor]:
        """The inverse of :meth:`matrix`, in the dtypes of ``like``."""
        weight = m if self.bias is None else m[..., :-1]
        # first to the dtype: that leaves nothing to copy
        weight = in_dtype_of(like[self.weight], weight)
        found = {self.weight: weight.reshape(self.shape)}
        if self.bias is not None:
            found[self.bias] = in_dtype_of(like[self.bias], m[..., -1]).flatten()
        return found


@dataclass(frozen=True)
class KroneckerMap(DenseMap):
    """``P g = scale * left g right``.

    Attributes:
        left: root over the outputs r.
        right: root over the inputs p, bias included.
        scale: of the whole map.
    """

    left: Root
    right: Root
    scale: float = 1.0

    def sq_norms(self, io: LayerIO) -> Tensor:
        # a hair for the roundings of float64
        return self._sq_norms(io) * (self.scale**2 * (1 + 2.0**-30))

    def sum_dtype(self, io: LayerIO) -> torch.dtype | None:
        wide = norm_dtype(like(io))
        if not thin.measures(self.right, self.left):
            return wide
        terms = 8 + (io.shape.positions if isinstance(io, DenseIO) else 0)
        condition = self.right.condition
        stretched = terms * ROUNDING[torch.float32] * condition
        fits = stretched <= SUM_STRETCH and condition <= REACH[torch.float32]
        return None if fits else wide

    @property
    def _largest(self) -> Tensor | float:
        """Of the map without its scale."""
        if isinstance(self.left, IdentityRoot):
            return self.right.largest
        return self.left.largest * self.right.largest

    def _summed_in(self, io: LayerIO) -> torch.dtype:
        return self.sum_dtype(io) or compute_dtype(like(io))

    def _sq_norms(self, io: LayerIO) -> Tensor:
        if isinstance(io, DenseIO):
            return together([self._of_rows(io, *item) for item in io.chunks()])
        if isinstance(io, LookupIO):
            return self._of_tokens(io)
        summed_in = self._summed_in(io)
        size = max(1, _chunk(io) // self.shape.numel())
        found = []
        for start in range(0, io.batch_size, size):
            m, spread, rounding = self.written(io.take(slice(start, start + size)))
            rounding += 8 * ROUNDING[summed_in] + self._map_rounding(m.dtype)
            terms = self._largest * spread
            found.append(counted(self._of_gradients(m), terms, rounding, summed_in))
        return together(found)

    def measures_thin(self, io: LayerIO) -> bool:
        """Whether norms of rows come from a thin projection, as differences."""
        wide = norm_dtype(like(io)) is torch.float64
        return wide and thin.measures(self.right, self.left)

    def _of_rows(self, io: DenseIO, part: slice, method: NormMethod) -> Tensor:
        dtype = norm_dtype(like(io))
        if self.measures_thin(io):
            assert isinstance(self.right, LowRankRoot)
            a, d = io.rows(part, dtype, bias=False)
            bias = io.bias is not None
            squares, spread = thin.sq_norms(a, d, self.right, bias, method)
        else:
            a, d = io.rows(part, dtype)
            spread = terms_of(_sq_norms(a), _sq_norms(d))
            squares = self._of_pairs(io, a, d, method)
        summed_in = self._summed_in(io)
        rounding = (a.shape[2] + 8) * ROUNDING[summed_in]
        if dtype is not torch.float64:
            rounding += self._map_rounding(dtype)
            if a.shape[2] > 1:
                rounding += gamma(a.shape[2] + 8, unit(a)) + lost(a, d)
        return counted(squares, self._largest * spread.sqrt(), rounding, summed_in)

    def _map_rounding(self, dtype: torch.dtype) -> float:
        """Of the mapped rows, relative to ``||L|| ||R||`` and their own length."""
        if dtype is torch.float64:
            return 0.0  # covered by a hair
        u = ROUNDING[dtype]
        return map_rounding(self.left, u) + map_rounding(self.right, u)

    def _of_pairs(
        self, io: DenseIO, a: Tensor, d: Tensor, method: NormMethod
    ) -> Tensor:
        shape = io.shape
        if shape.positions == 1:  # the norm of an outer product
            return over_groups(self.right.sq_norms(a) * self.left.sq_norms(d))
        if method is NormMethod.GRAM:
            a, d = self.right.times(a), self.left.times(d)
            return outer_sq_norms(a, d, method, a.dtype)
        wide = a.dtype is torch.float64
        early_a = inputs_first(shape, self.right, wide=wide)
        early_d = outputs_first(shape, self.left)
        a = self.right.times(a) if early_a else a
        d = self.left.times(d) if early_d else d
        g = product(d.mT, a)
        if early_a:
            return over_groups(_sq_norms(g) if early_d else self.left.sq_norms(g.mT))
        return self._of_gradients(g, left=not early_d)

    def _of_gradients(self, g: Tensor, *, left: bool = True) -> Tensor:
        """``||L g R||^2``, ``[B]``; without L where it has been applied."""
        if left and not isinstance(self.left, IdentityRoot):
            g = self.left.times(g.mT).mT
        return over_groups(self.right.sq_norms(g))

    def _of_tokens(self, io: LookupIO) -> Tensor:
        assert isinstance(self.left, DiagonalRoot)
        ids, d = io.tokens()
        d = d.to(norm_dtype(d))
        rows = self.left.values.to(d.device, d.dtype)[ids].unsqueeze(-1)
        mapped = self.right.times((d * rows).unsqueeze(1)).squeeze(1)
        squares = replace(io, calls=[(ids, mapped)], padding=None).sq_norms()
        rounding = (ids.shape[1] + 8) * ROUNDING[d.dtype] + self._map_rounding(d.dtype)
        return counted(squares, self._largest * io.spread()[0], rounding, d.dtype)

    def _map(self, m: Tensor) -> Tensor:
        return self.left.times(self.right.times(m).mT).mT

    def apply(self, values: Values) -> dict[str, Tensor]:
        m = self.matrix(values)
        if thin.applies(self.right, self.left):
            return self.values(thin.times(m, self.right, self.scale), values)
        return self.values(self.scale * self._map(wide(m)), values)

    adjoint = apply  # both roots are symmetric

    def inverse(self, values: Values) -> dict[str, Tensor]:
        m = self.right.inverse_times(wide(self.matrix(values)))
        m = self.left.inverse_times(m.mT).mT
        return self.values(m / self.scale, values)

    def row_sq_norms(self, like: Values, *, inverse: bool = False) -> dict[str, Tensor]:
        # P is L (x) R, so the diagonal of P^2 is that of L^2 times that of R^2
        m = self.matrix(like)
        rows = self.left.square_diagonal(m.mT, inverse=inverse).unsqueeze(-1)
        columns = self.right.square_diagonal(m, inverse=inverse).unsqueeze(-2)
        scale = self.scale**-2 if inverse else self.scale**2
        return self.values((scale * rows * columns).expand(m.shape), like)

    def tensors(self) -> dict[str, Any]:
        left, right = self.left.tensors(), self.right.tensors()
        return {"left": left, "right": right, "scale": self.scale}


def _sq_norms(g: Tensor) -> Tensor:
    return IdentityRoot().sq_norms(g)


def map_rounding(root: Root, u: float) -> float:
    """``||fl(x R) - x R|| / (||R|| ||x||)`` at most, by lemma 4 of layers.rounding."""
    if isinstance(root, IdentityRoot):
        return 0.0
    if isinstance(root, ProductRoot):
        own = map_rounding(root.channel, u) + map_rounding(root.spatial, u)
        return 1.01 * own + 8 * u
    if isinstance(root, LowRankRoot | FullRoot):
        n, k = root.vectors.shape[-2:]
        return 1.01 * gamma(n + k + 16, u) * math.sqrt(k)
    return 8 * u


def like(io: LayerIO) -> Tensor:
    """A tensor of the layer's device and dtype."""
    if isinstance(io, DenseIO | LookupIO):
        return io.calls[0][1]
    if isinstance(io, JoinedIO):
        return like(io.parts[0])
    assert isinstance(io, DirectIO)
    return next(iter(io.grads.values()))


def _chunk(io: LayerIO) -> int:
    device = "cpu"
    if isinstance(io, DirectIO):
        device = kind_of(next(iter(io.grads.values())))
    return CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS["cpu"])


def wide(x: Tensor) -> Tensor:
    """In the dtype that squares are added up in."""
    return x.to(square_dtype(x))


def in_dtype_of(like: Tensor, value: Tensor) -> Tensor:
    """The value, in another's dtype."""
    return value.to(like.dtype)
