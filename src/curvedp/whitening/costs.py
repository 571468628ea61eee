r"""The planner's cost model of a map: where it acts, and what that takes.

A map ``P g = L g R`` acts on T rows of inputs and output gradients, or on the rows of
``g_i`` once that is there; whichever is less work. For a root of n dimensions and m
rows, products counted twice:

===================  ==============================  ==================================
form                 mapped rows                     norms of mapped rows (float64)
===================  ==============================  ==================================
identity, diagonal   none                            none
full                 ``2 m n^2``                     ``2 m n^2``
low rank, k          ``4 m n k``                     ``2 m n k``
channel (x) places   those of its two roots          the same
===================  ==============================  ==================================

A low rank of the inputs alone (:mod:`curvedp.whitening.thin`, the default) never maps a
row: it projects the inputs where norms come from Gram matrices (``T p k``), and ``g_i``
where that is written down (``p r k``; projecting inputs and multiplying them takes
``T (p + r) k``, which is less only where Gram matrices are cheaper anyway).
"""

from __future__ import annotations

from curvedp.layers.costs import DenseShape, NormMethod, Work
from curvedp.whitening.roots import (
    DiagonalRoot,
    FullRoot,
    LowRankRoot,
    ProductRoot,
    Root,
)

__all__ = [
    "affordable_rank",
    "form",
    "inputs_first",
    "mapped_norm_work",
    "mapped_work",
    "outputs_first",
    "thin_work",
]


#: A rank that no layer is held below, whatever it costs: small heads are cheap anyway.
LEAST_RANK = 16


def affordable_rank(rank: int | None, others: int) -> int | None:
    """The rank of a root whose layer has ``others`` dimensions on the other side.

    A row is projected at ``2 n k`` products, and the layer's own pass takes ``6 n m``
    for it, m the dimensions of the other side. So with ``k <= 2 m`` whitening stays
    below two thirds of the pass, and with the map of the sum, ``4 n m k`` a batch,
    below all of it from ``4 m`` rows on. A classifier's head of 10 outputs keeps 20
    eigenpairs of its inputs, not 32. It is decided by the weight's shape alone: a map
    must not depend on how a batch is cut into parts.
    """
    return None if rank is None else min(rank, max(LEAST_RANK, 2 * others))


def form(root: Root) -> str:
    """What a root is, in words for a table."""
    if isinstance(root, FullRoot):
        return "full"
    if isinstance(root, LowRankRoot):
        return f"rank {root.vectors.shape[-1]}"
    if isinstance(root, DiagonalRoot):
        return "diagonal"
    if isinstance(root, ProductRoot):
        return f"{form(root.channel)} (x) {form(root.spatial)}"
    return "identity"


def mapped_work(root: Root, rows: float, size: int) -> Work:
    """Of ``root.times`` on rows of ``size`` dimensions, a bias column among them."""
    if isinstance(root, FullRoot):
        return Work(2.0 * rows * size * size)
    if isinstance(root, LowRankRoot):
        return Work(4.0 * rows * size * root.vectors.shape[-1], 4.0 * rows * size)
    if isinstance(root, DiagonalRoot):
        return Work(0.0, rows * size)
    if isinstance(root, ProductRoot):
        places = root.places
        channels = (size - (root.bias is not None)) // places
        first = mapped_work(root.channel, rows * places, channels)
        return first + mapped_work(root.spatial, rows * channels, places)
    return Work()


def mapped_norm_work(root: Root, rows: float, size: int, *, wide: bool = True) -> Work:
    """Of ``root.sq_norms``; ``wide``: in float64. Squares are not counted.

    Those there are without a map as well.
    """
    if wide and isinstance(root, LowRankRoot):
        rank = root.vectors.shape[-1]
        return Work(2.0 * rows * size * rank, 4.0 * rows * rank)
    return mapped_work(root, rows, size)


def inputs_first(shape: DenseShape, root: Root, *, wide: bool = True) -> bool:
    """Whether inputs are mapped before ``g_i`` is written down, or ``g_i`` after."""
    early = mapped_work(root, shape.positions, shape.inputs)
    late = mapped_norm_work(root, shape.outputs, shape.inputs, wide=wide)
    return early.flops < late.flops


def outputs_first(shape: DenseShape, root: Root) -> bool:
    """The same for output gradients."""
    early = mapped_work(root, shape.positions, shape.outputs)
    return early.flops < mapped_work(root, shape.inputs, shape.outputs).flops


def thin_work(shape: DenseShape, method: NormMethod, rank: int) -> Work:
    """What :func:`curvedp.whitening.thin.sq_norms` adds to norms without a map."""
    g, t, p, r = shape.groups, shape.positions, shape.inputs, shape.outputs
    k = float(rank)
    if t == 1:
        return Work(2.0 * g * p * k, 3.0 * g * k)
    if method is NormMethod.GRAM:
        return Work(2.0 * g * t * (p + t) * k, 3.0 * g * t * (t + k))
    return Work(2.0 * g * p * r * k, 3.0 * g * r * k)
