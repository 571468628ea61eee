"""A run that is looked at on its way: which sources, at which steps.

What the private data is looked at for is not private, and every result says so. The
training between two looks is an ordinary run of its recipe and spends its budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from curvedp import data as datasets
from curvedp.diagnostics.geometry import Source, Study, sources_of
from curvedp.errors import ConfigurationError, DataError
from curvedp.experiments.building import BuiltRun, build_run, default_model
from curvedp.experiments.config import RunConfig
from curvedp.recipes import Curvature
from curvedp.train import Progress

__all__ = ["StudiedRun", "Visited", "open_study"]


@dataclass(frozen=True)
class Visited:
    """Where a run was looked at, and what its parameters are worth.

    Attributes:
        steps: at which it was looked at.
        planned: steps of the whole run.
        private: whether its parameters have a guarantee; before the first step they
            are random numbers, and have one.
        facts: of the privacy statement; None if nothing was trained.
    """

    steps: list[int]
    planned: int
    private: bool
    facts: Mapping[str, Any] | None

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        facts = self.facts or {}
        return {
            "looked_at": self.steps,
            "planned_steps": self.planned,
            "private": self.private,
            "epsilon": facts.get("epsilon"),
            "delta": facts.get("delta"),
            "relation": facts.get("relation"),
        }


@dataclass(frozen=True)
class StudiedRun:
    """A run with the study of its model.

    Attributes:
        built: data, model, settings.
        study: the model with its verified layers.
        sources: where inputs come from, by name.
        curvature: of the recipe, or the default where it has none.
    """

    built: BuiltRun
    study: Study
    sources: dict[str, Source]
    curvature: Curvature

    @property
    def model(self) -> str:
        """Name of the model."""
        shape = self.built.source.input_shape
        return self.built.config.model or default_model(shape)

    @property
    def title(self) -> str:
        """Data, model and recipe in a few words."""
        config = self.built.config
        return f"{Path(config.data).name}, {self.model}, {config.recipe}"

    def visit(
        self,
        shares: Sequence[float],
        look: Callable[[int], None],
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Visited:
        """Train, and look at shares (0 to 1) of the planned steps.

        Args:
            shares: of the planned steps; 0 is before the first one.
            look: called with the step, while the model has its parameters.
            on_progress: called after every step.
        """
        planned = self.built.planned_steps
        steps = sorted({round(share * planned) for share in shares})
        if not steps or steps[0] < 0 or steps[-1] > planned:
            raise ConfigurationError(
                f"a run cannot be looked at {list(shares)} of its steps",
                "give shares from 0 (before the first step) to 1 (after the last)",
            )
        if steps[0] == 0:
            look(0)
        if steps[-1] == 0:
            return Visited(steps, planned, True, None)

        def observe(progress: Progress) -> None:
            if on_progress is not None:
                on_progress(progress)
            if progress.step in steps:
                look(progress.step)
            if progress.step == steps[-1]:
                trainer.request_stop()

        trainer = self.built.trainer(on_progress=observe)
        statement = trainer.fit(self.built.train).statement
        facts = None if statement is None else statement.facts
        return Visited(steps, planned, bool((facts or {}).get("private")), facts)


def open_study(
    config: RunConfig,
    *,
    names: tuple[str, ...] | None = None,
    public_data: str | None = None,
    public_options: Mapping[str, Any] | None = None,
    curvature: Mapping[str, Any] | None = None,
) -> StudiedRun:
    """Build the run and the study of its model.

    Args:
        config: as for ``curvedp train``.
        names: sources to compare; all that there are by default.
        public_data: name, file or folder of data that is declared public.
        public_options: what is declared about it.
        curvature: settings that differ from the recipe's, for the study alone.
    """
    built = build_run(config)
    recipe = built.config.configured_recipe()
    settings = recipe.curvature or Curvature()
    if not recipe.probes or settings.moments != "kronecker":
        settings = Curvature()  # nothing of its own that a source could be asked for
    settings = Curvature(**{**settings.facts(), **(curvature or {})})
    study = Study.of(built.model, built.loss, built.train)
    public = None
    if public_data is not None:
        public = _public(public_data, public_options or {}, built)
    sources = sources_of(study, built.train, public, curvature=settings, names=names)
    return StudiedRun(built, study, sources, settings)


def _public(name: str, options: Mapping[str, Any], built: BuiltRun) -> Any:
    source = datasets.load(name, **options)
    if source.input_shape != built.source.input_shape:
        raise DataError(
            f"an input of the public data has shape {list(source.input_shape)}, and "
            f"the model takes {list(built.source.input_shape)}",
            "prepare it as the private data is",
        )
    return source.train
