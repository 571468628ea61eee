"""True float32 (or better) for everything that the guarantee rests on.

A model may run in bfloat16, in TF32 or under autocast: that changes which gradients it
has, not how much one example may contribute. Norms, clipped sums and noise are another
matter. There a lower precision silently moves the bound, so they are computed inside
:func:`exact`, which switches all of that off and puts it back afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["ROUNDING", "compute_dtype", "exact"]

#: Allowance for the rounding of a float32 sum of products, relative to the sum of the
#: products' absolute values: 8 units of round-off. Blocked matrix products stay below
#: it by a wide margin; ``tests/clipping/test_rounding.py`` looks for exceptions.
ROUNDING = {torch.float32: 2.0**-21, torch.float64: 2.0**-49}


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype to compute norms and sums in: float64 stays, all else is float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@contextmanager
def exact(device: torch.device) -> Iterator[None]:
    """Switch off autograd, autocast and reduced-precision products of float32."""
    matmul_precision = torch.get_float32_matmul_precision()
    conv_tf32 = torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(matmul_precision)
        torch.backends.cudnn.allow_tf32 = conv_tf32
