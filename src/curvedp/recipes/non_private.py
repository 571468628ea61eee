"""Non-private: the same model, batches and optimiser without clipping or noise.

A reference that says what privacy costs. It has no guarantee, is labelled so wherever
it appears, and refuses to print an epsilon.
"""

from curvedp.recipes.base import Recipe
from curvedp.recipes.search import Choice, Range

__all__ = ["RECIPE"]

RECIPE = Recipe(
    name="non-private",
    summary="NOT PRIVATE: plain SGD, the reference without a guarantee",
    private=False,
    optimiser="sgd",
    learning_rate=0.1,
    momentum=0.9,
    search={
        "learning_rate": Range(0.005, 1.0, log=True),
        "momentum": Choice((0.0, 0.9)),
    },
)
