r"""A pass as a few numbers per example, by which two passes are compared.

Keeping what a pass left behind would take the memory of a second pass. So each row of
each tensor is kept as its length and a few products with fixed random vectors: the
products of a difference e have mean square ``||e||^2``.

How far may an example's clipped contribution be from that of another pass? With S_l
the length of the terms that its gradient in layer l is a sum of, and r_l the largest
relative change of the layer's ``a`` and ``d``, its gradient g moves by at most about

    delta = sqrt(sum_l (2 r_l S_l)^2),

and its contribution, whatever the clip rule makes of the norm, by ``2 delta C / ||g||``
(scale both to length C: they are ``delta C / ||g||`` apart, and clipping the shorter
one again moves it by no more than that).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvedp.layers.costs import CHUNK_ELEMENTS
from curvedp.layers.io import LayerIO
from curvedp.layers.planned import kind_of
from curvedp.layers.precision import exact
from curvedp.layers.widened import changed

__all__ = ["LayerSketch", "RowSketch", "Sketcher", "moved", "relative_change"]

#: Random vectors. That all are nearly orthogonal to a difference, and make it a tenth
#: of what it is, has a probability of 2e-4 for one row of one tensor.
DIRECTIONS = 4


@dataclass(frozen=True, repr=False)
class RowSketch:
    """The rows of a tensor.

    Attributes:
        lengths: ``[B]``, float64, on the CPU.
        products: ``[B, DIRECTIONS]``, likewise.
        counts: whether the entries are whole numbers, of which none may change.
    """

    lengths: Tensor
    products: Tensor
    counts: bool


class LayerSketch:
    """What is clipped of a layer.

    Args:
        tensors: its ``a`` and ``d``, or its gradients where those are written down.
        io: the layer, whose lengths are measured when they are asked for.
        device: that it is on.
    """

    def __init__(
        self, tensors: Sequence[RowSketch], io: LayerIO, device: torch.device
    ) -> None:
        self.tensors = tensors
        self._io: LayerIO | None = io
        self._device = device
        self._lengths = torch.zeros(()), torch.zeros(())

    def lengths(self) -> tuple[Tensor, Tensor]:
        """S and ``||g||^2``, each ``[B]``; the layer's tensors may go afterwards."""
        if self._io is not None:
            with exact(self._device):
                found = self._io.spread()[0], self._io.sq_norms()
            self._lengths = found[0].cpu().double(), found[1].cpu().double()
            self._io = None
        return self._lengths


class Sketcher:
    """Makes sketches with the same random vectors each time."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._rows = rows
        self._device = device
        self._directions: dict[int, Tensor] = {}

    def tensors(self, found: Sequence[Tensor]) -> list[RowSketch]:
        """Of those that have a row for each example."""
        return [self._rows_of(x) for x in found if x.dim() > 0 and len(x) == self._rows]

    def layer(self, io: LayerIO) -> LayerSketch:
        """Of a layer, whose tensors are held until its lengths are asked for."""
        tensors: list[Tensor] = []

        def collect(x: Tensor) -> Tensor:
            tensors.append(x)
            return x

        changed(io, collect)
        return LayerSketch(self.tensors(tensors), io, self._device)

    def _rows_of(self, x: Tensor) -> RowSketch:
        rows = x.detach().reshape(self._rows, -1)
        directions = self._directions_for(rows)
        size = max(1, CHUNK_ELEMENTS.get(kind_of(x), 2**20) // max(1, rows.shape[1]))
        lengths, products = [], []
        with exact(self._device):
            for part in torch.split(rows, size):
                wide = part.to(directions.dtype)
                lengths.append(torch.linalg.vector_norm(wide, dim=1))
                products.append(wide @ directions)
            return RowSketch(
                torch.cat(lengths).cpu().double(),
                torch.cat(products).cpu().double(),
                counts=not x.is_floating_point(),
            )

    def _directions_for(self, rows: Tensor) -> Tensor:
        width = rows.shape[1]
        if width not in self._directions:
            generator = torch.Generator().manual_seed(width)
            drawn = torch.randn(width, DIRECTIONS, generator=generator)
            wide = torch.float32 if rows.device.type == "mps" else torch.float64
            self._directions[width] = drawn.to(rows.device, wide)
        return self._directions[width]


def relative_change(
    x: RowSketch, y: RowSketch, rows: Tensor, *, to_mean: bool = False
) -> Tensor | None:
    """``||x_i - y_i||`` over the longer of both, of some rows; None if none differs.

    Infinite where one of them is finite and the other is not.

    Args:
        x: a tensor.
        y: the same of another pass.
        rows: which examples, ``[B]``.
        to_mean: compare with the mean length of x's rows, where that is longer.
    """
    ours, theirs = x.products[rows], y.products[rows]
    lengths = x.lengths[rows], y.lengths[rows]
    if torch.equal(ours, theirs) and torch.equal(*lengths):
        return None
    far = (ours - theirs).norm(dim=1) / DIRECTIONS**0.5
    far = torch.maximum(far, (lengths[0] - lengths[1]).abs())
    if x.counts:
        return (far > 0).double()
    finite = lengths[0].isfinite(), lengths[1].isfinite()
    scale = torch.maximum(*lengths).clamp_min(1e-300)
    if to_mean and bool(finite[0].any()):
        scale = scale.clamp_min(float(lengths[0][finite[0]].mean()))
    change = torch.where(finite[0] & finite[1], far / scale, torch.inf)
    return torch.where(finite[0] | finite[1], change, 0.0)


def moved(
    before: Mapping[str, LayerSketch], after: Mapping[str, LayerSketch], rows: Tensor
) -> dict[str, Tensor]:
    """By layer, how far contributions of these rows are apart at most, in C.

    A layer in which they are equal is left out.
    """
    found = {name: _change(x, after[name], rows) for name, x in before.items()}
    changes = {n: c for n, c in found.items() if c is not None and bool(c.any())}
    if not changes:
        return {}
    lengths = {name: (x.lengths(), after[name].lengths()) for name, x in before.items()}
    both = zip(*[(x[1], y[1]) for x, y in lengths.values()], strict=True)
    squares = [torch.stack(side).sum(0)[rows] for side in both]
    norms = torch.maximum(*squares).sqrt().clamp_min(1e-300)
    # what is finite in neither pass adds nothing to either sum
    void = ~squares[0].isfinite() & ~squares[1].isfinite()
    shares = {}
    for name, change in changes.items():
        terms = torch.maximum(lengths[name][0][0], lengths[name][1][0])[rows]
        nothing = void | (change == 0) | (terms == 0)
        share = torch.where(nothing, 0.0, 4 * change * terms / norms)
        if bool(share.any()):
            shares[name] = share.nan_to_num(nan=torch.inf, posinf=torch.inf)
    return shares


def _change(x: LayerSketch, y: LayerSketch, rows: Tensor) -> Tensor | None:
    """Largest relative change of the layer's tensors; 1 if it was called otherwise."""
    if len(x.tensors) != len(y.tensors):
        return torch.ones(int(rows.sum()), dtype=torch.float64)
    pairs = zip(x.tensors, y.tensors, strict=True)
    found = [relative_change(*pair, rows) for pair in pairs]
    apart = [change for change in found if change is not None]
    return torch.stack(apart).amax(0) if apart else None
