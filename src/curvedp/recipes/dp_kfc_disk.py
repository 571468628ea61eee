"""DP-KFC + DiSK: whitening before the noise, a Kalman filter after it.

The filter acts on what leaves the back-map; the whitener is that of the parameters, not
of the point ahead. See :mod:`curvedp.recipes.dp_kfc` and :mod:`curvedp.recipes.disk`.
"""

from curvedp.recipes.base import Recipe
from curvedp.recipes.curvature import Curvature
from curvedp.recipes.search import FILTERED, WHITENING
from curvedp.update import Chain, KalmanFilter

__all__ = ["RECIPE"]

RECIPE = Recipe(
    name="dp-kfc+disk",
    summary="whiten with curvature from synthetic probes, then as disk",
    optimiser="sgd",
    learning_rate=0.5,
    clipping="normalised",
    clip_norm=1.0,
    curvature=Curvature(),
    chain=Chain((KalmanFilter(),)),
    search={**FILTERED, **WHITENING},
)
