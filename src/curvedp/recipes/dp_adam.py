"""DP-Adam: Adam on the noisy mean of clipped gradients.

Adam's moments are functions of releases, so they cost nothing. Its second moment sees
the noise as well as the signal, which makes all step sizes alike at small epsilon.
"""

from curvedp.recipes.base import Recipe
from curvedp.recipes.search import ADAPTIVE

__all__ = ["RECIPE"]

RECIPE = Recipe(
    name="dp-adam",
    summary="Adam on the noisy mean of clipped gradients",
    optimiser="adam",
    learning_rate=1e-2,
    momentum=0.9,
    search=ADAPTIVE,
)
