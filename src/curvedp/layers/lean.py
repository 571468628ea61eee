"""Layers whose backward pass needs less memory, for passes that keep in bfloat16.

At the peak of such a pass most of what is alive are float32 tensors under way. Two of
them can be spared:

- a norm layer's input, which its backward pass would get back as a whole. Examples are
  independent, so it takes a piece of the batch at a time, by torch's own operation;
- a convolution's input, which autograd saves for the gradient of a weight that nobody
  asks for. The gradient of the input does not read it; its shape is enough.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from curvedp.layers.costs import lean_rows
from curvedp.layers.kept import Keeper
from curvedp.layers.planned import kind_of

__all__ = ["lean_forward"]


def lean_forward(
    module: nn.Module, keeper: Keeper
) -> dict[nn.Module, Callable[..., Any]]:
    """By a module that a rule serves, another forward; empty if it has none."""
    if "forward" in vars(module):  # somebody has put one there
        return {}
    if isinstance(module, nn.GroupNorm | nn.LayerNorm):
        return {module: partial(_norm, module, keeper)}
    if isinstance(module, _CONVOLUTIONS) and module.padding_mode == "zeros":
        # other paddings save the input as well, and not for a weight
        return {module: partial(_convolution, module, keeper)}
    return {}


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _convolution(module: nn.Module, keeper: Keeper, input: Tensor) -> Any:
    keeper.unread(input)
    try:
        return type(module).forward(module, input)
    finally:
        keeper.unread(None)


def _norm(module: nn.GroupNorm | nn.LayerNorm, keeper: Keeper, input: Tensor) -> Any:
    if not input.requires_grad or not keeper.takes(input):
        return type(module).forward(module, input)  # type: ignore[arg-type]
    return _InPieces.apply(input, module, keeper)  # type: ignore[no-untyped-call]


class _InPieces(torch.autograd.Function):
    """A norm layer of float32 inputs; its weights get no gradient here."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, module: nn.GroupNorm | nn.LayerNorm, keeper: Keeper
    ) -> Tensor:
        y, mean, rstd = _normalised(module, x)
        ctx.module, ctx.weight = module, module.weight
        ctx.x, ctx.moments = keeper.short(x), (mean, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, moments = ctx.x, ctx.moments
        ctx.x = ctx.moments = None  # or they live as long as the graph
        result = torch.empty_like(grad, memory_format=torch.contiguous_format)
        # the input in float32 and what comes out, and what is made on the way
        rows = lean_rows(4 * grad[:1].numel(), kind_of(grad))
        per_example = [m.numel() // max(1, len(grad)) for m in moments]
        for start in range(0, len(grad), rows):
            part = slice(start, start + rows)
            own = [
                m.flatten()[start * n : (start + rows) * n]
                for m, n in zip(moments, per_example, strict=True)
            ]
            d, values = grad[part].contiguous(), x[part].to(torch.float32)
            result[part] = _input_gradient(ctx.module, ctx.weight, d, values, *own)
        return result, None, None


def _normalised(
    module: nn.GroupNorm | nn.LayerNorm, x: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    weight, bias, eps = module.weight, module.bias, module.eps
    if isinstance(module, nn.LayerNorm):
        shape = module.normalized_shape
        return torch.native_layer_norm(x, shape, weight, bias, eps)
    n, channels, size = _sizes(x)
    groups = module.num_groups
    return torch.native_group_norm(
        x.contiguous(), weight, bias, n, channels, size, groups, eps
    )


def _input_gradient(
    module: nn.GroupNorm | nn.LayerNorm,
    weight: Tensor | None,
    d: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
) -> Tensor:
    mask, x = [True, False, False], x.contiguous()
    found: Tensor
    if isinstance(module, nn.LayerNorm):
        lead = (*x.shape[: x.dim() - len(module.normalized_shape)],)
        ones = [1] * len(module.normalized_shape)
        mean, rstd = mean.reshape(*lead, *ones), rstd.reshape(*lead, *ones)
        found, _, _ = torch.ops.aten.native_layer_norm_backward(
            d, x, module.normalized_shape, mean, rstd, weight, None, mask
        )
        return found
    groups = module.num_groups
    n, channels, size = _sizes(x)
    mean, rstd = mean.reshape(n, groups), rstd.reshape(n, groups)
    found, _, _ = torch.ops.aten.native_group_norm_backward(
        d, x, mean, rstd, weight, n, channels, size, groups, mask
    )
    return found


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """Examples, channels, and positions of each."""
    n, channels = x.shape[:2]
    return n, channels, x[:1, :1].numel()
