"""Examples of one person, taken together: one gradient, one norm, one clip.

A batch of ``P * K`` rows holds K slots for each of P persons. A person's gradient is
the sum over the slots, ``g_u = sum_k sum_t d_kt a_kt^T``: slots are more positions t of
the same person, so every form of :class:`LayerIO` can be regrouped exactly and nothing
new has to be computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from curvedp.layers.dense import DenseIO, Geometry
from curvedp.layers.io import DirectIO, LayerIO, UnreachedIO
from curvedp.layers.joined import JoinedIO
from curvedp.layers.lookup import LookupIO

__all__ = ["grouped"]


def grouped(io: LayerIO, slots: int) -> LayerIO:
    """The same layer with persons in place of rows, ``slots`` rows each.

    Rows without an example must have been replaced by zero before (``io.keep``).
    """
    if slots == 1:
        return io
    if isinstance(io, UnreachedIO):
        return replace(io, examples=io.examples // slots)
    if isinstance(io, DenseIO):
        calls = [(_persons(x, slots), _persons(d, slots)) for x, d in io.calls]
        return replace(io, calls=calls, geometry=_GroupedGeometry(io.geometry, slots))
    if isinstance(io, LookupIO):
        calls = [(_persons(i, slots), _persons(d, slots)) for i, d in io.calls]
        return replace(io, calls=calls)
    if isinstance(io, JoinedIO):
        return replace(io, parts=[grouped(part, slots) for part in io.parts])
    # small gradients, and whatever form has no shorter way: written down and added up
    summed = {n: _persons(g, slots).sum(1) for n, g in io.per_example().items()}
    return DirectIO(io.name, summed)


def _persons(x: Tensor, slots: int) -> Tensor:
    """``[P * K, ...] -> [P, K, ...]``."""
    return x.reshape(-1, slots, *x.shape[1:])


@dataclass(frozen=True)
class _GroupedGeometry(Geometry):
    """A layer's geometry on ``[P, K, ...]``: the slots join the positions."""

    inner: Geometry
    slots: int

    def input_rows(self, x: Tensor) -> Tensor:
        return self._join(self.inner.input_rows(x.flatten(0, 1)))

    def output_rows(self, d: Tensor) -> Tensor:
        return self._join(self.inner.output_rows(d.flatten(0, 1)))

    def _join(self, rows: Tensor) -> Tensor:
        """``[P * K, G, T, p] -> [P, G, K * T, p]``."""
        return _persons(rows, self.slots).transpose(1, 2).flatten(2, 3)

    def weight_sum(self, x: Tensor, d: Tensor) -> Tensor:
        return self.inner.weight_sum(x.flatten(0, 1), d.flatten(0, 1))

    def weight_shape(self) -> torch.Size:
        return self.inner.weight_shape()
