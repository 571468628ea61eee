"""The same captured values in a wider dtype, so that gradients written down are exact.

Where the terms of ``g_i = sum_t d_t a_t^T`` cancel, a gradient that was added up in
float32 may be zero and the one that enters a float64 sum is not. Whoever takes norms
from written-down gradients writes them down in the dtype of the sum.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from curvedp.layers.dense import DenseIO
from curvedp.layers.io import DirectIO, LayerIO
from curvedp.layers.joined import JoinedIO
from curvedp.layers.lookup import LookupIO

__all__ = ["widened"]


def widened(io: LayerIO, dtype: torch.dtype) -> LayerIO:
    """A copy whose ``per_example`` and ``spread`` compute in a dtype."""
    if isinstance(io, DenseIO | LookupIO):
        calls = [(_cast(x, dtype), _cast(d, dtype)) for x, d in io.calls]
        return replace(io, calls=calls)
    if isinstance(io, JoinedIO):
        return replace(io, parts=[widened(part, dtype) for part in io.parts])
    if isinstance(io, DirectIO):
        return DirectIO(io.name, {n: _cast(g, dtype) for n, g in io.grads.items()})
    return io


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x
