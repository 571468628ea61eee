"""``curvedp recipes``: what there is to choose from."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from curvedp.cli.output import print_json, reports_errors, results, rows_of
from curvedp.cli.parameters import JsonFlag
from curvedp.experiments import NOT_PRIVATE
from curvedp.models import names as model_names
from curvedp.models import options as model_options
from curvedp.recipes import (
    FEDERATED_RECIPES,
    RECIPES,
    Curvature,
    Recipe,
    get_recipe,
)

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: curvedp recipes dp-sgd")(recipes)


@reports_errors
def recipes(
    name: Annotated[
        str | None, typer.Argument(help="One recipe, with all its settings.")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """List the recipes and the built-in models, with their settings."""
    if name is not None:
        recipe = FEDERATED_RECIPES.get(name) or get_recipe(name)
        if json_output:
            print_json(_document(recipe))
        else:
            pairs = [(k, _shown(v)) for k, v in _document(recipe).items()]
            results.print(rows_of(pairs, loud=("label",)))
        return
    if json_output:
        models = {n: model_options(n) for n in model_names()}
        print_json(
            {
                "recipes": [_document(r) for r in RECIPES.values()],
                "federated_recipes": [_document(r) for r in FEDERATED_RECIPES.values()],
                "models": models,
            }
        )
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("recipe", "what it does", "defaults"):
        table.add_column(column)
    for recipe in RECIPES.values():
        table.add_row(recipe.name, recipe.summary, _defaults(recipe))
    table.add_row("\n[bold]for a federation[/]")
    for recipe in FEDERATED_RECIPES.values():
        table.add_row(recipe.name, recipe.summary, _defaults(recipe))
    results.print(table)
    results.print("\nmodels", style="bold")
    results.print(
        rows_of(
            [
                (n, ", ".join(f"{k}={v}" for k, v in model_options(n).items()))
                for n in model_names()
            ]
        )
    )


def _document(recipe: Recipe) -> dict[str, object]:
    document: dict[str, object] = {
        **recipe.facts(),
        "summary": recipe.summary,
        "private": recipe.private,
        "search": {k: where.text() for k, where in recipe.search_space().items()},
    }
    if recipe.modes:
        document["modes"] = {name: dict(own) for name, own in recipe.modes.items()}
    return document if recipe.private else {**document, "label": NOT_PRIVATE}


def _defaults(recipe: Recipe) -> str:
    parts = [f"lr {recipe.learning_rate:g}", f"momentum {recipe.momentum:g}"]
    if recipe.weight_decay:
        parts.append(f"decay {recipe.weight_decay:g}")
    if recipe.private:
        parts.append(f"{recipe.clipping} clipping, C {recipe.clip_norm:g}")
    if recipe.correlation is not None:
        parts.append(f"{recipe.correlation.strategy}, {recipe.correlation.bands} bands")
    if recipe.curvature is not None:
        parts.append(_whitening(recipe.curvature))
    return ", ".join(parts)


def _whitening(curvature: Curvature) -> str:
    how = f"side {curvature.side}, rank {curvature.rank}, damping {curvature.damping:g}"
    if curvature.moments != "kronecker":
        how = curvature.moments
    elif curvature.clamp != "off":
        how = f"clamp {curvature.clamp}"
    return (
        f"probe {curvature.probe}, {how}, back-map {curvature.back_map}, refresh "
        f"{curvature.refresh}"
    )


def _shown(value: object) -> str:
    if isinstance(value, dict):  # modes with what each of them sets; the search
        return "\n".join(
            f"{name}={own}" if isinstance(own, str) else
            f"{name}: " + ", ".join(f"{k}={v}" for k, v in own.items())
            for name, own in value.items()
        )  # fmt: skip
    return repr(value) if value == "" else str(value)
