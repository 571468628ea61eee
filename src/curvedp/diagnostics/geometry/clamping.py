"""What the floor under the curvature does to training (DP-NGD, figure 4).

``P = F^-1/2`` is huge where F is nearly flat, and noise is mapped by P as well. Without
a floor under the eigenvalues the noise alone throws the parameters away.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from curvedp.curvature.products import evaluated
from curvedp.errors import ConfigurationError, CurvedpError, withheld
from curvedp.layers import as_call
from curvedp.probes import OracleProbe
from curvedp.train import Progress, Trainer
from curvedp.train.datasets import moved

__all__ = ["CLAMPS", "LossPath", "loss_path"]

#: Settings of dp-ngd by name, in the order of the figure.
CLAMPS: dict[str, dict[str, Any]] = {
    "scheduled": {"clamp": "matched"},
    "fixed": {"clamp": "matched", "floor_base": 1.0},
    "printed": {"clamp": "printed"},
    "none": {"clamp": "none"},
}


@dataclass
class LossPath:
    """The training loss along a run. Not private.

    Attributes:
        steps: logical steps made.
        losses: mean loss over the same private examples after each of them.
        diverged_at: the first step after which it was no number, or None.
    """

    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    diverged_at: int | None = None

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "private": False,
            "first": self.losses[0],
            "last": self.losses[-1],
            "lowest": min(self.losses, default=math.nan),
            "diverged_at": self.diverged_at,
            "steps": self.steps,
            "losses": self.losses,
        }


def loss_path(
    trainer_of: Callable[[Callable[[Progress], None]], Trainer],
    dataset: Any,
    *,
    examples: int = 256,
    every: int = 1,
    seed: int = 0,
) -> LossPath:
    """Train once and write down the loss on the way.

    The loss is looked at apart from the steps, over the same examples each time; the
    run itself is what it would have been. A run that diverges is ended there.

    Args:
        trainer_of: makes the Trainer, which has to report to the given observer.
        dataset: the private data: the path has no guarantee.
        examples: how many of them the loss is the mean of.
        every: steps between two looks.
        seed: of the choice of examples.
    """
    path = LossPath()
    generator = torch.Generator().manual_seed(seed)
    batch = OracleProbe(dataset).labelled(examples, generator)

    def look(progress: Progress) -> None:
        if progress.step % every and progress.step != progress.steps:
            return
        loss = _mean_loss(trainer.model, trainer.loss, batch.inputs, batch.targets)
        if math.isfinite(loss):
            path.steps.append(progress.step)
            path.losses.append(loss)
        elif path.diverged_at is None:
            path.diverged_at = progress.step
            trainer.request_stop()

    trainer = trainer_of(look)
    if not trainer.recipe.private:
        raise ConfigurationError(
            f"the recipe {trainer.recipe.name!r} adds no noise that could diverge",
            "choose dp-ngd",
        )
    look(Progress(0, 0))
    try:
        trainer.fit(dataset)
    except (CurvedpError, RuntimeError):
        # factors and roots of a model that is no number are refused on their own
        if _is_finite(trainer.model):
            raise
        path.diverged_at = path.diverged_at or path.steps[-1] + 1
    return path


def _mean_loss(
    model: nn.Module, loss: Callable[[Any, Any], Tensor], inputs: Any, targets: Any
) -> float:
    device = next(model.parameters()).device
    args, kwargs = as_call(moved(inputs, device))
    with evaluated(model), torch.no_grad(), withheld("the model or its loss"):
        return float(loss(model(*args, **kwargs), moved(targets, device)).mean())


def _is_finite(model: nn.Module) -> bool:
    with torch.no_grad():
        return all(bool(torch.isfinite(p).all()) for p in model.parameters())
