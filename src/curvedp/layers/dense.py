"""Layers whose gradient is a sum of outer products: ``g_i = sum_t d_t a_t^T``.

Shapes, after a layer's own geometry has been undone by its :class:`Geometry`:

===========  ==================  ====================================================
``a``        ``[B, G, T, p]``    layer inputs (a patch for convolutions), G groups
``d``        ``[B, G, T, r]``    gradients of the per-example loss at the layer's output
``g_i``      ``[G, r, p]``       weight gradient of example i
===========  ==================  ====================================================

The bias is a column of ones in ``a``. A module that is called several times gives more
positions ``t``: the calls are joined along T, and cross terms are exact.

Norms come in two ways, and :mod:`curvedp.layers.costs` says which is cheaper:

- *Gram*: ``||g_i||^2 = sum_{t,s} (d_t . d_s)(a_t . a_s)``, O(T^2 (p + r)) work;
- *instantiate*: build ``g_i`` for a chunk of examples and square it, O(T p r).

Where the ``d_t a_t^T`` nearly cancel, a float32 norm can come out far too small, and
the example would contribute many times the bound (``tests/clipping/test_rounding.py``
has one that reaches 500 C). So norms are computed in float64 wherever the device is not
much slower at that, and are raised by what rounding can still hide. With
``S = ||d|| ||a|| >= sum_t ||d_t|| ||a_t||`` (over all positions), u the round-off of
the norm and v that of the sum (:mod:`curvedp.layers.rounding` has the proof):

- Gram: ``gram + u (p + r + 2T) S^2``; instantiate: ``(||g|| + u T S)^2``. In float64
  that is nothing; in float32 (a GPU without fast float64) the third to fifth digit.
- both: ``(||g|| + v T S)^2`` for the sum, whose error may point along g. An ordinary
  example loses the fourth to sixth digit by that. And never less than a 128th of S:
  what hardly leaves anything rounds the sums of others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from curvedp.layers.costs import (
    DenseShape,
    NormMethod,
    chunk_rows,
    even_rows,
    lean_rows,
    writes_down,
    written_rows,
)
from curvedp.layers.gram import gram_sum
from curvedp.layers.io import (
    DirectIO,
    LayerIO,
    replace_examples,
    together,
    uses_together,
    written_sum,
)
from curvedp.layers.planned import kind_of
from curvedp.layers.precision import (
    ROUNDING,
    compute_dtype,
    norm_dtype,
    short_products,
)
from curvedp.layers.rounding import (
    TINY,
    counted,
    gamma,
    lost,
    product,
    raised,
    sq_length,
    terms_of,
    unit,
)

__all__ = ["DenseIO", "Geometry", "outer_sq_norms"]


class Geometry(ABC):
    """How a layer's inputs and outputs become rows, and its gradient a weight."""

    @abstractmethod
    def input_rows(self, x: Tensor) -> Tensor:
        """Layer input ``[B, ...]`` to rows ``[B, G, T, p]`` without the bias column."""

    @abstractmethod
    def output_rows(self, d: Tensor) -> Tensor:
        """Output gradient ``[B, ...]`` to rows ``[B, G, T, r]``."""

    @abstractmethod
    def weight_sum(self, x: Tensor, d: Tensor) -> Tensor:
        """``sum_i sum_t d_t a_t^T`` in the weight's shape; one is scaled already."""

    @abstractmethod
    def weight_shape(self) -> torch.Size:
        """Shape of the weight; ``[G, r, p]`` reshapes to it."""

    def needs_rows(self, x: Tensor) -> bool:
        """Whether :meth:`gradients` of such inputs writes rows down on its way."""
        return True

    def gradients(self, x: Tensor, d: Tensor, out: Tensor) -> None:
        """Write every ``g_i`` to ``out [B, G, r, p]``; all three are of one dtype."""
        torch.matmul(self.output_rows(d).mT, self.input_rows(x), out=out)


