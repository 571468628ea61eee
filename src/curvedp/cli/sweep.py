"""``curvedp sweep``: search a recipe's settings."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from curvedp.accounting import Repeats
from curvedp.cli.options import parse_pairs, read_value, takes_run_settings
from curvedp.cli.output import (
    bars,
    log,
    print_json,
    reports_errors,
    results,
    rows_of,
    tell,
)
from curvedp.cli.parameters import JsonFlag
from curvedp.errors import ConfigurationError
from curvedp.experiments import (
    RunConfig,
    StopRequest,
    SweepConfig,
    SweepResult,
    default_run_dir,
    is_sweep,
    open_sweep,
    resume_sweep,
)
from curvedp.experiments.sweeps.config import SAMPLERS, parse_search
from curvedp.experiments.sweeps.results import TrialRow, train_command
from curvedp.experiments.sweeps.study import Trial
from curvedp.experiments.sweeps.work import OpenSweep
from curvedp.train import Progress, stop_on_signals

__all__ = ["register", "resume_and_show_sweep", "with_recipe"]

_EXAMPLE = (
    "Example: curvedp sweep --data digits --epsilon 3 --validation 0.2 "
    "--recipe dp-kfc --trials 20 --search learning_rate=log:0.01:1"
)
_SEARCH, _COUNT = "Search", "Counting the tuning"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("sweep", epilog=_EXAMPLE)(sweep_command)


def _option(panel: str, text: str, *names: str, shown: str | bool = True) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=shown)


@reports_errors
@takes_run_settings
def sweep_command(
    settings: dict[str, Any],
    recipe: Annotated[
        str | None, _option(_SEARCH, "See `curvedp recipes`.", shown="dp-sgd")
    ] = None,
    trials: Annotated[
        int | None,
        _option(
            _SEARCH,
            "Number of trials; expected number if counted.",
            shown="20; 10 if counted",
        ),
    ] = None,
    search: Annotated[
        list[str] | None,
        _option(
            _SEARCH,
            "SETTING=log:LOW:HIGH, SETTING=linear:LOW:HIGH or SETTING=A,B beside or "
            "in place of what the recipe declares; repeatable.",
        ),
    ] = None,
    recipe_setting: Annotated[
        list[str] | None,
        _option(_SEARCH, "SETTING=VALUE that is fixed; repeatable.", "--set"),
    ] = None,
    sampler: Annotated[
        str | None,
        _option(_SEARCH, f"{' or '.join(SAMPLERS)}.", shown="tpe; random if counted"),
    ] = None,
    run_dir: Annotated[
        Path | None,
        _option(
            _SEARCH,
            "Folder of the sweep; that of the same sweep is gone on with.",
            shown="runs/<data>-sweep-<time>",
        ),
    ] = None,
    storage: Annotated[
        str | None,
        _option(
            _SEARCH,
            "URL of a storage that several machines share.",
            shown="SQLite in the folder",
        ),
    ] = None,
    study: Annotated[
        str | None,
        _option(_SEARCH, "Name of the study there.", shown="<data>-<recipe>"),
    ] = None,
    count_tuning: Annotated[
        bool,
        _option(
            _COUNT,
            "Epsilon is that of the whole sweep (repeat and select, RDP).",
            "--count-tuning",
            shown=False,
        ),
    ] = False,
    repeats: Annotated[
        str | None,
        _option(
            _COUNT,
            f"Law of the number of trials: {', '.join(Repeats.names)}.",
            shown="poisson",
        ),
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Try settings of a recipe, and say which were the best.

    Trials are judged by validation: data that is declared public (--validation-data), a
    share of the training data that is (--validation and --validation-is-public), or a
    private share, whose scores then get noise and are paid for. The test part is never
    opened. Run the same command again, or `curvedp resume`, for a further worker.
    """
    fixed = parse_pairs(recipe_setting or [], "--set")
    base = RunConfig.from_mapping(with_recipe(settings, recipe, fixed))
    if repeats is not None and not count_tuning:
        raise ConfigurationError(
            "--repeats is given, and tuning is not counted", "add --count-tuning"
        )
    config = SweepConfig.make(
        base,
        parse_search(search or [], read_value),
        trials=(10 if count_tuning else 20) if trials is None else trials,
        sampler=sampler,
        law=(repeats or "poisson") if count_tuning else None,
    )
    folder = run_dir or default_run_dir(base.data, "sweep")
    known = is_sweep(folder)
    opened = open_sweep(
        config,
        folder,
        storage=storage or "",
        study=study or "",
        seed_is_given=base.seed is not None,
    )
    tell(f"{'helping with' if known else 'folder:'} {folder}", style="dim")
    test = base.data_options.get("test")
    _work_and_show(opened, json_output, None if test is None else str(test))


def resume_and_show_sweep(
    folder: Path, device: str | None, model: str | None, json_output: bool
) -> None:
    """Go on with a sweep or help with it, for ``curvedp resume``."""
    opened = resume_sweep(folder, device=device, model=model)
    _work_and_show(opened, json_output, None)


def with_recipe(
    settings: dict[str, Any], recipe: str | None, own: dict[str, Any]
) -> dict[str, Any]:
    """With the recipe from options, the file's [recipe] and its [recipes.NAME]."""
    table = dict(settings)
    table.pop("compare", None)
    by_recipe = table.pop("recipes", {})
    stored = table.get("recipe", "dp-sgd")
    if not isinstance(stored, str | Mapping):
        raise ConfigurationError(f"recipe is {stored!r}", "give a name or a table")
    stored = {"name": stored} if isinstance(stored, str) else dict(stored)
    name = recipe or stored.get("name", "dp-sgd")
    if not isinstance(name, str):
        raise ConfigurationError(f"the recipe's name is {name!r}", "give it as text")
    if name != stored.get("name", name):
        stored = {}  # the file's settings are those of another recipe
    chosen = {k: v for k, v in own.items() if v is not None}
    shared = by_recipe.get(name, {}) if isinstance(by_recipe, dict) else {}
    table["recipe"] = {**shared, **stored, "name": name, **chosen}
    return table


