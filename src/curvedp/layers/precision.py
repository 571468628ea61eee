"""True float32 (or better) for everything that the guarantee rests on.

A model may run in bfloat16, in TF32 or under autocast: that changes which gradients it
has, not how much one example may contribute. Norms, clipped sums and noise are another
matter. There a lower precision silently moves the bound, so they are computed inside
:func:`exact`, which switches all of that off and puts it back afterwards.

Norms may be asked for in less than float64, where that is faster (:func:`norms_in`).
They are then raised by a proven bound of what rounding hides
(:mod:`curvedp.layers.rounding`), so that the clip bound holds all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "ROUNDING",
    "NormPrecision",
    "compute_dtype",
    "exact",
    "fast_float64",
    "norm_dtype",
    "norms_in",
    "short_products",
    "square_dtype",
]


class NormPrecision(Enum):
    """In which precision products are computed that norms are taken of."""

    #: float64 where the device is not much slower at that, float32 elsewhere.
    WIDE = "wide"
    #: True float32 everywhere.
    FLOAT32 = "float32"
    #: Products of bfloat16 numbers that are added up in float32, as tensor cores do.
    #: A float32 number is a sum of two such numbers up to 2^-16 of it.
    BF16 = "bf16"


_chosen: ContextVar[NormPrecision] = ContextVar("norms", default=NormPrecision.WIDE)

#: Unit round-off. A sum of n products, in whatever order it is computed, is off by at
#: most n of these, relative to the sum of the products' absolute values (Higham 2002,
#: "Accuracy and Stability of Numerical Algorithms", 3.1). Norms are raised by as much.
ROUNDING = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype to compute norms and sums in: float64 stays, all else is float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def norm_dtype(x: Tensor) -> torch.dtype:
    """The dtype to compute norms in: float64 where it is not much slower.

    CPUs have half the float32 rate, data-centre GPUs as much as without TF32, other
    GPUs a few per cent of it. What :func:`norms_in` asks for goes before that.
    """
    if _chosen.get() is not NormPrecision.WIDE:
        return compute_dtype(x)
    return torch.float64 if fast_float64(x) else compute_dtype(x)


def fast_float64(x: Tensor) -> bool:
    """Whether float64 is not much slower than float32 where the tensor lies."""
    if x.device.type == "cpu":
        return True
    return x.is_cuda and torch.cuda.get_device_capability(x.device) in _FAST_FLOAT64


def square_dtype(x: Tensor) -> torch.dtype:
    """The dtype to add up squares in: float64 wherever the device has it.

    One operation an element, and memory is the bottleneck also where float64 is slow.
    """
    return compute_dtype(x) if x.device.type == "mps" else torch.float64


@contextmanager
def norms_in(precision: NormPrecision) -> Iterator[None]:
    """Inside, norms are computed in this precision."""
    token = _chosen.set(precision)
    try:
        yield
    finally:
        _chosen.reset(token)


def short_products(x: Tensor) -> bool:
    """Whether products for norms are those of bfloat16 numbers; not of float64 ones."""
    return _chosen.get() is NormPrecision.BF16 and x.dtype != torch.float64


#: Compute capabilities of the A100, the H100 and H200, and the B200.
_FAST_FLOAT64 = {(8, 0), (9, 0), (10, 0)}


@contextmanager
def exact(device: torch.device) -> Iterator[None]:
    """Switch off autograd, autocast and reduced-precision products of float32."""
    with (
        _true_float32(device.type),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        yield


@contextmanager
def _true_float32(device: str) -> Iterator[None]:
    # Since 2.9 torch has a switch per backend and kind of operation. The older, global
    # ones cannot be read any more once somebody has set a newer one.
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        with _true_float32_before_2_9():
            yield
        return
    backends: Any = torch.backends
    # products and convolutions are all that is computed inside
    on_cpu = (backends.mkldnn.matmul, backends.mkldnn.conv)
    on_gpu = (backends.cuda.matmul, backends.cudnn.conv)
    switches = on_cpu if device == "cpu" else (*on_gpu, *on_cpu)
    before = [switch.fp32_precision for switch in switches]
    if all(precision == "ieee" for precision in before):
        yield
        return
    try:
        for switch in switches:
            switch.fp32_precision = "ieee"
        yield
    finally:
        for switch, precision in zip(switches, before, strict=True):
            switch.fp32_precision = precision


@contextmanager
def _true_float32_before_2_9() -> Iterator[None]:
    matmul_precision = torch.get_float32_matmul_precision()
    conv_tf32 = torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul_precision)
        torch.backends.cudnn.allow_tf32 = conv_tf32
