"""DiSK: a simplified Kalman filter over releases, gradients taken a step ahead.

``m <- (1 - kappa) m + kappa g``, ``theta <- theta - lr m``, where g is the release of
gradients at ``theta + gamma (theta - theta_before)``; see
:class:`curvedp.update.KalmanFilter`. With ``gamma = (1 - kappa) / kappa``, the default,
one gradient is enough. Noise and sensitivity are those of DP-SGD.

Zhang et al., ICLR 2025.
"""

from curvedp.recipes.base import Recipe
from curvedp.recipes.search import CLIPPING, FILTERED
from curvedp.update import Chain, KalmanFilter

__all__ = ["RECIPE"]

RECIPE = Recipe(
    name="disk",
    summary="Kalman filter over releases, gradients taken a step ahead",
    optimiser="sgd",
    learning_rate=0.5,
    chain=Chain((KalmanFilter(),)),
    search={**FILTERED, **CLIPPING},
)
