"""What runs for a layer, and what it takes: the choices of the cost model, written out.

It asks the functions that the running code asks
(:mod:`curvedp.layers.costs`, :mod:`curvedp.whitening.costs`), about the captured values
of a synthetic batch. Tests count the products that then run against what it says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce

import torch

from curvedp.layers.costs import DenseShape, NormMethod, Work, norm_work, pass_work
from curvedp.layers.dense import DenseIO
from curvedp.layers.io import DirectIO, LayerIO, UnreachedIO
from curvedp.layers.joined import JoinedIO
from curvedp.layers.lookup import LookupIO
from curvedp.layers.precision import norm_dtype
from curvedp.whitening.base import Whitener, parts_of
from curvedp.whitening.costs import (
    form,
    inputs_first,
    mapped_norm_work,
    mapped_work,
    outputs_first,
    thin_work,
)
from curvedp.whitening.diagonal import DiagonalMap
from curvedp.whitening.joint import JointMap
from curvedp.whitening.layerwise import LayerwiseWhitener
from curvedp.whitening.maps import (
    DenseMap,
    IdentityMap,
    KroneckerMap,
    LayerMap,
    like,
)
from curvedp.whitening.roots import IdentityRoot, LowRankRoot, Root
from curvedp.whitening.subspace import SubspaceMap

__all__ = ["Choice", "choices"]

_NONE = "-"
_NO_WORK = Work()


@dataclass(frozen=True)
class Choice:
    """How a layer, or a part of one, is served in every step. Public.

    Attributes:
        name: of the layer.
        parameters: their full names.
        shape: of a dense layer; None for others.
        norms: "gram", "instantiate", "product" (one position), "written" (gradients
            kept), "rows" (an embedding's).
        inputs: form of the root of the inputs and where it acts: "before" the gradient
            is there, or "after". "-" is no root.
        outputs: likewise, of the output gradients.
        forward_backward: work of an example in the plain pass; products of dense layers
            alone.
        norm: what norms add to it.
        whitening: what the map adds to the norms.
        mapping: of the sum, once for every physical batch.
        once: of the plain pass, likewise: an embedding's gradient has all its rows.
    """

    name: str
    parameters: tuple[str, ...]
    shape: DenseShape | None
    norms: str
    inputs: str = _NONE
    outputs: str = _NONE
    forward_backward: Work = _NO_WORK
    norm: Work = _NO_WORK
    whitening: Work = _NO_WORK
    mapping: Work = _NO_WORK
    once: Work = _NO_WORK


def choices(
    whitener: Whitener, io: LayerIO, shapes: dict[str, DenseShape]
) -> list[Choice]:
    """A choice for each part of a layer.

    Args:
        whitener: the map of the step.
        io: as the step's pass leaves it.
        shapes: by weight, of dense layers whose gradients are written down.
    """
    pieces = [  # mostly one; each has norms and a sum of its own
        [
            _choice(layer, values, shapes)
            for layer, values in _served(piece.whitener, io)
        ]
        for piece in parts_of(whitener)
    ]
    return [reduce(_again, same) for same in zip(*pieces, strict=True)]


def _served(whitener: Whitener, io: LayerIO) -> Iterator[tuple[LayerMap, LayerIO]]:
    """What is mapped by itself, with its map."""
    if isinstance(io, UnreachedIO):
        return
    if not isinstance(whitener, LayerwiseWhitener):
        maps: list[LayerMap] = [IdentityMap(io.names)]
    else:
        maps = whitener.maps_of(io)
    if isinstance(io, JoinedIO):
        if len(maps) == 1 and not isinstance(maps[0], IdentityMap):
            yield maps[0], DirectIO(io.name, io.per_example())
            return
        for part in io.parts:
            yield from _served(whitener, part)
    elif isinstance(io, DirectIO) and len(maps) > 1:
        for layer in maps:
            grads = {n: g for n, g in io.grads.items() if n in layer.names}
            yield layer, DirectIO(io.name, grads)
    else:
        yield maps[0], io


def _again(one: Choice, other: Choice) -> Choice:
    """Two maps of the same values: each maps and measures them."""
    return replace(
        one,
        whitening=one.whitening + other.whitening + other.norm,
        mapping=one.mapping + other.mapping,
    )


def _choice(layer: LayerMap, io: LayerIO, shapes: dict[str, DenseShape]) -> Choice:
    if isinstance(io, DenseIO):
        return _dense(layer, io)
    if isinstance(io, LookupIO):
        return _lookup(layer, io)
    assert isinstance(io, DirectIO)
    return _written(layer, io, shapes)


# -- inputs and output gradients are kept ----------------------------------------------


def _dense(layer: LayerMap, io: DenseIO) -> Choice:
    shape, method = io.shape, io.method or io.shape.method
    plain = Choice(
        io.name,
        io.names,
        shape,
        shape.norms,
        forward_backward=pass_work(shape),
        norm=norm_work(shape),
    )
    if isinstance(layer, IdentityMap):
        return plain
    if isinstance(layer, KroneckerMap):
        plain = replace(plain, mapping=_mapping(layer))
        if layer.measures_thin(io):
            return _thin(layer, plain, shape, method)
        return _kronecker(layer, plain, io, shape, method)
    if isinstance(layer, JointMap):
        return _joint(layer, plain, shape)
    if isinstance(layer, DiagonalMap) and shape.positions == 1:
        size = sum(s.numel() for s in layer.scales.values())
        work = Work(2.0 * size, 3.0 * size / shape.outputs)
        return replace(plain, inputs="diagonal", whitening=work, mapping=_scaled(layer))
    # mapped as a whole: written down for a chunk of examples, whatever the planner says
    size = shape.size + (io.bias is not None) * shape.outputs * shape.groups
    own = _of_whole(layer, size)
    if isinstance(layer, DiagonalMap):  # the lengths of terms, entry by entry
        own = own + Work(2.0 * size)
    instantiated = Work(2.0 * shape.positions * shape.size, 2.0 * shape.size)
    return replace(
        plain,
        norms=NormMethod.INSTANTIATE.value,
        inputs=f"{_whole_form(layer)}, after",
        norm=instantiated,
        whitening=own,
        mapping=_of_whole(layer, shape.size),
    )


def _thin(
    layer: KroneckerMap, plain: Choice, shape: DenseShape, method: NormMethod
) -> Choice:
    assert isinstance(layer.right, LowRankRoot)
    before = shape.positions == 1 or method is NormMethod.GRAM
    where = "before" if before else "after"
    work = thin_work(shape, method, layer.right.vectors.shape[-1])
    return replace(plain, inputs=f"{form(layer.right)}, {where}", whitening=work)


def _kronecker(
    layer: KroneckerMap,
    plain: Choice,
    io: DenseIO,
    shape: DenseShape,
    method: NormMethod,
) -> Choice:
    wide = norm_dtype(like(io)) is torch.float64
    g, t, r = shape.groups, shape.positions, shape.outputs
    p = shape.inputs + (io.bias is not None)  # mapped with the column of ones
    if t == 1:
        work = mapped_norm_work(layer.right, 1, p, wide=wide)
        work = work + mapped_norm_work(layer.left, 1, r, wide=wide)
        early_a = early_d = True
    elif method is NormMethod.GRAM:
        work = mapped_work(layer.right, t, p) + mapped_work(layer.left, t, r)
        work = work + Work(2.0 * t * t * (p - shape.inputs))
        early_a = early_d = True
    else:
        early_a = inputs_first(shape, layer.right, wide=wide)
        early_d = outputs_first(shape, layer.left)
        work = Work(2.0 * t * r * (p - shape.inputs))
        work = work + (
            mapped_work(layer.right, t, p)
            if early_a
            else mapped_norm_work(layer.right, r, p, wide=wide)
        )
        if early_d:
            work = work + mapped_work(layer.left, t, r)
        elif early_a:
            work = work + mapped_norm_work(layer.left, p, r, wide=wide)
        else:
            work = work + mapped_work(layer.left, p, r)
    return replace(
        plain,
        inputs=_placed(layer.right, early_a),
        outputs=_placed(layer.left, early_d),
        whitening=work * g,
    )


def _joint(layer: JointMap, plain: Choice, shape: DenseShape) -> Choice:
    p, r = layer.inputs.shape[-2], layer.outputs.shape[-2]
    k, h = layer.inputs.shape[-1], layer.outputs.shape[-1]
    g, t = shape.groups, shape.positions
    work = Work(2.0 * g * (r * h * p + h * p * k))
    if t == 1:
        work = Work(2.0 * g * (r * h + p * k + h * k))
    norms = "product" if t == 1 else NormMethod.INSTANTIATE.value
    return replace(
        plain,
        norms=norms,
        inputs=f"products {k}",
        outputs=f"products {h}",
        norm=Work() if t == 1 else Work(2.0 * g * t * p * r),
        whitening=work,
        mapping=_mapping(layer),
    )


# -- embeddings, and gradients that are written down -----------------------------------


def _lookup(layer: LayerMap, io: LookupIO) -> Choice:
    n = float(sum(d[0].numel() for _, d in io.calls))
    read, measured = Work(0.0, 2 * n), Work(0.0, 4 * n)
    table = Work(0.0, float(io.rows * io.calls[0][1].shape[-1]))
    plain = Choice(
        io.name,
        io.names,
        None,
        "rows",
        forward_backward=read,
        norm=measured,
        once=table,
    )
    if isinstance(layer, IdentityMap):
        return plain
    if isinstance(layer, KroneckerMap):
        width = io.calls[0][1].shape[-1]
        columns = mapped_work(layer.right, n / width, width)
        return replace(
            plain,
            inputs=form(layer.left),
            outputs=_placed(layer.right, before=True),
            whitening=Work(0, n) + columns,
            mapping=_mapping(layer),
        )
    size = io.rows * io.calls[0][1].shape[-1]
    return replace(
        plain,
        norms="written",
        inputs=_whole_form(layer),
        whitening=_of_whole(layer, size),
        mapping=_of_whole(layer, size),
    )


def _written(layer: LayerMap, io: DirectIO, shapes: dict[str, DenseShape]) -> Choice:
    size = sum(g[0].numel() for g in io.grads.values())
    shape = shapes.get(next(iter(io.grads)))
    work = Work(2.0 * size, 2.0 * size)  # added up by weights, and squared
    plain = Choice(io.name, io.names, shape, "written", norm=work)
    if shape is not None:
        plain = replace(plain, forward_backward=pass_work(shape))
    else:  # at least one operation an element forward and two backward
        plain = replace(plain, forward_backward=Work(0.0, 3.0 * size))
    if isinstance(layer, IdentityMap):
        return plain
    if isinstance(layer, JointMap):
        assert shape is not None
        return replace(_joint(layer, plain, shape), norms="written", norm=work)
    if not isinstance(layer, KroneckerMap):
        own = _of_whole(layer, size)
        return replace(plain, inputs=_whole_form(layer), whitening=own, mapping=own)
    wide = norm_dtype(like(io)) is torch.float64
    r = layer.shape[0] // layer.groups
    p = layer.shape.numel() // layer.shape[0] + (layer.bias is not None)
    own = mapped_norm_work(layer.right, r, p, wide=wide)
    own = own + mapped_work(layer.left, p, r)
    return replace(
        plain,
        inputs=_placed(layer.right, before=False),
        outputs=_placed(layer.left, before=False),
        whitening=own * layer.groups,
        mapping=_mapping(layer),
    )


# -- maps of sums ----------------------------------------------------------------------


def _mapping(layer: DenseMap) -> Work:
    """Of ``apply`` on the clipped sum."""
    r = layer.shape[0] // layer.groups
    p = layer.shape.numel() // layer.shape[0] + (layer.bias is not None)
    if isinstance(layer, JointMap):
        k, h = layer.inputs.shape[-1], layer.outputs.shape[-1]
        there, back = r * h * p + h * p * k, r * h * k + r * k * p
        return Work(2.0 * layer.groups * (there + back))
    assert isinstance(layer, KroneckerMap)
    if isinstance(layer.left, IdentityRoot) and isinstance(layer.right, LowRankRoot):
        k = layer.right.vectors.shape[-1]
        return Work(layer.groups * 4.0 * r * p * k)
    work = mapped_work(layer.right, r, p) + mapped_work(layer.left, p, r)
    return work * layer.groups


def _of_whole(layer: LayerMap, size: float) -> Work:
    """Of a map on the gradient as a vector."""
    if isinstance(layer, SubspaceMap):
        columns = layer.basis.shape[1]
        both = 2 if layer.outside else 1
        return Work(2.0 * both * size * columns, 2.0 * size)
    return Work(0.0, float(size))


def _scaled(layer: DiagonalMap) -> Work:
    return Work(0.0, float(sum(s.numel() for s in layer.scales.values())))


def _whole_form(layer: LayerMap) -> str:
    if isinstance(layer, SubspaceMap):
        return f"subspace {layer.basis.shape[1]}"
    return "diagonal"


def _placed(root: Root, before: bool) -> str:
    if isinstance(root, IdentityRoot):
        return _NONE
    return f"{form(root)}, {'before' if before else 'after'}"