@dataclass(frozen=True, repr=False)
class DenseIO(LayerIO):
    """Inputs and output gradients of a linear layer or a convolution.

    Attributes:
        name: module name.
        weight: name of the weight parameter.
        bias: name of the bias parameter, or None if it has none to train.
        calls: ``(x, d)`` for every call of the module, in the layer's own shapes.
        geometry: turns them into rows.
        method: force a way to compute norms; by default the planner chooses.
        lean: whether memory goes before time: less scratch memory, and gradients are
            written down only where that frees some.
    """

    name: str
    weight: str
    bias: str | None
    calls: Sequence[tuple[Tensor, Tensor]]
    geometry: Geometry
    method: NormMethod | None = None
    lean: bool = False

    @property
    def batch_size(self) -> int:
        return self.calls[0][0].shape[0]

    @property
    def names(self) -> tuple[str, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def rows(
        self,
        part: slice = slice(None),
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """``a [b, G, T, p]`` and ``d [b, G, T, r]``.

        The bias column is in ``a`` unless ``bias`` is False: it costs a copy of all.
        """
        a, d = self._rows(part, dtype or compute_dtype(self.calls[0][1]))
        if bias and self.bias is not None:
            a = torch.cat([a, a.new_ones(*a.shape[:-1], 1)], -1)
        return a, d

    def _rows(self, part: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The same without the bias column, which is cheaper to account for apart."""
        inputs = [self.geometry.input_rows(x[part].to(dtype)) for x, _ in self.calls]
        outputs = [self.geometry.output_rows(d[part].to(dtype)) for _, d in self.calls]
        if len(self.calls) == 1:
            return inputs[0], outputs[0]
        return torch.cat(inputs, 2), torch.cat(outputs, 2)

    @property
    def shape(self) -> DenseShape:
        """Of one example, all calls together; from views, without a copy."""
        rows = [self.geometry.output_rows(d[:1]) for _, d in self.calls]
        _, groups, _, r = rows[0].shape
        p = self.geometry.weight_shape().numel() // (groups * r)
        return DenseShape(groups, sum(row.shape[2] for row in rows), p, r)

    def sq_norms(self) -> Tensor:
        return together([self._sq_norms(*item) for item in self.chunks()])

    def _sq_norms(self, part: slice, method: NormMethod) -> Tensor:
        summed_in = compute_dtype(self.calls[0][1])
        a, d = self._rows(part, self._norm_dtype())
        return outer_sq_norms(a, d, method, summed_in, bias=self.bias is not None)

    def _norm_dtype(self) -> torch.dtype:
        """Of rows that norms are taken of; bfloat16 ones may stay what they are."""
        tensors = [x for pair in self.calls for x in pair]
        if all(short_products(x) and x.dtype == torch.bfloat16 for x in tensors):
            return torch.bfloat16
        return norm_dtype(self.calls[0][1])

    def chunks(
        self, method: NormMethod | None = None
    ) -> Iterator[tuple[slice, NormMethod]]:
        """Slices of the batch whose scratch memory stays bounded, with the method."""
        shape = self.shape
        method = method or self.method or shape.method
        most = chunk_rows(shape, method, kind_of(self.calls[0][1]), lean=self.lean)
        size = even_rows(self.batch_size, most)
        for start in range(0, self.batch_size, size):
            yield slice(start, start + size), method

    def weighted_sum(
        self, weights: Tensor, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        def summed(dtype: torch.dtype) -> dict[str, Tensor]:
            return self._summed(weights.to(dtype), dtype)

        like = self.calls[0][1]
        if len(self.calls) > 1:
            return uses_together(self, weights, like, summed)
        dtype = dtype or compute_dtype(like)
        # positions of small gradients cancel most, and some have to stay as they are
        if dtype == torch.float32 and self.shape.positions > 1 and self.settles:
            return written_sum(self, weights, like)
        return summed(dtype)

    def _summed(self, weights: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        weight_sum: Tensor | None = None
        bias_sum: Tensor | None = None
        for x, d, c in self._pieces(weights):
            x, d = x.to(dtype), d.to(dtype)
            if x.numel() < d.numel():  # which is the shorter pass over memory
                scaled_x, scaled_d = _scaled(x, c), d
            else:
                scaled_x, scaled_d = x, _scaled(d, c)
            part = self.geometry.weight_sum(scaled_x, scaled_d)
            weight_sum = part if weight_sum is None else weight_sum + part
            if self.bias is not None:
                rows = self.geometry.output_rows(d)  # [B, G, T, r]
                # an example by itself first: its positions may cancel
                own = rows[:, :, 0] if rows.shape[2] == 1 else rows.sum(2)
                part = torch.tensordot(c, own, 1).flatten()
                bias_sum = part if bias_sum is None else bias_sum + part
        assert weight_sum is not None
        sums = {self.weight: weight_sum}
        if self.bias is not None:
            assert bias_sum is not None
            sums[self.bias] = bias_sum
        return sums

    def _pieces(self, weights: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Calls with their weights; in parts of the batch where memory is short."""
        rows = self.batch_size
        if self.lean:
            shape, device = self.shape, kind_of(self.calls[0][1])
            each = sum(x[:1].numel() + d[:1].numel() for x, d in self.calls)
            if device != "cpu":  # where patches are copied
                positions = shape.groups * shape.positions
                each = max(each, positions * (shape.inputs + shape.outputs))
            rows = lean_rows(each, device)
        for x, d in self.calls:
            for start in range(0, len(x), rows):
                part = slice(start, start + rows)
                yield x[part], d[part], weights[part]

    def keep(self, mask: Tensor) -> DenseIO:
        calls = [
            (replace_examples(x, mask), replace_examples(d, mask))
            for x, d in self.calls
        ]
        return replace(self, calls=calls)

    def take(self, part: slice) -> DenseIO:
        return replace(self, calls=[(x[part], d[part]) for x, d in self.calls])

    def spread(self) -> tuple[Tensor, float]:
        dtype = norm_dtype(self.calls[0][1])
        rows = [self._rows(part, dtype) for part, _ in self.chunks()]
        positions = rows[0][0].shape[2]
        rounding = (positions + 8) * ROUNDING[compute_dtype(self.calls[0][1])]
        bias = self.bias is not None
        return torch.cat([_sq_spread(a, d, bias).sqrt() for a, d in rows]), rounding

    def per_example(self) -> dict[str, Tensor]:
        shape, like = self.shape, self.calls[0][1]
        dtype, lead = compute_dtype(like), (self.batch_size, shape.groups)
        g = like.new_empty(*lead, shape.outputs, shape.inputs, dtype=dtype)
        bias = like.new_empty(*lead, shape.outputs, dtype=dtype)
        for part in self._written_parts(dtype):
            self._write(part, g[part])
            if self.bias is not None:
                rows = [self.geometry.output_rows(d[part]) for _, d in self.calls]
                torch.sum(rows[0], 2, dtype=dtype, out=bias[part])
                for more in rows[1:]:
                    bias[part] += more.sum(2, dtype=dtype)
        grads = {self.weight: g.reshape(-1, *self.geometry.weight_shape())}
        if self.bias is not None:
            grads[self.bias] = bias.flatten(1)
        return grads

    def _write(self, part: slice, out: Tensor) -> None:
        """Gradients of a part of the batch; in a function, so that its rows go."""
        if len(self.calls) == 1:
            x, d = (value[part].to(out.dtype) for value in self.calls[0])
            self.geometry.gradients(x, d, out)
            return
        a, d = self._rows(part, out.dtype)
        torch.matmul(d.mT, a, out=out)

    def _written_parts(self, dtype: torch.dtype) -> Iterator[slice]:
        x, d = self.calls[0]
        rows = len(self.calls) > 1 or self.geometry.needs_rows(x[:1].to(dtype))
        kept = None if rows else x[:1].numel() + d[:1].numel()
        most = written_rows(self.shape, kind_of(d), lean=self.lean, kept=kept)
        size = even_rows(self.batch_size, most)
        start, stop = 0, 0
        while start < self.batch_size:
            stop = start + size
            # one example alone may have another kernel, which rounds otherwise: all of
            # them are alone, or none
            if size > 1 and self.batch_size - stop == 1:
                stop += 1
            yield slice(start, stop)
            start = stop

    @property
    def settles(self) -> bool:
        """Whether gradients are written down; see :func:`writes_down`."""
        kept = sum(x[0].numel() + d[0].numel() for x, d in self.calls)
        return writes_down(self.shape, kept, lean=self.lean)

    def settled(self) -> LayerIO:
        return DirectIO(self.name, self.per_example()) if self.settles else self


def outer_sq_norms(
    a: Tensor,
    d: Tensor,
    method: NormMethod,
    summed_in: torch.dtype,
    *,
    bias: bool = False,
) -> Tensor:
    """``||sum_t d_t a_t^T||^2``, raised by what rounding can hide, ``[B]``.

    Args:
        a: ``[B, G, T, p]``.
        d: ``[B, G, T, r]``.
        method: Gram or instantiate; a single position needs neither.
        summed_in: dtype in which the clipped sum will be added up.
        bias: count a column of ones that ``a`` does not have.
    """
    t, p, r = a.shape[2], a.shape[3], d.shape[3]
    ones = 1.0 if bias else 0.0
    if t == 1:  # the norm of an outer product
        return _sq_spread(a, d, bias)
    u, in_sum = unit(a), (t + 8) * ROUNDING[summed_in]
    if method is NormMethod.GRAM:
        gram, sq_a, sq_d = gram_sum(a, d, lambda products, i, j: products + ones)
        sq_a = sq_a + ones * t
        spread = terms_of(sq_a, sq_d)
        tiny = t * TINY[gram.dtype] * (p * sq_d + r * sq_a + t).sum(1)
        hidden = gamma(p + r + 2 * t + a.shape[1] + 8, u) * spread + tiny
        squares = gram.clamp_min(0).double() + hidden
    else:
        spread = _sq_spread(a, d, bias)
        column = d.sum(2, keepdim=True, dtype=_wide(d))
        exact = (sq_length(product(d.mT, a)) + ones * sq_length(column)).sum(1)
        hidden = gamma(t + 8, u) * spread.sqrt()
        squares = raised(exact, hidden)
    # rows may have been written down in fewer digits
    return counted(squares, spread.sqrt(), lost(a, d) + in_sum, summed_in)


def _sq_spread(a: Tensor, d: Tensor, bias: bool) -> Tensor:
    """``S^2``, ``[B]``."""
    ones = float(a.shape[2]) if bias else 0.0
    return terms_of(sq_length(a) + ones, sq_length(d))


def _scaled(x: Tensor, weights: Tensor) -> Tensor:
    """``c_i x_i``."""
    return x * weights.reshape(-1, *([1] * (x.dim() - 1)))


def _wide(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype == torch.bfloat16 else x.dtype
