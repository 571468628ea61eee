"""Scale then privatise: clip and add noise in scaled coordinates, and scale back.

``theta <- theta - lr / B P^-1 (sum_i clip_C(P g_i) + N(0, (s C)^2 I))``,
``P = F^-1/4``.

But for clipping the update is the gradient's own mean; only the noise has another
shape. Scaling by ``F^-p`` trades the length that clipping sees, ``tr F^(1-2p)``, for
the noise on the way back, ``tr F^2p``; their product is least at p = 1/4.

The idea is in Ganesh et al., "On design principles for private adaptive optimizers"
(2025), for diagonal scaling; here with curvature from probes. With ``side="a"``, the
default, the outputs' side of ``F`` stays as it is.
"""

from curvedp.recipes.base import Recipe
from curvedp.recipes.curvature import Curvature
from curvedp.recipes.search import WHITENING, Choice, Range

__all__ = ["RECIPE"]

RECIPE = Recipe(
    name="dp-stp",
    summary="scale by curvature, clip, add noise, scale back",
    optimiser="sgd",
    learning_rate=0.1,
    momentum=0.9,
    clipping="normalised",
    clip_norm=1.0,
    curvature=Curvature(exponent=0.25, back_map="inverse"),
    search={
        "learning_rate": Range(0.02, 4.0, log=True),
        "momentum": Choice((0.0, 0.9)),
        **{k: v for k, v in WHITENING.items() if k != "back_map"},
        "exponent": Choice((0.125, 0.25, 0.375)),
    },
)
