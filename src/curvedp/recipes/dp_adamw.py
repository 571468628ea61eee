"""DP-AdamW: DP-Adam with decoupled weight decay, the usual choice for transformers."""

from curvedp.recipes.base import Recipe
from curvedp.recipes.search import ADAPTIVE, Range

__all__ = ["RECIPE"]

RECIPE = Recipe(
    name="dp-adamw",
    summary="AdamW on the noisy mean of clipped gradients",
    optimiser="adamw",
    learning_rate=2e-3,
    momentum=0.9,
    weight_decay=0.01,
    search={**ADAPTIVE, "weight_decay": Range(1e-3, 0.3, log=True)},
)
