"""``curvedp diagnose snr`` and ``clamp``: what whitening does to private steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from curvedp.cli.diagnose.asked import Asked, takes_study_settings
from curvedp.cli.diagnose.findings import Findings, number, table
from curvedp.cli.options import takes_run_settings
from curvedp.cli.output import reports_errors, tell
from curvedp.diagnostics.geometry import (
    CLAMPS,
    Isotropy,
    LayerSignal,
    LossPath,
    layer_isotropy,
    loss_path,
    signal_to_noise,
)
from curvedp.diagnostics.geometry.plots import plot_losses, plot_signals
from curvedp.errors import ConfigurationError
from curvedp.experiments import BuiltRun, build_run
from curvedp.experiments.building import default_model
from curvedp.experiments.studies import StudiedRun
from curvedp.train import Progress, Trainer
from curvedp.whitening import IdentityWhitener, Whitener

__all__ = ["register"]

_Signals = dict[str, list[LayerSignal]]
_Isotropies = dict[str, dict[str, Isotropy]]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(
        "snr", epilog="Example: curvedp diagnose snr --data digits --epsilon 3"
    )(snr_command)
    app.command(
        "clamp",
        epilog="Example: curvedp diagnose clamp --data digits --epsilon 3 --epochs 5",
    )(clamp_command)


@reports_errors
@takes_run_settings
@takes_study_settings(at="0")
def snr_command(asked: Asked) -> None:
    """Compute signal to noise of every layer, plain and whitened, on private gradients.

    |mean clipped whitened gradient| / (s C sqrt(d_l) / B), and the isotropy of the
    gradients, for the identity and for whitening with each source's factors.
    """
    run = asked.open("oracle")
    config = run.built.config
    recipe = config.configured_recipe()
    if not recipe.private:
        raise ConfigurationError(
            f"the recipe {recipe.name!r} has no noise to compare with",
            "choose a private one, such as dp-kfc",
        )
    plan = config.privacy_settings().plan(recipe, len(run.built.train))
    wanted = [n for n in run.sources if asked.sources is None or n in asked.sources]
    signals: dict[int, _Signals] = {}
    isotropies: dict[int, _Isotropies] = {}

    def look(step: int) -> None:
        maps = _maps(run, wanted, step, recipe.learning_rate * plan.clipping.bound)
        signals[step] = signal_to_noise(
            run.study,
            run.sources["oracle"],
            maps,
            plan.clipping,
            noise_multiplier=plan.noise_multiplier,
            expected_batch_size=plan.sampling.expected_batch_size,
        )
        isotropies[step] = layer_isotropy(run.study, run.sources["oracle"], maps)

    visited = asked.visit(run, look)
    needs = ["these are gradients of the private data"]
    found = Findings.of("snr", asked, run, visited, needs)
    sigma = f"s = {plan.noise_multiplier:.3g}, {plan.clipping.describe()}"
    batch = f"B = {plan.sampling.expected_batch_size:g}"
    title = f"Signal to noise of one step: {run.title}; {sigma}, {batch}"
    drawn = found.draw(
        lambda p: plot_signals(signals, isotropies, p, title, found.not_private)
    )
    rows = [
        {"step": step, "whitening": name, "private": False, **row.to_json(),
         **isotropies[step][name][row.layer].to_json()}
        for step, by_map in signals.items()
        for name, of_map in by_map.items()
        for row in of_map
    ]  # fmt: skip
    facts = {
        "noise_multiplier": plan.noise_multiplier,
        "clipping": plan.clipping.to_json(),
        "expected_batch_size": plan.sampling.expected_batch_size,
    }
    shown = [_snr_table(step, signals[step], isotropies[step]) for step in signals]
    found.show({**facts, "rows": rows}, shown, drawn)


def _maps(
    run: StudiedRun, names: list[str], step: int, step_length: float
) -> dict[str, Whitener]:
    """The identity, and the recipe's map from each source's factors."""
    whitening = run.curvature.whitening(run.built.planned_steps, step_length)
    maps: dict[str, Whitener] = {"identity": IdentityWhitener()}
    for name in names:
        factors = run.study.factors(run.sources[name], seed=1)
        maps[name] = whitening.build(factors, run.study.parameters, step)
    return maps


def _snr_table(step: int, signals: _Signals, isotropies: _Isotropies) -> Table:
    made = table(
        "layer", "", "parameters", *signals,
        title=f"step {step}: signal / noise, and isotropy (1: a sphere)",
    )  # fmt: skip
    for place, row in enumerate(next(iter(signals.values()))):
        ratios = [number(of_map[place].ratio) for of_map in signals.values()]
        made.add_row(row.layer, "snr", str(row.parameters), *ratios)
        round_ = [number(isotropies[name][row.layer].ratio) for name in signals]
        made.add_row("", "isotropy", "", *round_)
    return made


@reports_errors
@takes_run_settings
@takes_study_settings(at=None)
def clamp_command(
    asked: Asked,
    clamps: Annotated[
        str | None,
        typer.Option(
            help=f"Which floors, with commas: {', '.join(CLAMPS)}.",
            rich_help_panel="Diagnosis",
            show_default="all",
        ),
    ] = None,
    every: Annotated[
        int,
        typer.Option(help="Steps between two looks.", rich_help_panel="Diagnosis"),
    ] = 1,
) -> None:
    """Train dp-ngd with and without a floor under the curvature; draw the loss.

    Floors: scheduled (falls, rests, rises again), fixed (at the safe one), printed (as
    in the paper), none. The loss is that of private examples.
    """
    names = list(CLAMPS) if clamps is None else clamps.split(",")
    unknown = [name for name in names if name not in CLAMPS]
    if unknown or every < 1:
        raise ConfigurationError(
            f"--clamps {','.join(unknown)}" if unknown else f"--every {every}",
            f"choose from: {', '.join(CLAMPS)}" if unknown else "use 1 or more",
        )
    config = asked.config(recipe="dp-ngd").settled()
    paths: dict[str, LossPath] = {}
    examples = asked.curvature.get("probe_size", 256)
    for name in names:
        settings = {**config.recipe_settings, **CLAMPS[name]}
        built = build_run(replace(config, recipe_settings=settings))
        tell(f"training dp-ngd with the floor {name!r}", style="dim")
        paths[name] = loss_path(
            _trainer_of(built),
            built.train,
            examples=examples,
            every=every,
        )
    facts: dict[str, Any] = {
        "data": config.data,
        "model": config.model or default_model(built.source.input_shape),
        "recipe": config.configured_recipe().facts(),
        "examples": examples,
    }
    found = Findings("clamp", asked, facts, ["this is the loss of private examples"])
    title = (
        f"dp-ngd with and without a floor under the curvature: {Path(config.data).name}"
    )
    drawn = found.draw(lambda p: plot_losses(paths, p, title, found.not_private))
    rows = [{"clamp": name, **path.to_json()} for name, path in paths.items()]
    found.show({"rows": rows}, [_clamp_table(paths)], drawn)


def _trainer_of(built: BuiltRun) -> Callable[[Callable[[Progress], None]], Trainer]:
    return lambda look: built.trainer(on_progress=look)


def _clamp_table(paths: dict[str, LossPath]) -> Table:
    made = table("floor", "diverged", "first", "lowest", "last", title="training loss")
    for name, path in paths.items():
        at = "no" if path.diverged_at is None else f"at step {path.diverged_at}"
        losses = (path.losses[0], min(path.losses), path.losses[-1])
        made.add_row(name, at, *map(number, losses))
    return made
