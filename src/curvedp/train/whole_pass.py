"""Passes that are one program or one CUDA graph: what they need, and which it is."""

from __future__ import annotations

import torch

from curvedp.errors import ConfigurationError
from curvedp.layers import PerExampleLoss, Synthesiser
from curvedp.plan import Plan
from curvedp.train.compiled import CompiledPass
from curvedp.train.engine import Engine
from curvedp.train.graph import GraphedPass
from curvedp.train.passes import KEPT, ForwardPrecision

__all__ = ["compilable", "recordable", "whole_pass"]


def recordable(
    loss: PerExampleLoss | None, device: torch.device, plan: Plan
) -> PerExampleLoss:
    """The loss, if a CUDA graph of the step can be what the step is."""
    if device.type != "cuda":
        raise ConfigurationError(
            f"cuda_graph needs a model on a CUDA device, and this one is on {device}",
            "move it there first, or leave cuda_graph out",
        )
    if loss is None:
        raise ConfigurationError(
            "cuda_graph records the loss too, and make_private was given none",
            "pass loss=..., and use private.train_on in the loop",
        )
    if plan.clipping.first_threshold() is not None:
        raise ConfigurationError(
            "a CUDA graph keeps the clip rule that it was recorded with, and adaptive "
            "clipping has another threshold at every step",
            "choose another clip rule (normalised has no threshold), or leave "
            "cuda_graph out",
        )
    return loss


def whole_pass(
    engine: Engine,
    programmed: PerExampleLoss | None,
    recorded: PerExampleLoss | None,
    synthetic: Synthesiser,
) -> CompiledPass | GraphedPass | None:
    """The pass of ``train_on``, if it is not that of a loop; a graph may hold both."""
    passed: CompiledPass | GraphedPass | None = None
    if programmed is not None:
        passed = engine.compiled(programmed, synthetic)
    return passed if recorded is None else engine.graphed(recorded)


def compilable(
    loss: PerExampleLoss | None, precision: ForwardPrecision
) -> PerExampleLoss:
    """The loss, if there is one to compile and nothing is in the way."""
    if precision.keeps_short:
        raise ConfigurationError(
            f"precision={KEPT!r} rounds what autograd saves, and a compiled pass "
            "decides itself what it saves",
            'leave compile out, or take precision="bf16"; cuda_graph works with both',
        )
    if loss is None:
        raise ConfigurationError(
            "compile=True compiles the loss too, and make_private was given none",
            "pass loss=..., and use private.train_on in the loop",
        )
    return loss
