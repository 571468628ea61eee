"""What each layer sees, and what privacy adds to it: shapes measured, costs by formula.

Dense layers are counted as :mod:`curvedp.layers.costs` says. Per example, the others:

===============  ==============================  ==================================
layer            forward and backward            added by privacy
===============  ==============================  ==================================
embedding        none                            ``4 T r``
written down     none                            two per output and parameter
vmap, others     its products, counted           vmap: the same again
===============  ==============================  ==================================

The clip-weighted sum costs what the weight gradient of ordinary training costs, which
is not computed, so it is no extra. Memory: error signals ``d`` are kept until all norms
are known, gradients of "written" layers are kept as they are, and norms need scratch
memory in float64 for a chunk of examples. Products are counted twice (multiply, add);
elementwise work, kernel launches, float64's lower speed and the cross terms of tied
weights are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import FlopCounterMode

from curvedp.diagnostics.report import Cost, LayerReport
from curvedp.layers import (
    Batch,
    Coverage,
    LayerIO,
    Recording,
    Synthesiser,
    as_call,
)
from curvedp.layers.costs import NormMethod, norm_work, pass_work
from curvedp.layers.dense import DenseIO
from curvedp.layers.io import CHUNK_ELEMENTS, DirectIO
from curvedp.layers.lookup import LookupIO

__all__ = ["measure"]

_EXAMPLES = 2
_NORM_BYTES = 8


def measure(
    model: nn.Module, coverage: Coverage, synthesise: Synthesiser, batch_size: int
) -> tuple[list[LayerReport], Cost]:
    """A row for every covered site, and the cost of all of them together.

    Args:
        model: a copy that may be run in training mode, on synthetic inputs.
        coverage: of that copy.
        synthesise: makes synthetic batches.
        batch_size: examples that are computed at once.
    """
    batch = synthesise(_EXAMPLES, torch.Generator().manual_seed(0))
    seen = _seen(model, batch)
    reports = []
    parts = _parts(_layer_ios(model, coverage, batch))
    names = [n for i in coverage.covered for n in i.site.parameters.values()]
    for item in coverage.covered:
        site = item.site
        way = type(item.server).__name__.removesuffix("Server").lower()
        sizes = [model.get_parameter(n).numel() for n in site.parameters.values()]
        own = parts.get(site.name, [])
        works = [_work(io, way, seen.of(site.name), sum(sizes)) for io in own]
        norms = dict.fromkeys(work.norms for work in works)
        if any(names.count(n) > 1 for n in site.parameters.values()):
            norms["tied"] = None
        costs = [work.cost(batch_size, max(4, _width(model))) for work in works]
        reports.append(
            LayerReport(
                name=site.label,
                kind=type(model.get_submodule(site.name)).__name__,
                parameters=sum(sizes),
                inputs=seen.of(site.name).inputs,
                outputs=seen.of(site.name).outputs,
                served_by=way,
                norms=" + ".join(norms),
                cost=_together(costs),
            )
        )
    together = _together([report.cost for report in reports if report.cost])
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    counted = 3 * batch_size * seen.of("").flops
    total = replace(
        together,
        base_flops=max(counted, together.base_flops),
        base_bytes=batch_size * _saved_bytes(model, batch) + 2 * weights,
    )
    return reports, total


def _together(costs: Sequence[Cost]) -> Cost:
    """Sums; scratch memory is free again after each."""
    return Cost(
        base_flops=sum(c.base_flops for c in costs),
        extra_flops=sum(c.extra_flops for c in costs),
        base_bytes=sum(c.base_bytes for c in costs),
        kept_bytes=sum(c.kept_bytes for c in costs),
        scratch_bytes=max((c.scratch_bytes for c in costs), default=0.0),
    )


def _layer_ios(model: nn.Module, coverage: Coverage, batch: Batch) -> list[LayerIO]:
    recording = Recording(model, coverage.covered, _EXAMPLES, keep_inputs=True)
    output = recording.forward(*as_call(batch.inputs))
    floats = [t for t in tree_flatten(output)[0] if _is_float(t)]
    torch.autograd.backward(torch.stack([t.float().sum() for t in floats]).sum())
    return recording.layer_ios()


def _parts(ios: Sequence[LayerIO]) -> dict[str, list[LayerIO]]:
    """By site, what it brought; a layer may be made of several parts, and of sites."""
    parts: dict[str, list[LayerIO]] = {}
    for io in ios:
        inner = getattr(io, "parts", None)
        if inner is None:
            parts.setdefault(io.name, []).append(io)
            continue
        for name, own in _parts(inner).items():
            parts.setdefault(name, []).extend(own)
    return parts


def _width(model: nn.Module) -> int:
    return next(model.parameters()).element_size()


@dataclass(frozen=True)
class _Work:
    """Of one example: flops, elements put out, kept, and of scratch memory."""

    norms: str
    base: float
    extra: float
    outputs: float
    kept: float
    scratch: float
    chunked: bool = False

    def cost(self, batch_size: int, width: int) -> Cost:
        scratch = batch_size * self.scratch
        if self.chunked:  # at least one example, at most a chunk
            scratch = min(scratch, max(self.scratch, CHUNK_ELEMENTS["cpu"]))
        return Cost(
            base_flops=batch_size * self.base,
            extra_flops=batch_size * self.extra,
            base_bytes=batch_size * self.outputs * width,
            kept_bytes=batch_size * self.kept * width,
            scratch_bytes=scratch * _NORM_BYTES,
        )


def _work(io: LayerIO, way: str, seen: _Module, size: int) -> _Work:
    if isinstance(io, DenseIO):
        return _dense_work(io)
    if isinstance(io, LookupIO):
        n = sum(d[0].numel() for _, d in io.calls)
        return _Work("rows", 0.0, 4 * n, n, n, 2 * n)
    norms = "written"
    if not isinstance(io, DirectIO):
        norms = type(io).__name__.removesuffix("IO").lower()
    if way in ("rule", "expanded"):  # a sum over positions; copies bring it themselves
        kept = size if way == "expanded" else seen.elements + size
        extra = 2 * size if way == "expanded" else 2 * seen.elements + 2 * size
        return _Work(norms, 0.0, extra, seen.elements, kept, size)
    again = 3 * seen.flops if way == "vmap" else 0.0
    kept = seen.elements + size
    return _Work(norms, 3 * seen.flops, again + 2 * size, seen.elements, kept, size)


def _dense_work(io: DenseIO) -> _Work:
    shape = io.shape
    g, t, p, r = shape.groups, shape.positions, shape.inputs, shape.outputs
    written = io.settles
    extra = norm_work(shape, written=written).flops
    base, kept, rows = pass_work(shape).flops, g * t * r, g * t * (p + r)
    if written:  # in the place of the weight gradient, which is in the base
        return _Work("written", base, extra, kept, shape.size, rows, chunked=True)
    square = {"gram": 2 * g * t * t, NormMethod.INSTANTIATE.value: shape.size}
    scratch = rows + square.get(shape.norms, 0)
    return _Work(shape.norms, base, extra, kept, kept, scratch, chunked=True)


@dataclass
class _Module:
    """What one module saw: shapes and, of one example, flops and elements put out."""

    inputs: tuple[int, ...] | None = None
    outputs: tuple[int, ...] | None = None
    elements: float = 0.0
    flops: float = 0.0


@dataclass(frozen=True)
class _Seen:
    """By module name."""

    modules: dict[str, _Module]

    def of(self, name: str) -> _Module:
        return self.modules.setdefault(name, _Module())


def _seen(model: nn.Module, batch: Batch) -> _Seen:
    """One plain forward pass."""
    seen = _Seen({})
    handles = []

    def hook(name: str) -> Any:
        def record(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            module = seen.of(name)
            module.inputs = module.inputs or _shape((args, kwargs))
            module.outputs = module.outputs or _shape(output)
            sizes = [t.numel() for t in tree_flatten(output)[0] if _is_float(t)]
            module.elements += sum(sizes) / _EXAMPLES

        return record

    args, kwargs = as_call(batch.inputs)
    counter = FlopCounterMode(display=False)
    try:
        for name, module in model.named_modules():
            handles.append(module.register_forward_hook(hook(name), with_kwargs=True))
        with torch.no_grad(), counter:
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    prefix = type(model).__name__
    for name, counts in counter.get_flop_counts().items():
        if name.startswith(prefix + "."):
            seen.of(name[len(prefix) + 1 :]).flops = sum(counts.values()) / _EXAMPLES
    seen.of("").flops = counter.get_total_flops() / _EXAMPLES
    return seen


def _shape(values: Any) -> tuple[int, ...] | None:
    """Of the first tensor, without the batch dimension if it has one."""
    tensors = [t for t in tree_flatten(values)[0] if isinstance(t, Tensor)]
    if not tensors:
        return None
    shape = tuple(tensors[0].shape)
    return shape[1:] if shape and shape[0] == _EXAMPLES else shape


def _saved_bytes(model: nn.Module, batch: Batch) -> float:
    """What autograd keeps of a forward pass, for one example."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        place = x.untyped_storage().data_ptr()
        if place not in own:
            kept[place] = x.untyped_storage().nbytes()
        return x

    args, kwargs = as_call(batch.inputs)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, _same)
    with torch.enable_grad(), hooks:
        output = model(*args, **kwargs)  # kept alive, so that no storage is reused
    del output
    return math.fsum(kept.values()) / _EXAMPLES


def _same(x: Tensor) -> Tensor:
    return x


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()
