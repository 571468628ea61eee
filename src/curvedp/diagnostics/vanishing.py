"""Parameters whose gradient is zero whatever the data: nothing but noise moves them.

A bias on attention keys shifts all scores of a query alike, and softmax does not see
it; a bias before a norm is taken away again. Both are accepted, and harmless: the
output does not depend on them. A weight is another matter. Its layer learns nothing,
because what follows makes a constant of its output.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from curvedp.layers import Synthesiser, as_call
from curvedp.layers.direct import float_tensors
from curvedp.layers.verify import perturbed_parameters

__all__ = ["vanishing"]

#: Norm of a gradient relative to that of the whole model. Rounding leaves 1e-15 of it.
NOTHING = 1e-11


def vanishing(model: nn.Module, synthesise: Synthesiser) -> list[str]:
    """Names of the parameters whose gradient is zero up to the rounding of float64.

    None are found in a model that does not run in float64, where nothing tells a small
    gradient from rounding.
    """
    values = {n: p.double() for n, p in perturbed_parameters(model, 0).items()}
    leaves = {n: p.detach().requires_grad_() for n, p in values.items()}
    generator = torch.Generator().manual_seed(0)
    args, kwargs = tree_map(_double, as_call(synthesise(2, generator).inputs))
    try:
        trial = copy.deepcopy(model).double()
        output = functional_call(trial, leaves, args, kwargs)
        total = torch.zeros((), dtype=torch.float64)
        for t in float_tensors(output):
            direction = torch.randn(t.shape, generator=generator).to(t.device, t.dtype)
            total = total.to(t.device) + (t * direction).sum()
        grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    except Exception:  # the model's own code, in a dtype it need not know
        return []
    sizes = {
        name: float(g.norm())
        for name, g in zip(leaves, grads, strict=True)
        if g is not None
    }
    whole = math.hypot(*sizes.values())
    return [name for name, size in sizes.items() if size <= NOTHING * whole]


def _double(x: object) -> object:
    if isinstance(x, Tensor) and x.is_floating_point():
        return x.double()
    return x
