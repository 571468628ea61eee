"""``curvedp compare``: recipes side by side."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from curvedp.cli.options import parse_pairs, takes_run_settings
from curvedp.cli.output import bars, log, print_json, reports_errors, results, tell
from curvedp.cli.parameters import DryRunFlag, JsonFlag, RunDirOption
from curvedp.cli.plans import print_preview
from curvedp.errors import ConfigurationError, missing_extra
from curvedp.experiments import (
    CompareConfig,
    Comparison,
    RunConfig,
    StopRequest,
    build_run,
    compare,
    default_run_dir,
    plot_comparison,
    preview_run,
    resume_comparison,
)
from curvedp.train import Progress, stop_on_signals

__all__ = [
    "comparison_table",
    "register",
    "remarks",
    "resume_and_show",
    "watch_comparison",
]

_EXAMPLE = (
    "Example: curvedp compare --data digits --recipes dp-sgd,dp-adam,non-private "
    "--epsilon 3 --seeds 3 --set dp-sgd.learning_rate=1.0"
)
Reporter = Callable[[str, int, Progress], None]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("compare", epilog=_EXAMPLE)(compare_command)


@reports_errors
@takes_run_settings
def compare_command(
    settings: dict[str, Any],
    recipes: Annotated[
        str | None,
        typer.Option(help="Names, with commas.", show_default="dp-sgd,non-private"),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Runs of each recipe.", show_default="3")
    ] = None,
    recipe_setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="RECIPE.SETTING=VALUE, e.g. dp-sgd.clip_norm=0.5; repeatable."
        ),
    ] = None,
    run_dir: RunDirOption = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="PNG, PDF or SVG.", show_default="plot.png in the folder"),
    ] = None,
    dry_run: DryRunFlag = False,
    json_output: JsonFlag = False,
) -> None:
    """Train several recipes with several seeds and compare them.

    The metric is computed on the test split. Each row's epsilon is that of one run;
    all runs together spend more, and the table says how much.
    """
    config = _compare_config(settings, recipes, seeds, recipe_setting or [])
    if plot is not None:
        _check_plot(plot)
    if dry_run:
        _print_plans(config, json_output)
        return
    folder = run_dir or default_run_dir(config.base.data, "compare")

    def start(report: Reporter, stop: StopRequest) -> Comparison | None:
        return compare(config, folder, on_progress=report, stop=stop)

    _run_and_show(start, config.seeds, folder, plot, json_output)


def resume_and_show(
    folder: Path, device: str | None, model: str | None, json_output: bool
) -> None:
    """Go on with a comparison, for ``curvedp resume``."""

    def start(report: Reporter, stop: StopRequest) -> Comparison | None:
        return resume_comparison(
            folder, device=device, model=model, on_progress=report, stop=stop
        )

    _run_and_show(start, None, folder, None, json_output)


def watch_comparison(
    start: Callable[[Reporter, StopRequest], Comparison | None],
    seeds: int | None,
    opening: str = "",
) -> tuple[Comparison | None, int]:
    """Run a comparison under progress bars; also gives the signal that stopped it."""
    stop = StopRequest()
    with stop_on_signals(stop) as received, bars() as shown:
        tasks: dict[tuple[str, int], Any] = {}

        def report(recipe: str, index: int, progress: Progress) -> None:
            of = "" if seeds is None else f"/{seeds}"
            name = f"{recipe} {index + 1}{of}"
            if not tasks and opening:
                tell(opening, style="dim")
            if (recipe, index) not in tasks:
                tasks[recipe, index] = shown.add_task(name, total=None, remark="")
                if not log.is_terminal:
                    tell(f"training {name}")
            shown.update(
                tasks[recipe, index], completed=progress.step, total=progress.steps
            )

        comparison = start(report, stop)
    return comparison, received()


def _run_and_show(
    start: Callable[[Reporter, StopRequest], Comparison | None],
    seeds: int | None,
    folder: Path,
    plot: Path | None,
    json_output: bool,
) -> None:
    comparison, number = watch_comparison(start, seeds, f"folder: {folder}")
    if comparison is None:
        tell(
            f"stopped by {signal.Signals(number).name}; go on with: "
            f"curvedp resume {folder}",
            style="bold",
        )
        raise typer.Exit(128 + number)
    drawn = _draw(comparison, plot)
    if json_output:
        print_json(comparison.rows)
        return
    results.print(comparison_table(comparison))
    for line in remarks(comparison):
        results.print(escape(line))
    results.print(f"results: {escape(str(folder))}", soft_wrap=True)
    if drawn is not None:
        results.print(f"plot: {escape(str(drawn))}", soft_wrap=True)


def _draw(comparison: Comparison, plot: Path | None) -> Path | None:
    if plot is None and importlib.util.find_spec("matplotlib") is None:
        tell("no plot: pip install 'curvedp[plots]'", style="dim")
        return None
    first = next(iter(comparison.runs.values()))[0]
    name = Path(first.config.data).name
    return plot_comparison(
        comparison, plot or comparison.folder / "plot.png", data=name
    )


def comparison_table(comparison: Comparison) -> Table:
    """The rows as a table that fits 80 columns."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("recipe")
    table.add_column(f"{comparison.metric}, {comparison.split}", justify="right")
    for name in ("epsilon", "delta", "sigma", "steps", "seconds"):
        table.add_column(name, justify="right")
    for row in comparison.rows:
        has_epsilon = row["epsilon"] is not None
        table.add_row(
            row["recipe"],
            _score(row),
            f"{row['epsilon']:.3g}" if has_epsilon else f"[bold red]{row['label']}[/]",
            f"{row['delta']:g}" if has_epsilon else "",
            f"{row['sigma']:.3f}" if has_epsilon else "",
            str(row["steps"]),
            "" if row["seconds"] is None else f"{row['seconds']:.1f}",
        )
    return table


