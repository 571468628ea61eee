"""The bridge to ``torch.optim``: any torch optimiser, fed with released gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from curvedp.barrier import Release
from curvedp.clipping import ClippingRule
from curvedp.errors import ConfigurationError
from curvedp.update.transform import Chain

__all__ = ["apply_release"]


def apply_release(
    release: Release,
    parameters: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    expected_batch_size: float,
    rule: ClippingRule,
    chain: Chain,
    state: list[Any],
    back: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda values: (
        values
    ),
) -> tuple[list[Any], float | None]:
    """One optimiser step on ``release / B``; the transforms' state, the next threshold.

    ``B`` is the *declared* expected batch size: the size that was drawn is private.
    Deterministic given its arguments, so replaying a stored release after a crash gives
    the same parameters to the bit. ``back`` leads from the release's frame to the
    parameters' own coordinates.
    """
    values, threshold = rule.read(release.values, expected_batch_size)
    if values.keys() != parameters.keys():
        raise ConfigurationError("the release is of other parameters than the model's")
    mean: Mapping[str, Tensor] = {
        name: value / expected_batch_size for name, value in values.items()
    }
    mean, state = chain.update(back(mean), state)
    for name, parameter in parameters.items():
        parameter.grad = mean[name].to(parameter.device, parameter.dtype)
    optimizer.step()
    for parameter in parameters.values():
        parameter.grad = None  # so that one found here later came from elsewhere
    return state, threshold
