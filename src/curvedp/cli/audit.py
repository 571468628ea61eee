"""``curvedp audit``: attack a run, and compare the bound with the claim."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from curvedp.auditing import AuditResult
from curvedp.auditing import audit as attack
from curvedp.cli.options import parse_pairs, takes_run_settings
from curvedp.cli.output import print_json, reports_errors, results, rows_of, tell
from curvedp.cli.parameters import JsonFlag
from curvedp.cli.sweep import with_recipe
from curvedp.errors import ConfigurationError
from curvedp.experiments import RunConfig, build_run

__all__ = ["register"]

_ATTACK = "Attack"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog="Example: curvedp audit --data digits --epsilon 3 --epochs 5. "
        "Exit code: 0 the claim stands, 1 it is broken, 2 error."
    )(audit)


def _option(text: str, *names: str, shown: str | bool = True) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=_ATTACK, show_default=shown)


@reports_errors
@takes_run_settings
def audit(
    settings: dict[str, Any],
    recipe: Annotated[
        str | None, typer.Option(help="See `curvedp recipes`.", show_default="dp-sgd")
    ] = None,
    recipe_setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="SETTING=VALUE of the recipe; repeatable."),
    ] = None,
    method: Annotated[
        str, _option("one-run, runs or parallel; see docs/audit.md.")
    ] = "one-run",
    score: Annotated[
        str, _option("white-box (sees every release) or black-box (final losses).")
    ] = "white-box",
    canaries: Annotated[
        int | None, _option("Canaries of a run.", shown="200, with --method runs 1")
    ] = None,
    runs: Annotated[
        int | None, _option("Training runs.", shown="1, with --method runs 200")
    ] = None,
    confidence: Annotated[float, _option("Of the bound.")] = 0.95,
    plot: Annotated[
        Path | None, _option("Draw claim and bound into this file (PNG, PDF, SVG).")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Attack a run: a lower bound on epsilon, beside the one that is claimed.

    The run is made on the data with canaries in it, and thrown away. The result is
    about the code and the settings; it is computed from private data and not itself
    protected.
    """
    if plot is not None and plot.suffix not in ("", ".png", ".pdf", ".svg"):
        raise ConfigurationError(
            f"{plot} is no picture", "its name ends in .png, .pdf or .svg"
        )
    own = parse_pairs(recipe_setting or [], "--set")
    config = RunConfig.from_mapping(with_recipe(settings, recipe, own)).settled()
    built = build_run(config)
    config = built.config
    options = {
        "physical_batch_size": config.physical_batch_size,
        "probes": built.probe,
        "augment": config.augment or None,
        "views": config.views,
        "cuda_graph": config.cuda_graph,
    }
    result = attack(
        built.model,
        built.loss,
        built.train,
        config.configured_recipe(),
        method=method,
        score=score,
        canaries=canaries,
        runs=runs,
        confidence=confidence,
        seed=config.seed or 0,
        unsafe_reproducible_noise=config.unsafe_reproducible_noise,
        on_run=_report if method != "one-run" else None,
        options=options,
        **{k: v for k, v in config.privacy.items() if v is not None},
    )
    if plot is not None:
        tell(f"plot: {result.plot(plot)}", style="dim")
    if json_output:
        print_json(result.to_json())
    else:
        _print(result)
    if not result.holds:
        raise typer.Exit(1)


def _report(made: int, runs: int) -> None:
    if made % max(1, runs // 10) == 0 or made == runs:
        tell(f"run {made}/{runs}", style="dim")


def _print(result: AuditResult) -> None:
    loud = () if result.holds else ("verdict",)
    results.print(rows_of(result.lines(), loud=loud))
