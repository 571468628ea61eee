"""AdaDPS: scale every coordinate by public squares, clip each example, add noise.

``theta <- theta - lr / B (sum_i clip_C(g_i / sqrt(h + 1e-10)) + N(0, (s C)^2 I))``

Li, Zaheer, Reddi and Smith, "Private Adaptive Optimization with Side Information", ICML
2022. ``h`` is the mean over probe batches of the squared mean-loss gradient
(``moments="batch-squares"``), or of per-example squares (``"example-squares"``); it is
estimated anew every ``refresh`` steps, a declared number. The authors' code clips means
of microbatches, which one example moves by up to 2C; here each example is clipped.

=========  ==========================================================================
default    synthetic probes, labels drawn from the model
public     a public dataset with its own labels, as in the paper
=========  ==========================================================================
"""

from typing import Any

from curvedp.recipes.base import Recipe
from curvedp.recipes.curvature import Curvature

__all__ = ["MODES", "RECIPE"]

MODES: dict[str, dict[str, Any]] = {"public": {"probe": "public", "labels": "own"}}

RECIPE = Recipe(
    name="adadps",
    summary="scale coordinates by squares of public gradients, then as dp-sgd",
    optimiser="sgd",
    learning_rate=0.1,
    momentum=0.9,
    clipping="flat",
    clip_norm=1.0,
    curvature=Curvature(
        moments="batch-squares", damping=1e-10, absolute_damping=True, refresh=234
    ),
    modes=MODES,
)
