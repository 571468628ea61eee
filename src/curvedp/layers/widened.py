"""The same captured values as other tensors: in a wider dtype, or from elsewhere.

Where the terms of ``g_i = sum_t d_t a_t^T`` cancel, a gradient that was added up in
float32 may be zero and the one that enters a float64 sum is not. Whoever takes norms
from written-down gradients writes them down in the dtype of the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from curvedp.layers.dense import DenseIO
from curvedp.layers.io import DirectIO, LayerIO
from curvedp.layers.joined import JoinedIO
from curvedp.layers.lookup import LookupIO

__all__ = ["changed", "widened"]


def widened(io: LayerIO, dtype: torch.dtype) -> LayerIO:
    """A copy whose ``per_example`` and ``spread`` compute in a dtype."""
    return changed(io, lambda x: x.to(dtype) if x.is_floating_point() else x)


def changed(io: LayerIO, change: Callable[[Tensor], Tensor]) -> LayerIO:
    """A copy with ``change(x)`` for every tensor x, always in the same order.

    A site that the batch did not reach has none.
    """
    if isinstance(io, DenseIO | LookupIO):
        return replace(io, calls=[(change(x), change(d)) for x, d in io.calls])
    if isinstance(io, JoinedIO):
        return replace(io, parts=[changed(part, change) for part in io.parts])
    if isinstance(io, DirectIO):
        return DirectIO(io.name, {n: change(g) for n, g in io.grads.items()})
    return io
