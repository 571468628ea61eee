"""Losses, one number per example.

Privacy is promised per example, so the loss must be too: ``loss(output, targets)`` has
shape ``[B]``, and no entry may depend on another example. Torch's own loss modules are
switched to ``reduction="none"`` and averaged over what is left of each example.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from curvedp.errors import ConfigurationError
from curvedp.layers import PerExampleLoss

__all__ = ["LOSSES", "per_example_loss"]


def cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    """Classification: logits ``[B, K]``, class numbers ``[B]``."""
    return F.cross_entropy(output, targets, reduction="none")


def mean_squared_error(output: Tensor, targets: Tensor) -> Tensor:
    """Regression: ``[B]`` or ``[B, K]`` on both sides."""
    output = output.reshape(targets.shape)
    return _example_mean(F.mse_loss(output, targets, reduction="none"))


def binary_cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    """Multi-label: logits and 0/1 targets ``[B, K]``."""
    output = output.reshape(targets.shape)
    targets = targets.to(output.dtype)
    return _example_mean(
        F.binary_cross_entropy_with_logits(output, targets, reduction="none")
    )


def language_modelling(output: Tensor, targets: Tensor) -> Tensor:
    """Next token: logits ``[B, T, V]``, token ids ``[B, T]``, -100 where there is none.

    Averaged over each sequence's *own* tokens. A mean over all tokens of the batch
    would make one example's gradient depend on the length of the others.
    """
    logits = output.transpose(1, 2)
    losses = F.cross_entropy(logits, targets, reduction="none", ignore_index=-100)
    counted = (targets != -100).sum(1).clamp_min(1)
    return losses.sum(1) / counted


#: Losses by name.
LOSSES: dict[str, PerExampleLoss] = {
    "cross-entropy": cross_entropy,
    "mse": mean_squared_error,
    "bce": binary_cross_entropy,
    "language-modelling": language_modelling,
}


def per_example_loss(loss: str | nn.Module | Callable[..., Any]) -> PerExampleLoss:
    """A per-example loss from a name, a torch loss module, or a function.

    A function must return ``[B]`` by itself; coverage checks that at attach time.
    """
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise ConfigurationError(
                f"unknown loss {loss!r}", f"choose one of: {', '.join(LOSSES)}"
            )
        return LOSSES[loss]
    if isinstance(loss, nn.Module):
        if any(p.requires_grad for p in loss.parameters()):
            raise ConfigurationError(
                f"the loss {type(loss).__name__} has parameters of its own",
                "put them into the model",
            )
        if hasattr(loss, "reduction"):
            unreduced: Any = copy.copy(loss)
            unreduced.reduction = "none"
            return lambda output, targets: _example_mean(unreduced(output, targets))
    if not callable(loss):
        raise ConfigurationError(
            f"the loss must be a name, a torch loss or a function, not {loss!r}"
        )
    return loss


def _example_mean(losses: Tensor) -> Tensor:
    return losses.flatten(1).mean(1) if losses.dim() > 1 else losses
