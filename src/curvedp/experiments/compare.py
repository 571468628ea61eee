"""Recipes side by side on one data set, over several seeds.

Seeds are paired: the k-th run of every recipe starts from the same weights (and the
same validation split). Sampling and noise differ from run to run; they come from the
operating system unless reproducible noise is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from curvedp.accounting import get_accountant, read_ledger, tally
from curvedp.errors import ConfigurationError, DataError
from curvedp.experiments.building import BuiltRun, build_run
from curvedp.experiments.config import RunConfig
from curvedp.experiments.folder import refuse_existing
from curvedp.experiments.jsonable import jsonable
from curvedp.experiments.runs import (
    NO_HELD_OUT,
    NOT_PRIVATE,
    RunResult,
    StopRequest,
    resume_run,
    train_run,
)
from curvedp.locks import sole_writer
from curvedp.recipes import Recipe, get_recipe
from curvedp.storage import read_json, write_json
from curvedp.train import Progress

__all__ = [
    "CompareConfig",
    "Comparison",
    "compare",
    "is_comparison",
    "resume_comparison",
]

KIND = "curvedp-compare"

#: Called with the recipe, the seed and how far its run is.
OnProgress = Callable[[str, int, Progress], None]


@dataclass(frozen=True)
class CompareConfig:
    """What is compared.

    Attributes:
        base: everything that the runs share; its recipe is not used.
        recipes: names.
        seeds: number of runs for each recipe.
        settings: by recipe, what differs from its defaults.
    """

    base: RunConfig
    recipes: tuple[str, ...]
    seeds: int = 3
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.recipes:
            raise ConfigurationError(
                "there is no recipe to compare", "give --recipes dp-sgd,non-private"
            )
        if len(set(self.recipes)) != len(self.recipes):
            raise ConfigurationError(
                f"a recipe is named twice: {', '.join(self.recipes)}"
            )
        if isinstance(self.seeds, bool) or self.seeds < 1:
            raise ConfigurationError(f"seeds is {self.seeds}", "use 1 or more")
        foreign = sorted(set(self.settings) - set(self.recipes))
        if foreign:
            raise ConfigurationError(
                f"there are settings for {foreign[0]!r}, which is not compared",
                f"the recipes are: {', '.join(self.recipes)}",
            )
        for name in self.recipes:
            get_recipe(name).configure(**self.settings.get(name, {}))

    def to_json(self) -> dict[str, Any]:
        """As JSON values; :meth:`from_json` reads them back."""
        settings = {name: dict(values) for name, values in self.settings.items()}
        return {
            "base": self.base.to_json(),
            "recipes": list(self.recipes),
            "seeds": self.seeds,
            "settings": settings,
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> CompareConfig:
        """Read what :meth:`to_json` wrote."""
        return cls(
            base=RunConfig.from_json(stored["base"]),
            recipes=tuple(stored["recipes"]),
            seeds=stored["seeds"],
            settings=stored["settings"],
        )

    def run_config(self, recipe: str, index: int = 0) -> RunConfig:
        """The config of one run; the index moves every seed."""
        base = self.base.settled()
        noise = base.unsafe_reproducible_noise
        settings = dict(self.settings.get(recipe, {}))
        probes = (
            get_recipe(recipe).takes_public_data
            and settings.get("probe", "public") == "public"
        )
        return replace(
            base,
            recipe=recipe,
            recipe_settings=settings,
            public_data=base.public_data if probes else "",
            public_data_options=base.public_data_options if probes else {},
            seed=(base.seed or 0) + index,
            unsafe_reproducible_noise=None if noise is None else noise + index,
        )


@dataclass(frozen=True)
class Comparison:
    """The table and the runs behind it.

    Attributes:
        rows: one for each recipe, JSON values.
        metric: the metric of the table.
        split: what it is computed on.
        runs: results by recipe.
        folder: where everything is.
    """

    rows: list[dict[str, Any]]
    metric: str
    split: str
    runs: dict[str, list[RunResult]]
    folder: Path


def compare(
    config: CompareConfig,
    folder: Path,
    *,
    on_progress: OnProgress | None = None,
    stop: StopRequest | None = None,
) -> Comparison | None:
    """Run every recipe with every seed; ``folder/<recipe>-seed-<k>`` holds each run.

    Every recipe is built and checked before the first one is trained.

    Returns:
        The comparison, or None if it was asked to stop; :func:`resume_comparison` goes
        on with it.

    Raises:
        CurvedpError: something is refused.
    """
    config = replace(config, base=config.base.settled())
    refuse_existing(folder)
    for recipe in config.recipes:
        _refuse_without_held_out(build_run(config.run_config(recipe)))
    with sole_writer(folder):
        refuse_existing(folder)  # again: somebody may have been faster
        write_json(folder / "run.json", {"kind": KIND, "config": config.to_json()})
        return _compare(config, folder, on_progress, stop or StopRequest())


def is_comparison(folder: Path) -> bool:
    """Whether this is the folder of a comparison."""
    try:
        return bool(read_json(folder / "run.json")["kind"] == KIND)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def resume_comparison(
    folder: Path,
    *,
    device: str | None = None,
    model: str | None = None,
    on_progress: OnProgress | None = None,
    stop: StopRequest | None = None,
) -> Comparison | None:
    """Go on with a comparison that was stopped; finished runs are not run again.

    ``model`` repeats the folder's ``module:factory``, which is then imported.
    """
    try:
        config = CompareConfig.from_json(read_json(folder / "run.json")["config"])
    except (ValueError, KeyError, TypeError) as error:
        problem = getattr(error, "problem", str(error))
        raise ConfigurationError(
            f"{folder / 'run.json'} is damaged: {problem}", "restore it from a copy"
        ) from error
    config = replace(config, base=config.base.repeating(model))
    if device is not None:
        config = replace(config, base=config.base.on(device))
    with sole_writer(folder):
        return _compare(config, folder, on_progress, stop or StopRequest())


def _compare(
    config: CompareConfig,
    folder: Path,
    on_progress: OnProgress | None,
    stop: StopRequest,
) -> Comparison | None:
    runs: dict[str, list[RunResult]] = {name: [] for name in config.recipes}
    for index in range(config.seeds):
        for recipe in config.recipes:
            result = _run(config, recipe, index, folder, on_progress, stop)
            if not result.finished:
                return None
            runs[recipe].append(result)
    everything = _epsilon_of_all([r for results in runs.values() for r in results])
    first = runs[config.recipes[0]][0]
    metric = _headline(first)
    rows = [_row(get_recipe(r), runs[r], metric, everything) for r in config.recipes]
    write_json(folder / "compare.json", jsonable(rows))
    return Comparison(rows, metric, first.split, runs, folder)


def _run(
    config: CompareConfig,
    recipe: str,
    index: int,
    folder: Path,
    on_progress: OnProgress | None,
    stop: StopRequest,
) -> RunResult:
    def report(progress: Progress) -> None:
        if on_progress is not None:
            on_progress(recipe, index, progress)

    run_config = config.run_config(recipe, index)
    run_dir = folder / f"{recipe}-seed-{run_config.seed}"
    if (run_dir / "run.json").exists():
        device = run_config.device
        return resume_run(
            run_dir,
            device=device,
            model=run_config.said_model,
            on_progress=report,
            stop=stop,
        )
    return train_run(run_config, run_dir, on_progress=report, stop=stop)


def _headline(result: RunResult) -> str:
    """The metric of the table: what was asked for first, else the task's own."""
    return (
        result.config.metrics[0]
        if result.config.metrics
        else next(iter(result.metrics))
    )


