"""The bridge to ``torch.optim``: any torch optimiser, fed with released gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from curvedp.barrier import Release
from curvedp.clipping import ClippingRule
from curvedp.errors import ConfigurationError
from curvedp.update.chain import Chain
from curvedp.update.transform import Gradient

__all__ = ["apply_release", "noise_variance"]


def apply_release(
    release: Release,
    parameters: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    expected_batch_size: float,
    rule: ClippingRule,
    chain: Chain,
    state: list[Any],
    back: Callable[[Gradient], Gradient] | None = None,
) -> tuple[list[Any], float | None]:
    """One optimiser step on ``release / B``; the transforms' state, the next threshold.

    ``B`` is the *declared* expected batch size: the size that was drawn is private.
    Deterministic given its arguments, so replaying a stored release after a crash gives
    the same parameters to the bit. ``back`` leads from the release's frame to the
    parameters' own coordinates (:func:`read_out`); without it they are the same.
    """
    values, threshold = rule.read(release.values, expected_batch_size)
    if values.keys() != parameters.keys():
        raise ConfigurationError("the release is of other parameters than the model's")
    divided = torch._foreach_div(list(values.values()), expected_batch_size)
    mean = dict(zip(values, divided, strict=True))
    noise = None
    if chain.reads_noise:
        noise = noise_variance(release, rule, expected_batch_size)
    device = next(iter(mean.values())).device
    gradient = Gradient(mean, noise)
    gradient = gradient if back is None else back(gradient)
    gradient, state = chain.update(gradient, _on(state, device))
    before = _values(parameters, copy=True) if chain.follows_steps else {}
    # optimisers may write into .grad, and transforms give out what they keep
    kept = bool(chain.transforms)
    for name, parameter in parameters.items():
        parameter.grad = gradient.values[name].to(
            parameter.device, parameter.dtype, copy=kept
        )
    optimizer.step()
    for parameter in parameters.values():
        parameter.grad = None  # so that one found here later came from elsewhere
    if chain.follows_steps:
        state = chain.stepped(before, _values(parameters), state)
    return state, threshold


def noise_variance(
    release: Release, rule: ClippingRule, expected_batch_size: float
) -> dict[str, Tensor]:
    """Variance of the noise in every coordinate of the mean, by parameter name.

    ``(s C / B)^2``, and as much more as the rule stretches what it reads: reading is
    linear in a coordinate, so what it makes of 1 is the factor (an adaptive rule's sum
    is in units of its threshold).
    """
    ones = {name: torch.ones((), dtype=torch.float64) for name in release.values}
    factors, _ = rule.read(ones, expected_batch_size)
    std = release.noise_std / expected_batch_size
    return {name: (std * factor).square() for name, factor in factors.items()}


def _values(
    parameters: Mapping[str, torch.nn.Parameter], *, copy: bool = False
) -> dict[str, Tensor]:
    found = {name: p.detach() for name, p in parameters.items()}
    return {name: p.clone() for name, p in found.items()} if copy else found


def _on(state: list[Any], device: torch.device) -> list[Any]:
    """A state that may come from a checkpoint, where the gradient is.

    Tensors without dimensions go with any device as they are. They hold variances in
    float64, which not every device has.
    """
    moved: list[Any] = tree_map(
        lambda x: x.to(device) if isinstance(x, Tensor) and x.dim() else x, state
    )
    return moved
