"""Convolutions in one, two and three dimensions, as linear layers on patches.

Patches are strided views of the padded input (``Tensor.unfold``): they cost one copy
when they become rows, and nothing per example.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvedp.layers.dense import Geometry
from curvedp.layers.io import CHUNK_ELEMENTS

__all__ = ["ConvGeometry", "transposed_input"]

_Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


def transposed_input(module: _Transposed, x: Tensor, d: Tensor) -> Tensor:
    """Output gradients as the input of the adjoint convolution, whose output is x.

    Padding is put on and output padding, which no weight reaches, is taken off:
    ``(n - 1) stride + dilation (kernel - 1) + 1`` values a dimension, n those of x.
    """
    padding: Sequence[Any] = module.padding
    d = F.pad(d, [p for p in reversed(padding) for _ in range(2)])
    steps = zip(module.stride, module.dilation, module.kernel_size, strict=True)
    for i, (s, dil, k) in enumerate(steps):
        d = d.narrow(2 + i, 0, (x.shape[2 + i] - 1) * s + dil * (k - 1) + 1)
    return d


@dataclass(frozen=True)
class ConvGeometry(Geometry):
    """What decides which inputs meet which weights in a convolution.

    Attributes:
        weight: weight shape ``[C_out, C_in / groups, *kernel]``.
        stride: one number a spatial dimension.
        dilation: likewise.
        groups: G.
        pad: amounts as ``torch.nn.functional.pad`` takes them, last dimension first.
        pad_mode: its mode ("constant" for zeros).
    """

    weight: torch.Size
    stride: Sequence[int]
    dilation: Sequence[int]
    groups: int
    pad: Sequence[int]
    pad_mode: str

    @classmethod
    def of(cls, module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> ConvGeometry:
        """Read the geometry of a module."""
        return cls(
            weight=module.weight.shape,
            stride=module.stride,
            dilation=module.dilation,
            groups=module.groups,
            # torch keeps the resolved amounts here, "same" and asymmetric ones included
            pad=module._reversed_padding_repeated_twice,
            pad_mode="constant"
            if module.padding_mode == "zeros"
            else module.padding_mode,
        )

    @classmethod
    def transposed(cls, module: _Transposed) -> ConvGeometry:
        """Of the convolution that a transposed one is the adjoint of, padding apart."""
        zeros = [0] * (2 * len(module.kernel_size))
        weight, groups = module.weight.shape, module.groups
        return cls(weight, module.stride, module.dilation, groups, zeros, "constant")

    @property
    def kernel(self) -> torch.Size:
        """Kernel size, a number a spatial dimension."""
        return self.weight[2:]

    def _padded(self, x: Tensor) -> Tensor:
        if not any(self.pad):
            return x
        return F.pad(x, list(self.pad), mode=self.pad_mode)

    def input_rows(self, x: Tensor) -> Tensor:
        x = self._padded(x)
        b, channels = x.shape[:2]
        x = x.reshape(b, self.groups, channels // self.groups, *x.shape[2:])
        n = len(self.kernel)
        for i, (k, s, dil) in enumerate(
            zip(self.kernel, self.stride, self.dilation, strict=True)
        ):
            x = x.unfold(3 + i, dil * (k - 1) + 1, s)[..., ::dil]
        # [b, G, C/G, *out, *kernel] -> [b, G, C/G * kernel, T], and seen from the other
        # side: copied this way, whole lines of the image stay together
        out = x.shape[3 : 3 + n]
        order = [0, 1, 2, *range(3 + n, 3 + 2 * n), *range(3, 3 + n)]
        patch = x.shape[2] * math.prod(self.kernel)
        return x.permute(order).reshape(b, self.groups, patch, math.prod(out)).mT

    def output_rows(self, d: Tensor) -> Tensor:
        return d.reshape(d.shape[0], self.groups, d.shape[1] // self.groups, -1).mT

    def weight_sum(self, x: Tensor, d: Tensor) -> Tensor:
        # cuDNN may take an algorithm that rounds coarsely (Winograd, FFT), and the
        # bound must hold for what is really added: a plain matrix product, in chunks.
        # A CPU has no fast kernel for float64 either.
        native = x.device.type == "cpu" and x.dtype == torch.float32
        return self._weight_sum_native(x, d) if native else self._weight_sum_rows(x, d)

    def _weight_sum_rows(self, x: Tensor, d: Tensor) -> Tensor:
        total = x.new_zeros(self.groups, self.weight[0] // self.groups, self._patch)
        t = math.prod(d.shape[2:])
        each = max(1, self.groups * t * (self._patch + total.shape[1]))
        size = max(1, CHUNK_ELEMENTS.get(x.device.type, 2**20) // each)
        for start in range(0, x.shape[0], size):
            part = slice(start, start + size)
            a, rows = self.input_rows(x[part]), self.output_rows(d[part])
            if self.groups == 1 and x.device.type == "cpu":
                # example by example: few large products, and no further copy of rows
                total[0].addbmm_(rows[:, 0].mT, a[:, 0])
                continue
            total += rows.transpose(0, 1).flatten(1, 2).mT @ a.transpose(0, 1).flatten(
                1, 2
            )
        return total.reshape(self.weight)

    @property
    def _patch(self) -> int:
        return math.prod(self.weight[1:])

    def _weight_sum_native(self, x: Tensor, d: Tensor) -> Tensor:
        zeros = [0] * len(self.kernel)
        _, weight, _ = torch.ops.aten.convolution_backward(
            d.contiguous(),
            self._padded(x).contiguous(),
            x.new_empty(self.weight),
            None,
            list(self.stride),
            zeros,
            list(self.dilation),
            False,
            zeros,
            self.groups,
            [False, True, False],
        )
        assert isinstance(weight, Tensor)
        return weight

    def weight_shape(self) -> torch.Size:
        return self.weight
