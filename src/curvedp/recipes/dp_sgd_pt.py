"""DP-SGD-PT: pretrain on a public dataset, then DP-SGD.

The baseline that methods with public data are to be held against: whoever has public
data can start from parameters that were trained on it, with its labels or without
(``pretrain_labels``), and spend the budget on what is left to learn. The parameters
before the first private step are a function of public data and public seeds alone, so
the guarantee is that of ``dp-sgd``.
"""

from curvedp.recipes.base import Recipe
from curvedp.recipes.pretraining import Pretraining

__all__ = ["RECIPE"]

RECIPE = Recipe(
    name="dp-sgd-pt",
    summary="pretrain on public data, then as dp-sgd",
    optimiser="sgd",
    learning_rate=0.1,
    momentum=0.9,
    pretraining=Pretraining(),
)