def _score(row: dict[str, Any]) -> str:
    metric = row["metric"]
    mean, spread = row[f"{metric}_mean"], row[f"{metric}_std"]
    if metric == "loss":
        return f"{mean:.4f} ± {spread:.4f}"
    return f"{100 * mean:.2f} ± {100 * spread:.2f} %"


def remarks(comparison: Comparison) -> list[str]:
    """What has to be said beside the table."""
    rows = [row for row in comparison.rows if row["epsilon"] is not None]
    seeds = comparison.rows[0]["seeds"]
    lines = [f"mean ± standard deviation of {seeds} runs of each recipe"]
    if rows:
        lines.append(
            f"relation {rows[0]['relation']}; all private runs together: epsilon "
            f"{rows[0]['epsilon_of_all_runs']:.3g}"
        )
    oracles = [row["recipe"] for row in comparison.rows if row.get("oracle")]
    if oracles:
        lines.append(
            f"NOT PRIVATE: {', '.join(oracles)} took curvature from the private data"
        )
    if any(not row["private"] for row in rows):
        lines.append("NO GUARANTEE: the noise was made reproducible")
    return lines


def _print_plans(config: CompareConfig, json_output: bool) -> None:
    previews = [preview_run(build_run(config.run_config(r))) for r in config.recipes]
    if json_output:
        print_json([{**p.to_json(), "seeds": config.seeds} for p in previews])
        return
    for preview in previews:
        print_preview(preview)
        results.print()
    total = config.seeds * sum(p.seconds for p in previews)
    results.print(f"{config.seeds} runs of each: about {max(total, 1):.0f} s in all")


def _compare_config(
    settings: dict[str, Any],
    recipes: str | None,
    seeds: int | None,
    pairs: list[str],
) -> CompareConfig:
    table = dict(settings)
    stored = table.pop("compare", {})
    by_recipe = {k: dict(v) for k, v in dict(table.pop("recipes", {})).items()}
    unknown = sorted(set(stored) - {"recipes", "seeds"})
    if unknown:
        raise ConfigurationError(
            f"[compare] has the unknown key {unknown[0]!r}", "known: recipes, seeds"
        )
    table.pop("recipe", None)
    names = (
        stored.get("recipes", ["dp-sgd", "non-private"])
        if recipes is None
        else [name.strip() for name in recipes.split(",") if name.strip()]
    )
    for key, value in parse_pairs(pairs, "--set").items():
        recipe, _, setting = key.rpartition(".")
        if not recipe:
            raise ConfigurationError(f"--set {key}", "write RECIPE.SETTING=VALUE")
        by_recipe.setdefault(recipe, {})[setting] = value
    return CompareConfig(
        base=RunConfig.from_mapping(table),
        recipes=tuple(names),
        seeds=stored.get("seeds", 3) if seeds is None else seeds,
        settings={k: v for k, v in by_recipe.items() if k in names or recipes is None},
    )


def _check_plot(plot: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise missing_extra("matplotlib", "plots")
    if plot.suffix not in (".png", ".pdf", ".svg"):
        raise ConfigurationError(f"{plot} is not a picture", "use .png, .pdf or .svg")
