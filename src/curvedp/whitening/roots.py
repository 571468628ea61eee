r"""Symmetric roots ``R = M^-p`` of second moments, as cheap operators.

A root acts on the last dimension, ``times(x) = x R``, with groups at dimension -3:
``x [..., G, m, n]``. Which form it has is a choice of the public map; once chosen it is
applied exactly.

==============  ==================================================  =================
form            map                                                 work for a row
==============  ==================================================  =================
IdentityRoot    ``x``                                               0
FullRoot        ``x R``                                             n^2
LowRankRoot     ``t x + x Q (L - t) Q^T``, Q has k columns          2 n k
DiagonalRoot    ``x * w``                                           n
ProductRoot     ``(R_channel (x) R_spatial)``, bias apart           n (c + s)
==============  ==================================================  =================
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from curvedp.layers.planned import kind_of
from curvedp.layers.precision import ROUNDING
from curvedp.layers.rounding import sq_length

__all__ = [
    "DiagonalRoot",
    "FullRoot",
    "IdentityRoot",
    "LowRankRoot",
    "ProductRoot",
    "Root",
    "rows_by",
]


class Root(Protocol):
    """A symmetric, positive definite matrix."""

    def times(self, x: Tensor) -> Tensor:
        """``x R``, in the dtype of x."""

    def inverse_times(self, x: Tensor) -> Tensor:
        """``x R^-1``."""

    def sq_norms(self, x: Tensor) -> Tensor:
        """``||x R||^2`` of every group, ``[..., G]``, not below the truth."""

    def square_diagonal(self, like: Tensor, *, inverse: bool = False) -> Tensor:
        """Diagonal of ``R^2`` (of ``R^-2``) for rows of ``like [G, m, n]``.

        ``[G, n]`` or ``[1, n]``, float64: variances of ``z R`` (of ``z R^-1``) for a
        row z of independent standard normals.
        """

    @property
    def largest(self) -> Tensor | float:
        """Largest eigenvalue: how much a rounding error can grow."""

    @property
    def condition(self) -> float:
        """Largest over smallest eigenvalue, not below the truth.

        At most twice the truth, and eight times that of a product.
        """

    def tensors(self) -> dict[str, Any]:
        """All that it consists of, for its id and for checkpoints."""


@dataclass(frozen=True)
class IdentityRoot:
    """``R = I``."""

    def times(self, x: Tensor) -> Tensor:
        return x

    def inverse_times(self, x: Tensor) -> Tensor:
        return x

    def sq_norms(self, x: Tensor) -> Tensor:
        return sq_length(x)

    def square_diagonal(self, like: Tensor, *, inverse: bool = False) -> Tensor:
        return torch.ones(1, like.shape[-1], dtype=torch.float64, device=like.device)

    @property
    def largest(self) -> float:
        return 1.0

    @property
    def condition(self) -> float:
        return 1.0

    def tensors(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class FullRoot:
    """From all eigenpairs: ``R = Q diag(values) Q^T``.

    Attributes:
        vectors: Q, ``[G, n, n]``, float64.
        values: ``[G, n]``, positive.
    """

    vectors: Tensor
    values: Tensor

    def times(self, x: Tensor) -> Tensor:
        return rows_by(x, self._matrix.to(x.dtype))

    def inverse_times(self, x: Tensor) -> Tensor:
        return rows_by(x, self._inverse.to(x.dtype))

    def sq_norms(self, x: Tensor) -> Tensor:
        return sq_length(self.times(x))

    def square_diagonal(self, like: Tensor, *, inverse: bool = False) -> Tensor:
        squares = self.values.square()
        return _spread_out(self.vectors, 1 / squares if inverse else squares)

    @cached_property
    def _matrix(self) -> Tensor:
        return (self.vectors * self.values.unsqueeze(-2)) @ self.vectors.mT

    @cached_property
    def _inverse(self) -> Tensor:
        return (self.vectors / self.values.unsqueeze(-2)) @ self.vectors.mT

    @cached_property
    def largest(self) -> Tensor:
        return self.values.max()

    @cached_property
    def condition(self) -> float:
        return _power_above(self.values.max() / self.values.min())

    def tensors(self) -> dict[str, Any]:
        return {"vectors": self.vectors, "values": self.values}


@dataclass(frozen=True)
class LowRankRoot:
    """k eigenpairs and one value for all other directions.

    Attributes:
        vectors: Q, ``[G, n, k]``, float64, orthonormal columns.
        values: ``[G, k]``, positive, of the columns of Q.
        tail: ``[G]``, positive, of everything orthogonal to Q.
    """

    vectors: Tensor
    values: Tensor
    tail: Tensor

    def times(self, x: Tensor) -> Tensor:
        return self._times(x, self.values, self.tail)

    def inverse_times(self, x: Tensor) -> Tensor:
        return self._times(x, 1 / self.values, 1 / self.tail)

    def sq_norms(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float64:
            return sq_length(self.times(x))
        # sum of v^2 (x q)^2, and t^2 for what is left of x. The latter is a difference
        # of squares, off by at most n + k round-offs of ||x||^2, which is added.
        inside = rows_by(x, self.vectors).square()
        inside = inside.sum(-2)  # [..., G, k]
        squares = (inside * self.squared_values).sum(-1)
        whole = sq_length(x)
        count = 8 * (self.vectors.shape[-2] + self.vectors.shape[-1] + x.shape[-2])
        left = (whole - inside.sum(-1)).clamp_min(0)
        left = left.add(whole, alpha=count * ROUNDING[torch.float64])
        return torch.addcmul(squares, self.squared_tail, left)

    def square_diagonal(self, like: Tensor, *, inverse: bool = False) -> Tensor:
        values, tail = self.values.square(), self.tail.square().unsqueeze(-1)
        if inverse:
            values, tail = 1 / values, 1 / tail
        outside = (1 - self.vectors.square().sum(-1)).clamp_min(0)
        return tail * outside + _spread_out(self.vectors, values)

    def _times(self, x: Tensor, values: Tensor, tail: Tensor) -> Tensor:
        q = self.vectors.to(x.dtype)
        flat = tail[:, None, None].to(x.dtype)
        extra = (values - tail[:, None]).unsqueeze(-2).to(x.dtype)
        return x * flat + rows_by(rows_by(x, q) * extra, q.mT)

    @cached_property
    def apart(self) -> tuple[Tensor, Tensor]:
        """``Q / t [G, n, k]`` and ``(L - t) Q^T [G, k, n]``: what is not flat."""
        above = (self.values - self.tail[:, None]).unsqueeze(-1)
        over_tail = self.vectors / self.tail[:, None, None]
        return over_tail, (above * self.vectors.mT).contiguous()

    @cached_property
    def squared_values(self) -> Tensor:
        """``[G, k]``."""
        return self.values.square()

    @cached_property
    def squared_tail(self) -> Tensor:
        """``t^2``, ``[G]``."""
        return self.tail.square()

    @cached_property
    def squared_largest(self) -> Tensor:
        """``||R||^2``."""
        return self.largest.square()

    @cached_property
    def squared(self) -> tuple[Tensor, Tensor]:
        """``U [G, n, k]`` and ``w [G, k]`` with ``R^2 = t^2 I + U diag(w) U^T``.

        Whether or not ``Q^T Q = I``: ``U = Q V`` with the eigenpairs ``V, w`` of what
        stands between Q and ``Q^T``.
        """
        extra = (self.values - self.tail[:, None]).unsqueeze(-1)
        inner = extra * (self.vectors.mT @ self.vectors) * extra.mT
        core = inner + torch.diag_embed(2 * self.tail[:, None] * extra.squeeze(-1))
        w, v = torch.linalg.eigh(core)
        return self.vectors @ v, w

    @cached_property
    def largest(self) -> Tensor:
        return torch.maximum(self.values.max(), self.tail.max())

    @cached_property
    def condition(self) -> float:
        low = torch.minimum(self.values.min(), self.tail.min())
        high = torch.maximum(self.values.max(), self.tail.max())
        return _power_above(high / low)

    def tensors(self) -> dict[str, Any]:
        return {"vectors": self.vectors, "values": self.values, "tail": self.tail}


@dataclass(frozen=True)
class DiagonalRoot:
    """``R = diag(values)``, values ``[n]``."""

    values: Tensor

    def times(self, x: Tensor) -> Tensor:
        return x * self.values.to(x.dtype)

    def inverse_times(self, x: Tensor) -> Tensor:
        return x / self.values.to(x.dtype)

    def sq_norms(self, x: Tensor) -> Tensor:
        return sq_length(self.times(x))

    def square_diagonal(self, like: Tensor, *, inverse: bool = False) -> Tensor:
        squares = self.values.double().square().unsqueeze(0)
        return 1 / squares if inverse else squares

    @cached_property
    def largest(self) -> Tensor:
        return self.values.max()

    @cached_property
    def condition(self) -> float:
        return _power_above(self.values.max() / self.values.min())

    def tensors(self) -> dict[str, Any]:
        return {"values": self.values}


@dataclass(frozen=True)
class ProductRoot:
    """Of a convolution's inputs: channels and places in the kernel whitened apart.

    A row is ``[c * s]`` (channel first) and, with a bias, one more.

    Attributes:
        channel: root over c.
        spatial: root over s.
        places: s, the number of places in the kernel.
        bias: value of the bias column, ``[G]``; None without one.
    """

    channel: Root
    spatial: Root
    places: int
    bias: Tensor | None

    def times(self, x: Tensor) -> Tensor:
        return self._map(x, self.channel.times, self.spatial.times, inverse=False)

    def inverse_times(self, x: Tensor) -> Tensor:
        channel, spatial = self.channel.inverse_times, self.spatial.inverse_times
        return self._map(x, channel, spatial, inverse=True)

    def sq_norms(self, x: Tensor) -> Tensor:
        return sq_length(self.times(x))

    def square_diagonal(self, like: Tensor, *, inverse: bool = False) -> Tensor:
        width = like.shape[-1] - (self.bias is not None)
        channels = like[..., : width // self.places]
        first = self.channel.square_diagonal(channels, inverse=inverse)
        second = self.spatial.square_diagonal(like[..., : self.places], inverse=inverse)
        patch = (first.unsqueeze(-1) * second.unsqueeze(-2)).flatten(1)
        if self.bias is None:
            return patch
        square = self.bias.double().square().unsqueeze(-1)
        last = 1 / square if inverse else square
        return torch.cat([patch.expand(len(last), -1), last], -1)

    def _map(self, x: Tensor, channel: Any, spatial: Any, *, inverse: bool) -> Tensor:
        patch = x if self.bias is None else x[..., :-1]
        *lead, rows, width = patch.shape
        channels = width // self.places
        # rows of one place after the other, and then of one channel after the other
        y = patch.reshape(*lead, rows, channels, self.places).mT
        y = channel(y.reshape(*lead, rows * self.places, channels))
        y = y.reshape(*lead, rows, self.places, channels).mT
        y = spatial(y.reshape(*lead, rows * channels, self.places))
        whole: Tensor = y.reshape(*lead, rows, width)
        if self.bias is None:
            return whole
        value = (1 / self.bias if inverse else self.bias).to(x.dtype)
        return torch.cat([whole, x[..., -1:] * value[:, None, None]], -1)

    @cached_property
    def largest(self) -> Tensor | float:
        product = self.channel.largest * self.spatial.largest
        if self.bias is None:
            return product
        own = self.bias.max()
        return torch.maximum(own, torch.as_tensor(product).to(own))

    @cached_property
    def condition(self) -> float:
        product = self.channel.condition * self.spatial.condition
        if self.bias is None:
            return product
        return product * _power_above(torch.maximum(self.bias, 1 / self.bias).max())

    def tensors(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "channel": self.channel.tensors(),
            "spatial": self.spatial.tensors(),
            "places": self.places,
        }
        return found if self.bias is None else found | {"bias": self.bias}


def _power_above(x: Tensor) -> float:
    """The next power of two: a bound that stays the same while a map changes little."""
    value = float(x)
    mantissa, exponent = math.frexp(value)
    if mantissa == 0.5 or not math.isfinite(value) or exponent > 1023:
        return value
    return math.ldexp(1.0, exponent)


def rows_by(x: Tensor, m: Tensor) -> Tensor:
    """``x m`` of rows ``x [..., G, t, n]`` and m ``[G, n, k]``.

    Of one group it is one product for all rows. Where m is thin, a CPU's float64
    product is two to three times as fast seen from the other side, ``(m^T x^T)^T``.
    """
    if m.shape[0] > 1:
        return x @ m
    m = m[0]
    n, k = m.shape
    rows = x.numel() // n
    if kind_of(x) != "cpu" or 4 * k > min(n, rows):
        return x @ m
    if x.mT.is_contiguous() and not x.is_contiguous():  # patches, not to be copied
        return (m.mT @ x.mT).mT
    return (m.mT @ x.reshape(rows, n).mT).mT.reshape(*x.shape[:-1], k)


def _spread_out(vectors: Tensor, values: Tensor) -> Tensor:
    """Diagonal of ``Q diag(values) Q^T``, ``[G, n]``."""
    return (vectors.square() @ values.unsqueeze(-1)).squeeze(-1)
