"""DP-SGD: clip each example's gradient, add Gaussian noise, step.

``theta <- theta - lr / B (sum_i clip_C(g_i) + N(0, (s C)^2 I))``

Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, with Poisson sampling
and the declared expected batch size B as the divisor.
"""

from curvedp.recipes.base import Recipe
from curvedp.recipes.search import PLAIN

__all__ = ["RECIPE"]

RECIPE = Recipe(
    name="dp-sgd",
    summary="clip each example's gradient, add Gaussian noise, SGD",
    optimiser="sgd",
    learning_rate=0.1,
    momentum=0.9,
    search=PLAIN,
)
