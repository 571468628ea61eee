"""DP-KFC + DP-AdamBC: whitening before the noise, bias correction after it.

The whitened noisy mean has noise of variance ``(s C / B)^2`` in every coordinate; a
back-map changes that coordinate by coordinate, and AdamBC is told so
(:func:`curvedp.update.read_out`).

The combination of the DP-KFC paper's section 6.3; see :mod:`curvedp.recipes.dp_kfc` and
:mod:`curvedp.recipes.dp_adambc`.
"""

from curvedp.recipes.base import Recipe
from curvedp.recipes.curvature import Curvature
from curvedp.recipes.search import BIAS_CORRECTED, WHITENING
from curvedp.update import AdamBC, Chain

__all__ = ["RECIPE"]

RECIPE = Recipe(
    name="dp-kfc+adambc",
    summary="whiten with curvature from synthetic probes, then as dp-adambc",
    optimiser="sgd",
    learning_rate=3e-4,
    clipping="normalised",
    clip_norm=1.0,
    curvature=Curvature(),
    chain=Chain((AdamBC(),)),
    search={**BIAS_CORRECTED, **WHITENING},
)
