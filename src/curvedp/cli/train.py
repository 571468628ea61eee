"""``curvedp train`` and ``curvedp resume``."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from curvedp.cli.compare import resume_and_show
from curvedp.cli.options import parse_pairs, takes_run_settings
from curvedp.cli.output import (
    print_json,
    print_statement,
    reports_errors,
    results,
    rows_of,
    tell,
    training_bar,
)
from curvedp.cli.parameters import (
    DeviceOption,
    DryRunFlag,
    JsonFlag,
    RepeatedModel,
    RunDirArgument,
    RunDirOption,
)
from curvedp.cli.plans import print_preview, print_step_plan
from curvedp.cli.sweep import resume_and_show_sweep, with_recipe
from curvedp.errors import ConfigurationError, StorageError
from curvedp.experiments import (
    NOT_PRIVATE,
    RunConfig,
    RunResult,
    StopRequest,
    build_run,
    default_run_dir,
    explain_run,
    is_comparison,
    is_sweep,
    preview_run,
    resume_run,
    train_run,
)
from curvedp.experiments.runs import NO_HELD_OUT
from curvedp.train import Progress, stop_on_signals

__all__ = ["register"]

_METHOD = "Method"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(epilog="Example: curvedp train --data digits --epsilon 3 --epochs 30")(
        train
    )
    app.command(epilog="Example: curvedp resume runs/digits-dp-sgd-20260101-120000")(
        resume
    )


def _method(text: str, shown: str) -> Any:
    return typer.Option(help=text, rich_help_panel=_METHOD, show_default=shown)


_RECIPES = "by the recipe"


@reports_errors
@takes_run_settings
def train(
    settings: dict[str, Any],
    recipe: Annotated[str | None, _method("See `curvedp recipes`.", "dp-sgd")] = None,
    learning_rate: Annotated[float | None, _method("", _RECIPES)] = None,
    momentum: Annotated[float | None, _method("", _RECIPES)] = None,
    weight_decay: Annotated[float | None, _method("", _RECIPES)] = None,
    clip_norm: Annotated[
        float | None, _method("Bound on an example's gradient.", _RECIPES)
    ] = None,
    clipping: Annotated[
        str | None, _method("flat, normalised or per-layer.", _RECIPES)
    ] = None,
    mode: Annotated[
        str | None,
        _method("A set of the recipe's settings, e.g. paper.", "default"),
    ] = None,
    recipe_setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="SETTING=VALUE of the recipe, e.g. damping=0.1; repeatable. "
            "See `curvedp recipes NAME`.",
            rich_help_panel=_METHOD,
        ),
    ] = None,
    run_dir: RunDirOption = None,
    dry_run: DryRunFlag = False,
    explain_plan: Annotated[
        bool,
        typer.Option(
            "--explain-plan",
            help="Show how each layer is served and what it costs; train nothing.",
        ),
    ] = False,
    json_output: JsonFlag = False,
) -> None:
    """Train a private model, and say what the guarantee is.

    Sampling is declared by --batch-size and --epochs, or by --sample-rate, --steps
    and --expected-batch-size. Ctrl-C leaves a checkpoint.
    """
    own = {
        "learning_rate": learning_rate,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "clip_norm": clip_norm,
        "clipping": clipping,
        "mode": mode,
    }
    own = _joined(own, parse_pairs(recipe_setting or [], "--set"))
    config = RunConfig.from_mapping(with_recipe(settings, recipe, own))
    if explain_plan:
        plan = explain_run(build_run(config))
        if json_output:
            print_json(plan.to_json())
        else:
            print_step_plan(plan)
        return
    if dry_run:
        preview = preview_run(build_run(config))
        if json_output:
            print_json(preview.to_json())
        else:
            print_preview(preview)
        return
    config = config.settled()
    folder = run_dir or default_run_dir(config.data, config.recipe)

    def start(report: Callable[[Progress], None], stop: StopRequest) -> RunResult:
        return train_run(config, folder, on_progress=report, stop=stop)

    _run_and_show(start, config.recipe, folder, json_output)


@reports_errors
def resume(
    run_dir: RunDirArgument,
    model: RepeatedModel = None,
    device: DeviceOption = None,
    json_output: JsonFlag = False,
) -> None:
    """Go on with a run, a comparison or a sweep that was stopped.

    Steps that were released already are not paid for again. A sweep may have several
    workers: each `curvedp resume` of its folder is one.
    """
    if is_comparison(run_dir):
        resume_and_show(run_dir, device, model, json_output)
        return
    if is_sweep(run_dir):
        resume_and_show_sweep(run_dir, device, model, json_output)
        return

    def start(report: Callable[[Progress], None], stop: StopRequest) -> RunResult:
        return resume_run(
            run_dir, device=device, model=model, on_progress=report, stop=stop
        )

    _run_and_show(start, "resumed", run_dir, json_output)


def _joined(own: dict[str, Any], pairs: dict[str, Any]) -> dict[str, Any]:
    """Options and ``--set`` as one table; what is said twice is refused."""
    twice = sorted(k for k in pairs if own.get(k) is not None)
    if twice:
        option = twice[0].replace("_", "-")
        raise ConfigurationError(
            f"{twice[0]} is given by --{option} and by --set", "give it once"
        )
    return own | pairs


def _run_and_show(
    start: Callable[[Callable[[Progress], None], StopRequest], RunResult],
    description: str,
    folder: Path,
    json_output: bool,
) -> None:
    stop = StopRequest()
    try:
        with (
            stop_on_signals(stop) as received,
            training_bar(description, f"run folder: {folder}") as report,
        ):
            result = start(report, stop)
    except (StorageError, KeyboardInterrupt):
        if (folder / "ledger.jsonl").exists():
            tell(f"what was paid for is kept; go on with: curvedp resume {folder}")
        raise
    number = received()
    if json_output:
        print_json(result.to_json())
    else:
        _print_result(result)
    if number and not result.finished:
        name = signal.Signals(number).name
        tell(
            f"stopped by {name} after step {result.steps} of {result.planned_steps}; "
            f"go on with: curvedp resume {folder}",
            style="bold",
        )
        raise typer.Exit(128 + number)


def _print_result(result: RunResult) -> None:
    if not result.finished:
        return
    pairs = [("recipe", result.config.recipe)]
    if not result.private:
        pairs.append(("guarantee", NOT_PRIVATE))
    for name, value in result.metrics.items():
        shown = f"{value:.4f}" if name == "loss" else f"{100 * value:.2f} %"
        pairs.append((name, f"{shown} on the {result.split} split"))
    if not result.metrics:
        pairs.append(("metrics", f"none: {NO_HELD_OUT}"))
    took = "" if result.seconds is None else f" in {result.seconds:.1f} s"
    pairs.append(("steps", f"{result.steps}{took}"))
    pairs.append(("run folder", str(result.run_dir)))
    results.print(rows_of(pairs, loud=("guarantee",)))
    if result.statement is not None:
        results.print()
        print_statement(result.statement)
    elif result.facts is not None:
        tell("this run was finished before; its statement:", style="dim")
        _print_stored_facts(result)


def _print_stored_facts(result: RunResult) -> None:
    facts = result.facts or {}
    pairs = [
        ("guarantee", _stored_guarantee(result, facts)),
        ("relation", str(facts["relation"])),
        *(("note", note) for note in facts.get("notes", [])),
    ]
    results.print(rows_of(pairs, loud=("note",)))


def _stored_guarantee(result: RunResult, facts: dict[str, Any]) -> str:
    if result.config.configured_recipe().oracle:
        return "none: curvature was taken from the private data"
    if result.config.unsafe_reproducible_noise is not None:
        return "none: the noise was made reproducible"
    if not result.private:
        return f"none (epsilon is infinite at delta {facts['delta']:g})"
    return f"({facts['epsilon']:.4g}, {facts['delta']:g})-DP"
