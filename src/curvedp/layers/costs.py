r"""The planner's cost model: from the shape of a layer to how its norms are computed.

Per example, with G groups, T positions, p inputs (a bias apart) and r outputs:

============  =============================  =========================================
what          products, counted twice        when
============  =============================  =========================================
pass          ``6 G T p r``                  forward, backward and the clipped sum,
                                             which takes the weight gradient's place
gram          ``2 G T^2 (p + r)``            less work (and memory) than ``g_i``
instantiate   ``2 G T p r``                  otherwise: ``g_i`` for a chunk of examples
product       none                           one position: ``||d|| ||a||``
written       ``2 G p r``                    ``g_i`` is not much larger than inputs and
                                             output gradients: it is kept in their
                                             place, and adding it up comes on top
============  =============================  =========================================

Everything that is decided by shapes is decided here (and, of the map,
in :mod:`curvedp.whitening.costs`), from public numbers alone: the code that runs asks
the same functions as ``private.explain()``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = [
    "DenseShape",
    "NormMethod",
    "Work",
    "choose_method",
    "chunk_rows",
    "even_rows",
    "lean_rows",
    "norm_work",
    "pass_work",
    "writes_down",
    "written_rows",
]

#: Elements of scratch memory that a chunk may take: on a CPU what its caches hold, and
#: what its allocator has at hand.
CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**27}

#: The same where memory goes before time. On a GPU half a gigabyte of float64: with
#: less, norms are slower, and nothing is freed at the peak, in the backward pass.
LEAN_CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}

#: How much larger than inputs and output gradients the gradients may be that a layer
#: writes down.
SETTLED_OVER_KEPT = 3


class NormMethod(Enum):
    """How the per-example norms of a layer are computed."""

    GRAM = "gram"
    INSTANTIATE = "instantiate"


@dataclass(frozen=True)
class DenseShape:
    """Of one example in a layer with ``g_i = sum_t d_t a_t^T``. Public.

    Attributes:
        groups: G.
        positions: T, of all calls together.
        inputs: p, without the column of ones that stands for a bias.
        outputs: r.
    """

    groups: int
    positions: int
    inputs: int
    outputs: int

    @property
    def method(self) -> NormMethod:
        """Gram or instantiate."""
        return choose_method(self.positions, self.inputs, self.outputs)

    @property
    def norms(self) -> str:
        """The way by name; one position needs neither Gram matrix nor gradient."""
        return "product" if self.positions == 1 else self.method.value

    @property
    def size(self) -> int:
        """Elements of ``g_i``."""
        return self.groups * self.inputs * self.outputs


@dataclass(frozen=True)
class Work:
    """Floating-point operations.

    Attributes:
        products: of matrix products, a multiplication and an addition each. Exact.
        elements: of squares, sums and scalings, one element at a time. About right.
    """

    products: float = 0.0
    elements: float = 0.0

    @property
    def flops(self) -> float:
        """Both together."""
        return self.products + self.elements

    def __add__(self, other: Work) -> Work:
        return Work(self.products + other.products, self.elements + other.elements)

    def __mul__(self, times: float) -> Work:
        return Work(self.products * times, self.elements * times)


def choose_method(positions: int, inputs: int, outputs: int) -> NormMethod:
    """Gram if it needs less work than the gradient.

    It then needs less memory as well: ``T < p r / (p + r)`` gives ``2 T^2 < p r``,
    because ``2 p r <= (p + r)^2``.

    Args:
        positions: T, number of shared positions.
        inputs: p, columns of ``a``.
        outputs: r, columns of ``d``.
    """
    t, p, r = positions, inputs, outputs
    return NormMethod.GRAM if t * (p + r) < p * r else NormMethod.INSTANTIATE


def writes_down(shape: DenseShape, kept: int, *, lean: bool = False) -> bool:
    """Whether gradients are kept in the place of inputs and output gradients.

    Where they take no more memory. Those of a convolution may take somewhat more: it
    is computed once then, not for norms and again for the sum.

    Args:
        shape: of the layer.
        kept: elements of an example's inputs and output gradients.
        lean: memory goes before time, and what is kept takes half of a gradient's
            bytes an element.
    """
    if lean:
        return 2 * shape.size <= kept
    if shape.size <= kept or shape.size > SETTLED_OVER_KEPT * kept:
        return shape.size <= kept
    return shape.norms == NormMethod.INSTANTIATE.value


def chunk_rows(
    shape: DenseShape, method: NormMethod, device: str, *, lean: bool = False
) -> int:
    """Examples whose norms are computed at once, within the scratch memory."""
    t, p, r = shape.positions, shape.inputs, shape.outputs
    square = t * t * 2 if method is NormMethod.GRAM else p * r
    each = shape.groups * (t * (p + r) + (square if t > 1 else 0))
    limits = LEAN_CHUNK_ELEMENTS if lean else CHUNK_ELEMENTS
    return max(1, limits.get(device, limits["cpu"]) // max(1, each))


def even_rows(rows: int, most: int) -> int:
    """Examples of a chunk, of so many rows in as few chunks as hold at most ``most``.

    A last chunk of a few rows would cost nearly as much as a whole one: chunks are of
    one size, and what is larger than one by less than a quarter is not cut.
    """
    parts = max(1, -(-rows // most))
    if parts == 2 and 4 * rows <= 5 * most:
        parts = 1
    return max(1, -(-rows // parts))


def written_rows(
    shape: DenseShape, device: str, *, lean: bool = False, kept: int | None = None
) -> int:
    """Examples whose gradients are written down at once.

    Args:
        shape: of the layer.
        device: type of the device.
        lean: whether memory goes before time.
        kept: elements of an example's inputs and output gradients, where gradients are
            computed from those as they are; None if from rows.
    """
    if kept is None:
        return chunk_rows(shape, NormMethod.INSTANTIATE, device, lean=lean)
    limits = LEAN_CHUNK_ELEMENTS if lean else CHUNK_ELEMENTS
    limit = limits.get(device, limits["cpu"])
    return max(1, limit // max(1, kept + shape.size))


def lean_rows(each: int, device: str) -> int:
    """Examples, of so many elements of scratch, at once where memory is short."""
    limits = LEAN_CHUNK_ELEMENTS
    return max(1, limits.get(device, limits["cpu"]) // max(1, each))


def pass_work(shape: DenseShape) -> Work:
    """Forward, backward and the sum of the gradients, of one example."""
    return Work(6.0 * shape.positions * shape.size)


def norm_work(shape: DenseShape, *, written: bool = False) -> Work:
    """What norms add to the pass, of one example and without a map."""
    g, t, p, r = shape.groups, shape.positions, shape.inputs, shape.outputs
    if written:  # g_i takes the place of the weight gradient, and is then added up
        return Work(2.0 * shape.size, 2.0 * shape.size)
    lengths = 2.0 * g * t * (p + r)
    if t == 1:
        return Work(0.0, lengths)
    if shape.method is NormMethod.GRAM:
        return Work(2.0 * g * t * t * (p + r), lengths + 2.0 * g * t * t)
    return Work(2.0 * t * shape.size, lengths + 2.0 * shape.size)