def _work_and_show(opened: OpenSweep, json_output: bool, test: str | None) -> None:
    stop = StopRequest()
    counted = opened.prepared.counted is not None
    with stop_on_signals(stop) as received, bars() as shown:
        report = _counted_reporter(shown) if counted else _reporter(shown, opened)
        result = opened.work(on_progress=report, on_wait=_waiting(), stop=stop)
    if result is None:
        number = received()
        tell(
            f"stopped by {signal.Signals(number).name}; go on with: "
            f"curvedp resume {opened.folder}",
            style="bold",
        )
        raise typer.Exit(128 + number)
    if json_output:
        print_json(result.to_json())
    else:
        _print_result(result, test)
    if result.best is None:
        raise typer.Exit(1)


def _reporter(shown: Any, opened: OpenSweep) -> Callable[[int, Progress], None]:
    tasks: dict[int, Any] = {}

    def report(number: int, progress: Progress) -> None:
        name = f"trial {number} (of {opened.prepared.config.trials})"
        if number not in tasks:
            tasks[number] = shown.add_task(name, total=None, remark="")
            if not log.is_terminal:
                tell(f"training {name}")
        shown.update(tasks[number], completed=progress.step, total=progress.steps)

    return report


def _counted_reporter(shown: Any) -> Callable[[int, Progress], None]:
    """One bar for all trials: how many there are is a secret."""
    task: list[Any] = []

    def report(_: int, progress: Progress) -> None:
        if not task:
            tell("training; how many trials there are is not shown", style="dim")
            task.append(shown.add_task("a trial", total=None, remark=""))
        shown.update(task[0], completed=progress.step, total=progress.steps)

    return report


def _waiting() -> Callable[[list[Trial]], None]:
    said: set[str] = set()

    def wait(elsewhere: list[Trial]) -> None:
        places = sorted({t.place or "" for t in elsewhere}) or ["this folder"]
        text = f"waiting for the last trials of: {', '.join(places)}"
        if text not in said:
            said.add(text)
            tell(text, style="dim")

    return wait


def _print_result(result: SweepResult, test: str | None) -> None:
    config = result.prepared.config
    if not result.counted:
        results.print(_table(result))
    document = result.to_json()
    pairs = [("scores", str(document["scores"]))]
    if result.best is not None:
        shown = _score(result.best, config.metric)
        pairs.append((f"best {config.metric}", f"{shown} on the {result.split} split"))
        pairs.append(("settings", _settings(result.best)))
        pairs.append(("run folder", _where(result)))
    else:
        pairs.append(("best", _why_none(result)))
    pairs.append(("tuning", result.tuning()))
    pairs += _guarantee(result, document)
    results.print(rows_of(pairs, loud=() if result.counted else ("tuning",)))
    if result.best is None:
        return
    again = "with the best settings, on all of the training data"
    if result.private:
        again += " (another run, with an epsilon of its own)"
    results.print(f"\n{again}:", style="dim", soft_wrap=True)
    command = train_command(config.base, result.best.settings, test)
    results.print(escape(command), soft_wrap=True)


def _guarantee(result: SweepResult, document: dict[str, Any]) -> list[tuple[str, str]]:
    plan, counted = result.prepared.plan, result.prepared.counted
    if plan is None or document["epsilon"] is None:
        return []
    noise = (
        f"{plan.noise_multiplier:g} x the bound, {plan.sampling.steps} steps a trial"
    )
    pairs = [
        ("relation", plan.relation.value),
        ("noise", noise),
    ]
    if counted is None:
        each = f"epsilon {document['epsilon']:.4g} at delta {plan.delta:g}"
        pairs.insert(0, ("one trial", each))
        everything = result.epsilon_of_all
        if everything is not None:
            pairs.insert(1, ("all trials", f"epsilon {everything:.4g}"))
        return pairs
    repeats = result.prepared.config.repeats
    assert repeats is not None
    total = f"({counted.epsilon:.4g}, {plan.delta:g})-differential privacy, RDP"
    law = f"{repeats.law}, {repeats.mean:g} expected"
    return [("guarantee", total), ("number of trials", law), *pairs]


def _table(result: SweepResult) -> Table:
    metric = result.prepared.config.metric
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("trial", justify="right")
    table.add_column(f"{metric}, {result.split}", justify="right")
    table.add_column("settings", overflow="fold")
    table.add_column("seconds", justify="right")
    for row in result.rows:
        seconds = "" if row.seconds is None else f"{row.seconds:.1f}"
        said = _settings(row)
        if row.reason:
            said += f" [{row.reason}]"
        table.add_row(str(row.number), _score(row, metric), escape(said), seconds)
    return table


def _score(row: TrialRow, metric: str) -> str:
    if row.score is None:
        return "refused"
    return f"{row.score:.4f}" if metric == "loss" else f"{100 * row.score:.2f} %"


def _settings(row: TrialRow) -> str:
    return " ".join(f"{name}={value}" for name, value in row.settings.items())


def _where(result: SweepResult) -> str:
    if result.best_dir is not None:
        return str(result.best_dir)
    place = result.best.place if result.best is not None else None
    return f"on another machine or in another folder: {place}"


def _why_none(result: SweepResult) -> str:
    reasons = [row.reason for row in result.rows if row.reason]
    if reasons:
        return f"none: every trial was refused ({reasons[0]})"
    return (
        "none: no trial was drawn, or none was accepted; the law of their number "
        "allows that, and nothing is released"
    )
