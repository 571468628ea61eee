r"""Where gradients lie: one power iteration on per-example gradients, layer by layer.

With ``g_i`` the whole gradient of a layer, flattened to p numbers, and a fixed random
``W [p, k]``,

    Y = sum_i g_i (g_i^T W),    Q = orthonormal columns of Y.

Q spans the leading directions of ``sum_i g_i g_i^T`` as one step of subspace iteration
finds them (GEP's algorithm 2). Y is a sum, so batches and moving averages merge like
other factors, and no more than a chunk of gradients is written down at a time.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from curvedp.curvature.factors import Factor, SketchFactor
from curvedp.curvature.squares import gradients_in_chunks
from curvedp.layers.io import LayerIO, UnreachedIO

__all__ = ["orthonormal", "sketch_of"]


def sketch_of(io: LayerIO, basis: int) -> dict[str, Factor]:
    """The sketch of one batch of a layer, by first parameter name.

    Args:
        io: what the layer saw of a probe batch.
        basis: k; a layer of fewer parameters takes as many as it has.
    """
    if isinstance(io, UnreachedIO):
        return {}
    sketch: Tensor | None = None
    start: Tensor | None = None
    shapes: dict[str, tuple[int, ...]] = {}
    for gradients in gradients_in_chunks(io):
        shapes = {name: tuple(g.shape[1:]) for name, g in gradients.items()}
        rows = torch.cat([g.flatten(1) for g in gradients.values()], 1).double()
        if start is None:
            start = _start(tuple(shapes), rows.shape[1], basis).to(rows.device)
        part = rows.mT @ (rows @ start)
        sketch = part if sketch is None else sketch + part
    assert sketch is not None
    return {io.names[0]: SketchFactor(shapes, sketch, float(io.batch_size))}


def _start(names: tuple[str, ...], size: int, basis: int) -> Tensor:
    """W: a function of names and sizes, so that sketches of two estimates add up."""
    digest = hashlib.sha256(repr((names, size)).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    columns = min(basis, size)
    return torch.randn(size, columns, generator=generator, dtype=torch.float64)


def orthonormal(sketch: Tensor) -> Tensor:
    """Q ``[p, k]`` of a sketch; orthonormal also where the sketch has a lower rank."""
    # columns differ by orders of magnitude, which a factorisation need not see
    largest = torch.linalg.vector_norm(sketch, dim=0)
    safe = torch.where(largest > 0, largest, torch.ones_like(largest))
    basis: Tensor = torch.linalg.qr(sketch / safe)[0]
    return basis
