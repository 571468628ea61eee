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
from curvedp.layers.planned import kind_of

__all__ = ["ConvGeometry", "transposed_input"]

#: Channels a group from which on a CPU's own kernel is faster than patches.
FEWEST_CHANNELS = 8

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
        # whole lines of the image stay together in [b, G, p, T], seen from the other
        # side: they are copied faster that way
        patches, n = self._patches(x), len(self.kernel)
        b, out = len(x), math.prod(patches.shape[3 : 3 + n])
        order = [0, 1, 2, *range(3 + n, 3 + 2 * n), *range(3, 3 + n)]
        return patches.permute(order).reshape(b, self.groups, self._patch, out).mT

    def _patches(self, x: Tensor) -> Tensor:
        """All of them as a view, ``[b, G, C/G, *out, *kernel]``."""
        x = self._padded(x)
        b, channels = x.shape[:2]
        x = x.reshape(b, self.groups, channels // self.groups, *x.shape[2:])
        steps = zip(self.kernel, self.stride, self.dilation, strict=True)
        for i, (k, s, dil) in enumerate(steps):
            x = x.unfold(3 + i, dil * (k - 1) + 1, s)[..., ::dil]
        return x

    def output_rows(self, d: Tensor) -> Tensor:
        return d.reshape(d.shape[0], self.groups, d.shape[1] // self.groups, -1).mT

    def weight_sum(self, x: Tensor, d: Tensor) -> Tensor:
        # cuDNN may take an algorithm that rounds coarsely (Winograd, FFT), and the
        # bound must hold for what is really added: a plain matrix product, in chunks.
        # A CPU has no fast kernel for float64 either.
        native = kind_of(x) == "cpu" and x.dtype == torch.float32
        return self._weight_sum_native(x, d) if native else self._weight_sum_rows(x, d)

    def _weight_sum_rows(self, x: Tensor, d: Tensor) -> Tensor:
        total = x.new_zeros(self.groups, self.weight[0] // self.groups, self._patch)
        t = math.prod(d.shape[2:])
        each = max(1, self.groups * t * (self._patch + total.shape[1]))
        size = max(1, CHUNK_ELEMENTS.get(kind_of(x), 2**20) // each)
        for start in range(0, x.shape[0], size):
            self._add_rows(total, x[start : start + size], d[start : start + size])
        return total.reshape(self.weight)

    def _add_rows(self, total: Tensor, x: Tensor, d: Tensor) -> None:
        if self.groups == 1 and kind_of(x) == "cpu":
            # example by example: few large products, and no further copy of rows
            a, rows = self.input_rows(x), self.output_rows(d)
            total[0].addbmm_(rows[:, 0].mT, a[:, 0])
            return
        # positions of all examples in one product: [G, p, b T], written down at once
        patches, n = self._patches(x), len(self.kernel)
        order = [1, 2, *range(3 + n, 3 + 2 * n), 0, *range(3, 3 + n)]
        a = patches.permute(order).reshape(self.groups, self._patch, -1)
        rows = d.reshape(len(d), self.groups, total.shape[1], -1).permute(1, 2, 0, 3)
        total.baddbmm_(rows.reshape(*total.shape[:2], -1), a.mT)

    @property
    def _patch(self) -> int:
        return math.prod(self.weight[1:])

    def _weight_sum_native(self, x: Tensor, d: Tensor) -> Tensor:
        return self._convolved(x, d, self.weight, self.groups)

    def needs_rows(self, x: Tensor) -> bool:
        native = kind_of(x) == "cpu" and x.dtype == torch.float32
        native = native and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        return not native or self.weight[1] < FEWEST_CHANNELS

    def gradients(self, x: Tensor, d: Tensor, out: Tensor) -> None:
        """As of any layer; on a CPU by its kernel for weights, an example a group.

        That takes half the time of patches and their product.
        """
        if self.needs_rows(x):
            super().gradients(x, d, out)
            return
        b = len(x)
        weight = torch.Size((b * self.weight[0], *self.weight[1:]))
        x, d = x.flatten(0, 1).unsqueeze(0), d.flatten(0, 1).unsqueeze(0)
        found = self._convolved(x, d, weight, b * self.groups)
        out.copy_(found.reshape(out.shape))

    def _convolved(
        self, x: Tensor, d: Tensor, weight: torch.Size, groups: int
    ) -> Tensor:
        """The gradient of a weight by torch's own kernel."""
        before, after = list(self.pad[::2])[::-1], list(self.pad[1::2])[::-1]
        if self.pad_mode != "constant" or before != after:
            x, before = self._padded(x), [0] * len(before)
        _, found, _ = torch.ops.aten.convolution_backward(
            d.contiguous(),
            x.contiguous(),
            x.new_empty(weight),
            None,
            list(self.stride),
            before,
            list(self.dilation),
            False,
            [0] * len(before),
            groups,
            [False, True, False],
        )
        assert isinstance(found, Tensor)
        return found

    def weight_shape(self) -> torch.Size:
        return self.weight
