"""DP-NGD: clip in the space that the natural gradient whitens, and map back.

``theta <- theta - lr / B P (sum_i clip_C(P g_i) + N(0, (s C)^2 I))``, ``P = F^-1/2`` of
a Kronecker-factored Fisher matrix whose eigenvalues are clamped from below. At the safe
floor, noise moves the parameters no further than that of a plain step would; on the
plateau of the schedule, up to ``1 / sqrt(floor_base)`` times as far.

Following DP-NGD (see ``docs/theory.md`` for what differs and why): factors from public
data or synthetic probes, C = 10, a floor that falls, rests and rises again at every
step (eq. 18), whenever the factors were estimated.
"""

from curvedp.recipes.base import Recipe
from curvedp.recipes.curvature import Curvature
from curvedp.recipes.search import Choice, Range

__all__ = ["RECIPE"]

RECIPE = Recipe(
    name="dp-ngd",
    summary="natural gradient: clip in whitened space, clamped curvature, map back",
    optimiser="sgd",
    learning_rate=0.1,
    momentum=0.0,
    clipping="flat",
    clip_norm=10.0,
    curvature=Curvature(
        side="both", rank=0, clamp="matched", back_map="natural", refresh=8
    ),
    search={
        "learning_rate": Range(0.003, 0.3, log=True),
        "momentum": Choice((0.0, 0.9)),
        "clip_norm": Choice((1.0, 3.0, 10.0)),
        "clamp": Choice(("matched", "printed")),
        "plain_step": Choice((0.5, 1.0, 2.0)),
        "floor_base": Choice((0.01, 0.1, 1.0)),
        "spectral_power": Choice((2.0, 3.0, 4.0)),
    },
)
