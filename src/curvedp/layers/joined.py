r"""Several captured parts under one name: a layer of many weights, or tied weights.

The parts of a recurrent layer have no parameter in common, and squared norms add up.
Tied weights (one parameter under several modules) do: with ``g = sum_k g_k`` over the
parts,

    ||g||^2 = sum_k ||g_k||^2 + 2 sum_{k<l} <g_k, g_l>,

where the inner product is taken over the parameters that k and l share. It is computed
in float64 and, where there is a shorter way, without writing a gradient down:

===================  ===================================================================
linear, linear       ``sum_{t,s} (d_t . d'_s)(a_t . a'_s)`` if that is cheaper
lookup, linear       ``sum_{t,s} d'_s[id_t] (d_t . a'_s)``
lookup, lookup       ``sum_{t,s} [id_t = id'_s] (d_t . d'_s)``
anything else        both gradients, a chunk of examples at a time
===================  ===================================================================

Where the parts cancel, rounding could hide what is left. With ``S_k`` the sum of the
lengths of the terms that ``g_k`` is a sum of and ``e_k`` the rounding of its sum (see
:mod:`curvedp.layers.dense`), each pair is raised by ``2 n u S_k S_l``, with n the
length of the sums and u the round-off of float64, and the norm of what parts have in
common by ``sum_k e_k``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from torch import Tensor

from curvedp.layers.costs import NormMethod, choose_method
from curvedp.layers.dense import DenseIO
from curvedp.layers.io import (
    CHUNK_ELEMENTS,
    DirectIO,
    LayerIO,
    UnreachedIO,
    added,
    uses_together,
)
from curvedp.layers.lookup import LookupIO
from curvedp.layers.planned import kind_of
from curvedp.layers.precision import ROUNDING, compute_dtype
from curvedp.layers.rounding import counted, raised

__all__ = ["JoinedIO", "joined"]


def joined(name: str, parts: Sequence[LayerIO]) -> LayerIO:
    """One LayerIO for all parts; those that this batch did not reach add nothing."""
    flat: list[LayerIO] = []
    for part in parts:
        flat += part.parts if isinstance(part, JoinedIO) else [part]
    reached = [part for part in flat if not isinstance(part, UnreachedIO)]
    if reached:
        return JoinedIO(name, reached)
    unreached = flat[0]
    assert isinstance(unreached, UnreachedIO)
    return replace(unreached, name=name)


@dataclass(frozen=True, repr=False)
class JoinedIO(LayerIO):
    """Parts whose gradients make up one layer; see the module's docstring.

    Attributes:
        name: module name, of the first part.
        parts: at least one; they may have parameters in common.
    """

    name: str
    parts: Sequence[LayerIO]

    @property
    def batch_size(self) -> int:
        return self.parts[0].batch_size

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(n for part in self.parts for n in part.names))

    @property
    def _shares(self) -> bool:
        """Whether parts have a parameter in common."""
        return len(self.names) < sum(len(part.names) for part in self.parts)

    def sq_norms(self) -> Tensor:
        if not self._shares:  # each has allowed for its own rounding
            return torch.stack([part.sq_norms() for part in self.parts]).sum(0)
        total = torch.stack([_wide_sq_norms(part) for part in self.parts]).sum(0)
        for left, right in combinations(self.parts, 2):
            for name in left.names:
                if name in right.names:
                    total = total + 2 * _cross(left, right, name)
        spreads = [part.spread() for part in self.parts]
        errors = torch.stack([spread * e for spread, e in spreads]).sum(0)
        terms = torch.stack([spread for spread, _ in spreads]).sum(0)
        summed_in = compute_dtype(_tensors(self.parts[0])[-1])
        return counted(raised(total.clamp_min(0), errors), terms, 0.0, summed_in)

    def weighted_sum(
        self, weights: Tensor, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        def summed(dtype: torch.dtype | None) -> dict[str, Tensor]:
            return added(part.weighted_sum(weights, dtype) for part in self.parts)

        if not self._shares:
            return summed(dtype)
        return uses_together(self, weights, _tensors(self.parts[0])[-1], summed)

    def keep(self, mask: Tensor) -> JoinedIO:
        return replace(self, parts=[part.keep(mask) for part in self.parts])

    def take(self, part: slice) -> JoinedIO:
        return replace(self, parts=[own.take(part) for own in self.parts])

    def spread(self) -> tuple[Tensor, float]:
        spreads = [part.spread() for part in self.parts]
        return torch.stack([s for s, _ in spreads]).sum(0), max(v for _, v in spreads)

    def per_example(self) -> dict[str, Tensor]:
        return added(part.per_example() for part in self.parts)

    def settled(self) -> LayerIO:
        parts = [part.settled() for part in self.parts]
        written = [part.grads for part in parts if isinstance(part, DirectIO)]
        others = [part for part in parts if not isinstance(part, DirectIO)]
        if not written:
            return self
        direct = DirectIO(self.name, added(written))
        return replace(self, parts=[direct, *others]) if others else direct


# -- inner products of two parts -------------------------------------------------------

#: ``(left, right) -> ([b] inner products, length n of the sums)``, a chunk of examples.
_Product = Callable[[LayerIO, LayerIO], tuple[Tensor, int]]


def _cross(left: LayerIO, right: LayerIO, name: str) -> Tensor:
    """Upper bound on ``<g_k, g_l>`` of the parameter, tight up to rounding, ``[B]``."""
    product, each = _way(left, right, name)
    values, length = [], 0
    for part in _chunks(left, each):
        value, length = product(left.take(part), right.take(part))
        values.append(value)
    (s, _), (t, _) = left.spread(), right.spread()
    return torch.cat(values) + (length + 8) * ROUNDING[torch.float64] * s * t


def _wide_sq_norms(io: LayerIO) -> Tensor:
    """Without what the sum of this part alone would round: parts may cancel."""
    one = io.take(slice(0, 1))
    each = sum(x.numel() for x in _tensors(one))
    return torch.cat(
        [_in_float64(io.take(part)).sq_norms() for part in _chunks(io, each)]
    )


def _tensors(io: LayerIO) -> list[Tensor]:
    if isinstance(io, DenseIO | LookupIO):
        return [x for call in io.calls for x in call]
    assert isinstance(io, DirectIO)
    return list(io.grads.values())


def _chunks(io: LayerIO, each: int) -> Iterator[slice]:
    device = kind_of(io.spread()[0])
    size = max(1, CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS["cpu"]) // max(1, each))
    for start in range(0, io.batch_size, size):
        yield slice(start, start + size)


def _way(left: LayerIO, right: LayerIO, name: str) -> tuple[_Product, int]:
    """The cheapest product and its scratch memory, in elements an example."""
    one, other = left.take(slice(0, 1)), right.take(slice(0, 1))
    numel = None
    if isinstance(one, DenseIO) and isinstance(other, DenseIO):
        (a, d), (b, e) = _weight_rows(one), _weight_rows(other)
        (groups, t, p), r = a.shape[1:], d.shape[3]
        same = a.shape[::3] == b.shape[::3] and d.shape[::3] == e.shape[::3]
        same = same and b.shape[1] == groups and one.weight == other.weight == name
        gram = choose_method(max(t, b.shape[2]), p, r) is NormMethod.GRAM
        numel = groups * p * r
        if same and gram:
            return _linear_linear, groups * 2 * t * b.shape[2]
    if isinstance(one, DenseIO) and isinstance(other, LookupIO):
        lookup_first, each = _way(right, left, name)
        return (lambda k, m: lookup_first(m, k)), each
    if isinstance(one, LookupIO) and isinstance(other, DenseIO):
        rows, ids = _weight_rows(other)[1], one.tokens()[0]
        if other.weight == name and rows.shape[1] == 1 and rows.shape[3] == one.rows:
            return _lookup_linear, 2 * rows.shape[2] * ids.shape[1]
    if isinstance(one, LookupIO) and isinstance(other, LookupIO):
        return _lookup_lookup, 2 * one.tokens()[0].shape[1] * other.tokens()[0].shape[1]
    numel = numel or one.per_example()[name].numel()

    def instantiated(k: LayerIO, m: LayerIO) -> tuple[Tensor, int]:
        x, y = _in_float64(k).per_example()[name], _in_float64(m).per_example()[name]
        return (x * y).flatten(1).sum(1), numel

    return instantiated, 2 * numel


def _weight_rows(io: DenseIO) -> tuple[Tensor, Tensor]:
    """``a [b, G, T, p]`` without the bias column, and ``d [b, G, T, r]``."""
    a, d = io.rows()
    return (a if io.bias is None else a[..., :-1]), d


def _linear_linear(left: LayerIO, right: LayerIO) -> tuple[Tensor, int]:
    assert isinstance(left, DenseIO) and isinstance(right, DenseIO)
    (a, d), (b, e) = _weight_rows(left), _weight_rows(right)
    inputs, outputs = a.double() @ b.double().mT, d.double() @ e.double().mT
    length = a.shape[2] + b.shape[2] + a.shape[3] + d.shape[3]
    return (inputs * outputs).sum((1, 2, 3)), length


def _lookup_linear(left: LayerIO, right: LayerIO) -> tuple[Tensor, int]:
    assert isinstance(left, LookupIO) and isinstance(right, DenseIO)
    ids, d = left.tokens()  # [b, T], [b, T, p]
    a, e = _weight_rows(right)  # [b, 1, S, p], [b, 1, S, V]
    a, e = a[:, 0], e[:, 0]
    index = ids.unsqueeze(1).expand(-1, e.shape[1], -1)
    picked = e.gather(2, index)  # [b, S, T]
    products = picked.double() * (a.double() @ d.double().mT)
    return products.sum((1, 2)), sum(d.shape[1:]) + e.shape[1]


def _lookup_lookup(left: LayerIO, right: LayerIO) -> tuple[Tensor, int]:
    assert isinstance(left, LookupIO) and isinstance(right, LookupIO)
    (ids, d), (others, e) = left.tokens(), right.tokens()
    equal = ids.unsqueeze(2) == others.unsqueeze(1)
    products = torch.where(equal, d.double() @ e.double().mT, 0.0)
    return products.sum((1, 2)), sum(d.shape[1:]) + e.shape[1]


def _in_float64(io: LayerIO) -> LayerIO:
    if isinstance(io, DenseIO | LookupIO):
        calls = [(_double(x), _double(d)) for x, d in io.calls]
        return replace(io, calls=calls)
    assert isinstance(io, DirectIO)
    return DirectIO(io.name, {n: g.double() for n, g in io.grads.items()})


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x
