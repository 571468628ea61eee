"""One method, one page. A new method is a file here and a line in ``_PAGES``."""

from curvedp.errors import ConfigurationError
from curvedp.plan import Correlation
from curvedp.recipes import (
    adadps,
    disk,
    dp_adam,
    dp_adambc,
    dp_adamw,
    dp_bandmf,
    dp_bandmf_adam,
    dp_fedgd,
    dp_fedkfc,
    dp_fednew,
    dp_fedopt,
    dp_fedsofim,
    dp_kfc,
    dp_kfc_adambc,
    dp_kfc_disk,
    dp_kfc_noisecurve,
    dp_ngd,
    dp_sgd,
    dp_sgd_pt,
    dp_soap,
    dp_stp,
    gep,
    noisecurve,
    non_private,
)
from curvedp.recipes.base import Recipe
from curvedp.recipes.curvature import BACK_MAPS, Curvature
from curvedp.recipes.eigenvalues import Eigenvalues
from curvedp.recipes.pretraining import Pretraining
from curvedp.recipes.search import Choice, Range, SearchSpace

__all__ = [
    "BACK_MAPS",
    "FEDERATED_RECIPES",
    "RECIPES",
    "Choice",
    "Correlation",
    "Curvature",
    "Eigenvalues",
    "Pretraining",
    "Range",
    "Recipe",
    "SearchSpace",
    "get_federated_recipe",
    "get_recipe",
]

_PAGES = (
    dp_sgd,
    dp_adam,
    dp_adamw,
    dp_adambc,
    disk,
    dp_kfc,
    dp_kfc_adambc,
    dp_kfc_disk,
    dp_stp,
    dp_ngd,
    adadps,
    gep,
    dp_bandmf,
    dp_bandmf_adam,
    noisecurve,
    dp_kfc_noisecurve,
    dp_soap,
    dp_sgd_pt,
    non_private,
)

#: Every recipe for data in one place by its name.
RECIPES: dict[str, Recipe] = {page.RECIPE.name: page.RECIPE for page in _PAGES}

#: Every recipe for a federation by its name.
FEDERATED_RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        dp_fedgd.RECIPE,
        dp_fedgd.WITH_MOMENTUM,
        dp_fedsofim.RECIPE,
        dp_fedopt.RECIPE,
        dp_fedopt.YOGI,
        dp_fedopt.ADAMBC,
        dp_fedkfc.RECIPE,
        dp_fednew.RECIPE,
    )
}


def get_federated_recipe(recipe: Recipe | str) -> Recipe:
    """A recipe for a federation by its name; a recipe passes through."""
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in FEDERATED_RECIPES:
        raise ConfigurationError(
            f"unknown federated recipe {recipe!r}",
            f"choose one of: {', '.join(FEDERATED_RECIPES)}",
        )
    return FEDERATED_RECIPES[recipe]


def get_recipe(recipe: Recipe | str) -> Recipe:
    """A recipe by its name; a recipe passes through."""
    if isinstance(recipe, Recipe):
        return recipe
    if recipe in FEDERATED_RECIPES:
        raise ConfigurationError(
            f"{recipe!r} is a recipe for a federation of clients",
            "run it with `curvedp federated simulate`, or choose one of: "
            f"{', '.join(RECIPES)}",
        )
    if recipe not in RECIPES:
        raise ConfigurationError(
            f"unknown recipe {recipe!r}", f"choose one of: {', '.join(RECIPES)}"
        )
    return RECIPES[recipe]
