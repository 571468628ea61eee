"""GEP: clip and perturb a gradient's embedding in a public subspace, and what is left.

``theta <- theta - lr / B (Q e + r)``, with Q orthonormal for every layer and

``e = sum_i clip_C(Q^T g_i) + N(0, (s0 C)^2 I)``,
``r = sum_i clip_C1(g_i - Q Q^T g_i) + N(0, (s1 C1)^2 I)``.

Yu, Zhang, Chen and Liu, "Do Not Let Privacy Overbill Utility: Gradient Embedding
Perturbation for Private Learning", ICLR 2021. Q comes from one power iteration on
per-example gradients of probes. The residual is taken from the *unclipped* embedding.
Both sums are of one Poisson draw: one event, ``s = (s0^-2 + s1^-2)^-1/2``; see
:mod:`curvedp.whitening.subspace`. Noise that would fall into the span of Q with the
residual is left out: the residual has nothing there.

=========  ==========================================================================
default    synthetic probes, labels drawn from the model
public     a public dataset with its own labels, as in the paper
biased     without the residual (B-GEP)
=========  ==========================================================================
"""

from typing import Any

from curvedp.recipes.base import Recipe
from curvedp.recipes.curvature import Curvature

__all__ = ["MODES", "RECIPE"]

MODES: dict[str, dict[str, Any]] = {
    "public": {"probe": "public", "labels": "own"},
    "biased": {"residual_share": 0.0},
}

RECIPE = Recipe(
    name="gep",
    summary="clip and perturb a public subspace's embedding and the rest apart",
    optimiser="sgd",
    learning_rate=0.1,
    momentum=0.9,
    clipping="flat",
    clip_norm=1.0,
    curvature=Curvature(moments="subspace", back_map="inverse", residual_clip=0.2),
    modes=MODES,
)
