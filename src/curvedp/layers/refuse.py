"""Calls that cannot be followed, refused by name: seen at attach time and after."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch import Tensor, nn

from curvedp.errors import CouplingError, CoverageError

__all__ = ["refuse_call", "refuse_checkpointing"]


def refuse_checkpointing(label: str) -> None:
    """Refuse a layer that runs under ``torch.utils.checkpoint``.

    Its forward pass is repeated during backward, when nobody watches any more.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            raise CoverageError(
                f"layer {label!r} runs under gradient checkpointing "
                "(torch.utils.checkpoint), which repeats its forward pass during "
                "backward, unseen",
                "switch it off for the private model (model."
                "gradient_checkpointing_disable() in transformers); a smaller physical "
                "batch saves as much memory and changes nothing else",
            )
        frame = frame.f_back


def refuse_call(
    label: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuse arguments in which examples do not stand at dimension 0."""
    if isinstance(module, nn.EmbeddingBag):
        given = dict(zip(("input", "offsets"), args, strict=False)) | kwargs
        ids = given.get("input")
        flat = isinstance(ids, Tensor) and ids.dim() != 2
        if flat or given.get("offsets") is not None:
            raise CouplingError(
                f"layer {label!r} (EmbeddingBag) is given bags by offsets, in which "
                "the tokens of all examples stand in one row",
                "give it ids of shape [batch, tokens], padded with padding_idx",
            )
    if isinstance(module, nn.MultiheadAttention):
        trained = any(p.requires_grad for p in module.parameters())
        if trained and not module.batch_first:
            raise CouplingError(
                f"layer {label!r} (MultiheadAttention) has batch_first=False, so "
                "examples do not stand at dimension 0",
                "build it with batch_first=True and give it [batch, time, features]",
            )
