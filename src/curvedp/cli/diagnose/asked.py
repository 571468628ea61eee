"""The options that the commands of ``curvedp diagnose`` share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from curvedp.cli.options import parse_pairs
from curvedp.cli.output import tell, training_bar
from curvedp.cli.parameters import JsonFlag, extend_signature
from curvedp.errors import ConfigurationError
from curvedp.experiments import RunConfig
from curvedp.experiments.studies import StudiedRun, Visited, open_study

__all__ = ["Asked", "takes_study_settings"]

_PANEL = "Diagnosis"
_DEFAULT_RECIPE = "dp-kfc"
_DEFAULT_NOISE = 1.0


@dataclass(frozen=True)
class Asked:
    """The options of a diagnosis.

    Attributes:
        settings: of the run, as a table.
        recipe: name of the run's method, or None.
        recipe_settings: what differs from its defaults.
        shares: of the steps, at which it looks.
        sources: names, or None for all.
        public_data: name, file or folder, or None.
        public_options: what is declared about it.
        curvature: settings of the probes that differ from the recipe's.
        output: folder for plots and numbers.
        json_output: print the document instead of tables.
    """

    settings: dict[str, Any]
    recipe: str | None
    recipe_settings: dict[str, Any]
    shares: tuple[float, ...]
    sources: tuple[str, ...] | None
    public_data: str | None
    public_options: dict[str, Any]
    curvature: dict[str, Any]
    output: Path
    json_output: bool

    def config(self, recipe: str | None = None) -> RunConfig:
        """The run's config; an option wins over the file, the file over defaults."""
        table = dict(self.settings)
        table.pop("compare", None)
        by_recipe = table.pop("recipes", {})
        stored = table.get("recipe", {})
        stored = {"name": stored} if isinstance(stored, str) else dict(stored)
        name = recipe or self.recipe or stored.get("name") or _DEFAULT_RECIPE
        if name != stored.get("name"):
            stored = {}  # the file's settings are those of another recipe
        shared = by_recipe.get(name, {}) if isinstance(by_recipe, Mapping) else {}
        own = {**shared, **stored, **self.recipe_settings, "name": name}
        table["recipe"] = own
        privacy = dict(table.get("privacy", {}))
        if not {"epsilon", "noise_multiplier"} & privacy.keys():
            tell(f"neither --epsilon nor --noise-multiplier: noise {_DEFAULT_NOISE:g}")
            privacy["noise_multiplier"] = _DEFAULT_NOISE
        return RunConfig.from_mapping({**table, "privacy": privacy})

    def open(self, *always: str) -> StudiedRun:
        """Build the run and its study; ``always`` are sources that it needs."""
        names = None if self.sources is None else tuple({*self.sources, *always})
        return open_study(
            self.config(),
            names=names,
            public_data=self.public_data,
            public_options=self.public_options,
            curvature=self.curvature,
        )

    def visit(self, run: StudiedRun, look: Callable[[int], None]) -> Visited:
        """Train under a progress bar, and look at the steps that were asked for."""
        name = run.built.config.recipe
        opening = f"training {name} up to the last step that is looked at"
        with training_bar(name, opening) as report:
            return run.visit(self.shares, look, report)


def _option(text: str, *names: str, shown: str | bool = True) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=_PANEL, show_default=shown)


def _options(at: str | None) -> dict[str, Any]:
    options: dict[str, Any] = {
        "output": Annotated[
            Path | None,
            _option("Folder for plots (PNG) and numbers (JSON).", shown="diagnose"),
        ],
        "sources": Annotated[
            str | None,
            _option(
                "Of inputs, with commas: oracle (the private data: not private), "
                "public, synthetic, white.",
                shown="all",
            ),
        ],
        "probe_size": Annotated[
            int | None, _option("Examples of a batch.", shown="256")
        ],
        "probe_batches": Annotated[
            int | None, _option("Batches from each source.", shown="4")
        ],
        "at": Annotated[
            str | None,
            _option("Percent of the run's steps, with commas: when to look.", shown=at
                    or ""),
        ],
        "recipe": Annotated[
            str | None,
            _option("Method that trains and whitens.", shown=_DEFAULT_RECIPE),
        ],
        "recipe_setting": Annotated[
            list[str] | None,
            _option(
                "SETTING=VALUE of the recipe, e.g. damping=0.1; repeatable.", "--set"
            ),
        ],
        "json_output": JsonFlag,
    }  # fmt: skip
    left_out = () if at is not None else ("at", "recipe", "sources", "probe_batches")
    return {name: value for name, value in options.items() if name not in left_out}


def takes_study_settings(
    at: str | None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command that gets its options as ``asked``; inside ``takes_run_settings``.

    Args:
        at: default of ``--at``; None for a command that compares whole runs of one
            recipe, and so has none of the options about sources.
    """
    options = _options(at)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wrapped(*, settings: dict[str, Any], **kwargs: Any) -> None:
            given = {name: kwargs.pop(name, None) for name in _options("")}
            command(_asked(settings, given, at or "100"), **kwargs)

        return extend_signature(wrapped, command, options, drop=("asked",))

    return decorate


def _asked(settings: dict[str, Any], given: dict[str, Any], at: str) -> Asked:
    sources = given["sources"]
    curvature = {
        name: given[name]
        for name in ("probe_size", "probe_batches")
        if given[name] is not None
    }
    settings = dict(settings)
    # a source to look at here, and not what the run itself probes with
    public = settings.pop("public_data", None)
    public = dict(public) if isinstance(public, Mapping) else {"source": public}
    return Asked(
        settings,
        given["recipe"],
        parse_pairs(given["recipe_setting"] or [], "--set"),
        _shares(given["at"] or at),
        None if sources is None else tuple(_words(sources)),
        public.pop("source", None),
        public,
        curvature,
        given["output"] or Path("diagnose"),
        bool(given["json_output"]),
    )


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _shares(text: str) -> tuple[float, ...]:
    try:
        shares = tuple(float(word.rstrip("% ")) / 100 for word in _words(text))
    except ValueError:
        shares = ()
    if not shares or not all(0 <= share <= 1 for share in shares):
        raise ConfigurationError(
            f"--at {text!r} is not a list of percentages",
            "write numbers from 0 to 100 with commas, e.g. 0,25,50,100",
        )
    return shares
