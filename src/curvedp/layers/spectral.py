"""Spectral norms stand still while a layer is run again.

In training mode torch's spectral norms improve their vectors in every forward pass, and
then divide by the norm that these give. A layer that is run again for its per-example
gradients has to divide by the same norm as in the pass: with the vectors as that pass
left them, and without another improvement.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

__all__ = ["spectral_norms_at_rest"]


@contextmanager
def spectral_norms_at_rest(module: nn.Module) -> Iterator[None]:
    """No vector moves, and what the older form hangs on its module comes back."""
    resting, hung = [], []
    for part in module.modules():
        hooks = part._forward_pre_hooks.values()
        names = [hook.name for hook in hooks if isinstance(hook, SpectralNorm)]
        if names or isinstance(part, _SpectralNorm):
            resting.append((part, part.training))
        hung += [(vars(part), name, vars(part)[name]) for name in names]
    try:
        for part, _ in resting:
            part.training = False
        yield
    finally:
        for part, mode in resting:
            part.training = mode
        for own, name, weight in hung:
            own[name] = weight
