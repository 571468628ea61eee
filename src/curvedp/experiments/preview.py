"""What a run would do: coverage, plan, statement and cost, without private data used.

The time is measured on synthetic examples of the declared shape, on a copy of the
model, so nothing is trained, written or spent.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from curvedp.accounting import LedgerHeader, MemoryLedger
from curvedp.data import ArrayDataset, Task
from curvedp.experiments.building import BuiltRun
from curvedp.experiments.runs import NOT_PRIVATE
from curvedp.layers import Batch, Coverage, Synthesiser, cover, synthesiser_like
from curvedp.plan import Plan, SamplingPlan
from curvedp.probes import PublicProbe
from curvedp.recipes import Curvature, Recipe
from curvedp.train import Progress, Statement, Trainer, per_example_loss
from curvedp.train.explained import StepPlan
from curvedp.train.fitting import AUTO, fitting_rows
from curvedp.train.settings import default_physical_batch_size
from curvedp.train.statement import make_statement

__all__ = ["Preview", "explain_run", "preview_run"]

_TIMED_ROWS, _TIMED_STEPS = 64, 4
#: Steps between refreshes of a run that makes none while it is timed.
_NEVER = 10**9


@dataclass(frozen=True)
class Preview:
    """A plan for people and programs.

    Attributes:
        recipe: name of the method.
        private: whether it has a guarantee.
        oracle: whether it looks at the private data for curvature.
        curvature: the settings of a recipe that whitens, or None.
        sampling: the declared sampling.
        parameters: number of trainable parameters.
        coverage: a line per layer; None for a reference without a guarantee.
        plan: None for a reference without a guarantee.
        statement: as it would stand at the start; None likewise.
        physical_batch_size: rows that are computed at once.
        seconds: expected time of training on this device.
        held_out: what metrics would be computed on.
    """

    recipe: str
    private: bool
    oracle: bool
    curvature: Curvature | None
    sampling: SamplingPlan
    parameters: int
    coverage: str | None
    plan: Plan | None
    statement: Statement | None
    physical_batch_size: int
    seconds: float
    held_out: str
    device: str

    @property
    def epsilon(self) -> float | None:
        """The planned one; None where none would hold."""
        return None if self.plan is None or self.oracle else self.plan.epsilon()

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        document: dict[str, Any] = {
            "dry_run": True,
            "recipe": self.recipe,
            "private": self.private,
            "epsilon": self.epsilon,
            "delta": None if self.plan is None else self.plan.delta,
            "relation": None if self.plan is None else self.plan.relation.value,
            "sigma": None if self.plan is None else self.plan.noise_multiplier,
            "noise": _noise_facts(self.plan),
            "steps": self.sampling.steps,
            "sample_rate": self.sampling.sample_rate,
            "expected_batch_size": self.sampling.expected_batch_size,
            "physical_batch_size": self.physical_batch_size,
            "parameters": self.parameters,
            "device": self.device,
            "expected_seconds": round(self.seconds, 2),
            "metrics_computed_on": self.held_out,
            "curvature": None if self.curvature is None else self.curvature.facts(),
            "coverage": None if self.coverage is None else self.coverage.splitlines(),
            "statement": None if self.statement is None else self.statement.facts,
        }
        if not self.private:
            document["label"] = NOT_PRIVATE
        return document


def _noise_facts(plan: Plan | None) -> dict[str, Any] | None:
    """Of correlated noise; None where it is independent."""
    if plan is None or plan.correlation is None:
        return None
    return {**plan.correlation.facts(), "rounds": plan.rounds}


def preview_run(built: BuiltRun) -> Preview:
    """Check coverage, make the plan and estimate the time of a run.

    Raises:
        CurvedpError: whatever would refuse the run itself.
    """
    config = built.config
    recipe = config.configured_recipe()
    settings = config.privacy_settings()
    sampling = settings.sampling(len(built.train))
    plan = statement = coverage = None
    held = 0
    unsafe = config.unsafe_reproducible_noise is not None
    if recipe.private:
        plan = settings.plan(recipe, len(built.train))
        found, synthesise = _coverage(built)
        coverage, held = found.explain(), found.activation_bytes
        header = LedgerHeader("dry-run", plan.relation, plan.delta)
        statement = make_statement(
            plan,
            MemoryLedger(header),
            unsafe=unsafe,
            trusted_loss=False,
            oracle=recipe.oracle,
            public_probe=built.probe is not None
            and (recipe.probes or recipe.eigenvalues is not None),
            pretrained=recipe.pretrains,
        )
    parameters = [p for p in built.model.parameters() if p.requires_grad]
    expected, device = sampling.expected_batch_size, parameters[0].device.type
    physical = config.physical_batch_size
    if physical == AUTO and plan is not None:
        physical = fitting_rows(
            built.model,
            found,
            synthesise,
            per_example_loss(built.loss),
            plan.clipping,
            expected_rows=expected * config.views,
            slots=config.views,
            size_is_public=sampling.public_size is not None,
        )
    if not isinstance(physical, int):
        physical = default_physical_batch_size(expected, held, device)
    return Preview(
        recipe=recipe.name,
        private=config.private,
        oracle=recipe.oracle,
        curvature=recipe.curvature,
        sampling=sampling,
        parameters=sum(p.numel() for p in parameters),
        coverage=coverage,
        plan=plan,
        statement=statement,
        physical_batch_size=physical,
        seconds=_expected_seconds(built, sampling, physical),
        held_out=built.split,
        device=str(parameters[0].device),
    )


def _coverage(built: BuiltRun) -> tuple[Coverage, Synthesiser]:
    device = next(built.model.parameters()).device
    example = _synthetic(built, 1)
    template = Batch(example.inputs.to(device), example.targets.to(device))
    loss = per_example_loss(built.loss)
    synthesise = synthesiser_like(template, built.model)
    return cover(built.model, synthesise, loss), synthesise


def _synthetic(built: BuiltRun, rows: int, seed: int = 0) -> ArrayDataset:
    source = built.source
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(rows, *source.input_shape, generator=generator)
    if source.task is Task.CLASSIFICATION:
        return ArrayDataset(inputs, torch.zeros(rows, dtype=torch.int64))
    return ArrayDataset(inputs, torch.zeros(rows, source.num_outputs))


def _expected_seconds(built: BuiltRun, sampling: SamplingPlan, physical: int) -> float:
    """Time of a few steps on a small synthetic batch, scaled up; and of refreshes."""
    rows = min(_TIMED_ROWS, physical)
    recipe = built.config.configured_recipe()
    portions = math.ceil(sampling.expected_batch_size / physical)
    curvature = recipe.curvature
    if curvature is None:
        step = _step_seconds(built, recipe, rows)
        return step * (physical / rows) * portions * sampling.steps
    # without a refresh, and with one at every step: the difference is a refresh
    step = _step_seconds(built, recipe.configure(refresh=_NEVER), rows)
    refresh = max(0.0, _step_seconds(built, recipe.configure(refresh=1), rows) - step)
    times = 1 if not curvature.refresh else -(-sampling.steps // curvature.refresh)
    return step * (physical / rows) * portions * sampling.steps + refresh * times


def _step_seconds(built: BuiltRun, recipe: Recipe, rows: int) -> float:
    """Of one step on synthetic rows, which stand in for public and private ones."""
    times: list[float] = []

    def note(_: Progress) -> None:
        times.append(time.monotonic())

    trainer, synthetic = _stand_in(built, recipe, rows, rows, on_progress=note)
    trainer.fit(synthetic)
    return (times[-1] - times[0]) / (len(times) - 1)


def explain_run(built: BuiltRun) -> StepPlan:
    """How a step of the run would serve each layer, and what that takes.

    On a copy of the model and with synthetic examples, as in :func:`preview_run`.
    """
    config = built.config
    recipe = config.configured_recipe()
    sampling = config.privacy_settings().sampling(len(built.train))
    expected = sampling.expected_batch_size
    trainer, synthetic = _stand_in(
        built, recipe, _TIMED_ROWS, config.physical_batch_size, expected
    )
    return trainer.explain(synthetic)


def _stand_in(
    built: BuiltRun,
    recipe: Recipe,
    rows: int,
    physical: int | str | None,
    expected: float | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> tuple[Trainer, ArrayDataset]:
    """A trainer of a copy of the model, and synthetic rows in the place of data."""
    synthetic = _synthetic(built, rows)
    probes = None
    # before the steps; and noise takes little of one
    recipe = replace(
        recipe, pretraining=None, correlation=None, eigenvalues=None, search={}
    )
    if recipe.curvature is not None and recipe.curvature.probe in ("public", "oracle"):
        recipe = recipe.configure(probe="public")
        probes = PublicProbe(_synthetic(built, rows, seed=1), allow_repeats=True)
    settings: dict[str, Any] = {"noise_multiplier": 1.0} if recipe.private else {}
    trainer = Trainer(
        copy.deepcopy(built.model),
        built.loss,
        recipe,
        physical_batch_size=physical,
        on_progress=on_progress or (),
        sample_rate=1.0,
        steps=_TIMED_STEPS,
        expected_batch_size=rows if expected is None else expected,
        delta=1e-9,
        probes=probes,
        **settings,
    )
    return trainer, synthetic
