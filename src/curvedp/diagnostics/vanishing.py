"""Parameters whose gradient is zero whatever the data: nothing but noise moves them.

A bias on attention keys shifts all scores of a query alike, and softmax does not see
it; a constant added to all channels is taken away again by the LayerNorm that follows.
The check finds rounding errors in place of a gradient there, and refuses the parameter;
this tells the reason.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from curvedp.layers import Synthesiser, as_call
from curvedp.layers.direct import float_tensors
from curvedp.layers.verify import perturbed_parameters

__all__ = ["vanishes"]

#: Gradient norm per element, relative to the typical parameter, that is rounding only.
NEGLIGIBLE = 1e-4


def vanishes(model: nn.Module, name: str, synthesise: Synthesiser) -> bool:
    """Whether the gradient of a parameter is zero up to rounding."""
    values = perturbed_parameters(model, 0)
    if name not in values:
        return False
    leaves = {n: p.detach().clone().requires_grad_() for n, p in values.items()}
    generator = torch.Generator().manual_seed(0)
    batch = synthesise(2, generator)
    args, kwargs = as_call(batch.inputs)
    try:
        output = functional_call(model, leaves, args, kwargs)
        total = torch.zeros(())
        for t in float_tensors(output):
            direction = torch.randn(t.shape, generator=generator).to(t.device, t.dtype)
            total = total.to(t.device) + (t * direction).sum()
        grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    except RuntimeError:
        return False
    sizes = {n: _size(g) for n, g in zip(leaves, grads, strict=True)}
    typical = sorted(sizes.values())[len(sizes) // 2]
    return 0 < sizes[name] < NEGLIGIBLE * typical


def _size(g: Tensor | None) -> float:
    return 0.0 if g is None else float(g.double().square().mean().sqrt())
