"""A net of the tests with what is needed to run it, and pieces that many use."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from curvedp.layers import Batch
from curvedp.layers.direct import float_tensors

TOKENS = 11


@dataclass(frozen=True)
class Net:
    """A model with what is needed to run it.

    Attributes:
        name: for people.
        make: a fresh model; weights from torch's global generator.
        inputs: ``(size, generator) -> inputs``.
        random: whether the forward pass draws random numbers.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], Any]
    random: bool = False

    def __str__(self):
        return self.name

    def batch(self, size, generator, dtype=torch.float32):
        """Inputs, and targets that spread the gradient norms over some decades."""

        def cast(x):
            return x.to(dtype) if x.is_floating_point() else x

        inputs = torch.utils._pytree.tree_map(cast, self.inputs(size, generator))
        exponents = 2.5 * torch.rand(size, generator=generator) - 1.5
        return Batch(inputs, (10**exponents).to(dtype))

    def synthesiser(self, dtype=torch.float32):
        return lambda size, generator: self.batch(size, generator, dtype)


def loss(output, targets):
    """Weighted squares of all outputs, an example on its own; smooth everywhere."""
    total = 0.0
    for t in float_tensors(output):
        t = t.flatten(1) if t.dim() > 1 else t.unsqueeze(1)
        pattern = torch.linspace(-1, 1, t.shape[1], dtype=t.dtype, device=t.device)
        total = total + ((t + pattern).square() * (1 + pattern / 2)).mean(1)
    return total * targets


def frozen(module, name):
    getattr(module, name).requires_grad_(False)
    return module


class Residual(nn.Module):
    def __init__(self, *inner):
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x):
        return x + self.inner(x)