def _refuse_without_held_out(built: BuiltRun) -> None:
    if built.held_out is None:
        raise DataError(
            f"{built.source.name}: {NO_HELD_OUT}",
            "give a test file, or --validation 0.2 to set examples apart",
        )


def _row(
    recipe: Recipe, results: list[RunResult], metric: str, everything: float | None
) -> dict[str, Any]:
    facts = results[0].facts or {}
    row: dict[str, Any] = {"recipe": recipe.name, "private": results[0].private}
    if not results[0].private:
        row["label"] = NOT_PRIVATE
    if results[0].config.configured_recipe().oracle:
        row["oracle"] = True
    row["metric"] = metric
    names = dict.fromkeys([metric, *results[0].metrics])
    for name in names:
        values = [r.metrics[name] for r in results]
        with np.errstate(invalid="ignore"):  # a run may have diverged
            spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
            row[f"{name}_mean"], row[f"{name}_std"] = float(np.mean(values)), spread
    return row | {
        "metrics_computed_on": results[0].split,
        "seeds": len(results),
        "epsilon": facts.get("epsilon"),
        "delta": facts.get("delta"),
        "relation": facts.get("relation"),
        "sigma": facts.get("noise_multiplier"),
        "steps": results[0].steps,
        "seconds": _mean_seconds(results),
        "epsilon_of_all_runs": None if facts.get("epsilon") is None else everything,
    }


def _mean_seconds(results: list[RunResult]) -> float | None:
    seconds = [r.seconds for r in results if r.seconds is not None]
    return round(float(np.mean(seconds)), 3) if seconds else None


def _epsilon_of_all(results: list[RunResult]) -> float | None:
    """What all private runs have spent together on this data, by their ledgers.

    A run with an oracle has nothing to add up; its row says that it is not private.
    """
    ledgers = [
        read_ledger(r.run_dir / "ledger.jsonl")
        for r in results
        if r.facts is not None and r.run_dir is not None
    ]
    ledgers = [ledger for ledger in ledgers if not ledger.is_oracle]
    if not ledgers:
        return None
    header = ledgers[0].header
    event = tally(ledger.event() for ledger in ledgers)
    accountant = get_accountant(header.accountant)
    return accountant.epsilon(event, header.relation, header.delta)
