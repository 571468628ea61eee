"""DP-BandMF with Adam: correlated noise, and a step size for every coordinate.

Noise, groups and cost are those of :mod:`curvedp.recipes.dp_bandmf`. The design is for
sums of plain steps; Adam's own steps are near to those while its second moment, which
sees more noise than signal, changes slowly.
"""

from curvedp.plan import Correlation
from curvedp.recipes.base import Recipe
from curvedp.recipes.search import ADAPTIVE, Choice

__all__ = ["RECIPE"]

RECIPE = Recipe(
    name="dp-bandmf+adam",
    summary="noise that later steps take back, Adam",
    optimiser="adam",
    learning_rate=1e-2,
    momentum=0.9,
    correlation=Correlation(),
    search={**ADAPTIVE, "bands": Choice((1, 4, 8, 16))},
)
