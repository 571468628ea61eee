"""Train, resume and load runs that live in a folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from curvedp.accounting import Ledger, read_ledger
from curvedp.errors import (
    CheckpointError,
    ConfigurationError,
    CurvedpError,
    DataError,
)
from curvedp.experiments.building import (
    BuiltRun,
    ModelShape,
    build_model,
    build_run,
    choose_device,
)
from curvedp.experiments.config import NOT_PRIVATE, RunConfig
from curvedp.experiments.folder import RunFolder, refuse_existing
from curvedp.experiments.scores import PAID_NOTE, SCORE_LEDGER, paid_accuracy
from curvedp.locks import sole_writer
from curvedp.train import (
    Progress,
    Statement,
    Trainer,
    evaluate,
    per_example_loss,
)
from curvedp.train.checkpoint import (
    Checkpoint,
    checkpoint_folders,
    load_checkpoint,
    save_checkpoint,
)

__all__ = [
    "NOT_PRIVATE",
    "NO_HELD_OUT",
    "RunResult",
    "StopRequest",
    "Trained",
    "evaluate_built",
    "load_trained",
    "resume_run",
    "train_run",
]

#: What is said in place of an accuracy that would be a release.
NO_HELD_OUT = (
    "the data has no test split, and a metric on the private training examples would "
    "be a release that nobody paid for"
)
_VALIDATION_NOTE = (
    "metrics were computed on a validation split of the private data; the guarantee "
    "does not cover them"
)
_PUBLIC_SPLIT_NOTE = (
    "metrics were computed on a validation split that was declared public"
)


class StopRequest:
    """Asks a run to stop after the step in progress, also before it has begun."""

    def __init__(self) -> None:
        self.requested = False
        self._trainer: Trainer | None = None

    def __call__(self) -> None:
        self.requested = True
        if self._trainer is not None:
            self._trainer.request_stop()

    def watch(self, trainer: Trainer) -> None:
        """From now on requests go to this trainer."""
        self._trainer = trainer


@dataclass(frozen=True)
class RunResult:
    """How a run stands.

    Attributes:
        run_dir: its folder; None for a run without one.
        finished: whether all planned steps are made.
        steps: logical steps made.
        planned_steps: logical steps planned.
        seconds: of training, in this process; None where the number of examples is
            private, which they tell.
        split: what the metrics are computed on: "test", "validation", "none".
        metrics: by name; empty while the run is not finished.
        statement: the privacy statement; None for a reference without a guarantee.
        facts: the statement's facts, also for a result that was read from a file.
    """

    config: RunConfig
    run_dir: Path | None
    finished: bool
    steps: int
    planned_steps: int
    seconds: float | None
    split: str
    metrics: dict[str, float]
    statement: Statement | None = None
    facts: dict[str, Any] | None = None

    @property
    def private(self) -> bool:
        """Whether there is a guarantee."""
        return self.facts is not None and bool(self.facts.get("private"))

    def to_json(self) -> dict[str, Any]:
        """As JSON values: what result.json holds and ``--json`` prints."""
        facts = self.facts or {}
        document: dict[str, Any] = {
            "kind": "curvedp-result",
            "run_dir": None if self.run_dir is None else str(self.run_dir),
            "recipe": self.config.recipe,
            "private": self.private,
            "finished": self.finished,
            "steps": self.steps,
            "planned_steps": self.planned_steps,
            "seconds": None if self.seconds is None else round(self.seconds, 3),
            "metrics_computed_on": self.split,
            "metrics": self.metrics,
            "epsilon": facts.get("epsilon"),
            "delta": facts.get("delta"),
            "relation": facts.get("relation"),
            "sigma": facts.get("noise_multiplier"),
            "statement": self.facts,
        }
        if not self.private:
            document["label"] = NOT_PRIVATE
        if self.finished and self.split == "none":
            document["metrics_note"] = NO_HELD_OUT
        return document


def train_run(
    config: RunConfig,
    run_dir: Path,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    stop: StopRequest | None = None,
    notes: tuple[str, ...] = (),
) -> RunResult:
    """Train in a new folder; if it is refused before the first step, nothing is left.

    Args:
        config: of the run.
        run_dir: its folder.
        on_progress: called after every step.
        stop: asks it to stop.
        notes: remarks for its ledger and statement, written when it is finished.

    Raises:
        CurvedpError: a setting, the data or the model is refused, or the disk is full.
    """
    refuse_existing(run_dir)  # before a lock is put into what is not ours
    with sole_writer(run_dir):
        folder = RunFolder.create(run_dir, config)
        try:
            return _execute(folder, False, on_progress, stop or StopRequest(), notes)
        except CurvedpError:
            folder.discard_if_unspent()
            raise


def resume_run(
    run_dir: Path,
    *,
    device: str | None = None,
    model: str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    stop: StopRequest | None = None,
    notes: tuple[str, ...] = (),
) -> RunResult:
    """Go on with a run that was stopped; a finished one gives its result again.

    Takes the arguments of :func:`train_run`, and another device if need be. Where the
    folder's model is a ``module:factory``, ``model`` repeats that name: it is imported.

    Raises:
        ConfigurationError: it is not a run, or another process is writing to it.
        CurvedpError: a file is damaged or missing, or the disk is full.
    """
    folder = RunFolder.open(run_dir)
    folder.config = folder.config.repeating(model)
    if device is not None:
        folder.config = folder.config.on(device)
    stored = folder.read_result()
    if stored is not None:
        try:
            return _stored_result(folder, stored)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigurationError(
                f"{folder.result} is damaged or foreign: {error!r}",
                "remove it and resume the run; its checkpoint is untouched",
            ) from error
    with sole_writer(run_dir):
        folder.clear_leftovers()
        folder.refuse_lost_ledger()
        return _execute(folder, True, on_progress, stop or StopRequest(), notes)


def _execute(
    folder: RunFolder,
    resume: bool,
    on_progress: Callable[[Progress], None] | None,
    stop: StopRequest,
    notes: tuple[str, ...],
) -> RunResult:
    built = build_run(folder.config)
    folder.keep_shape(ModelShape.of(built.source))
    private = built.config.configured_recipe().private

    def report(progress: Progress) -> None:
        if stop.requested:  # it may have come before the trainer was there
            trainer.request_stop()
        if on_progress is not None:
            on_progress(progress)

    trainer = built.trainer(folder.path if private else None, report)
    stop.watch(trainer)
    if stop.requested:
        return _unfinished(folder, built)
    # a non-private reference keeps no state; it starts again
    fitted = trainer.fit(built.train, resume=resume and private)
    finished = fitted.finished if private else fitted.steps == built.planned_steps
    if not private and finished:
        _save_reference(folder, built, fitted.steps)
    statement, metrics = fitted.statement, {}
    if finished:
        metrics = evaluate_run(built, folder)
    if finished and statement is not None:
        said = (*notes, *_validation_notes(built.config))
        statement = _with_notes(folder, statement, said)
    result = RunResult(
        config=built.config,
        run_dir=folder.path,
        finished=finished,
        steps=fitted.steps,
        planned_steps=built.planned_steps,
        seconds=_shown_seconds(built.config, fitted.seconds),
        split=built.split,
        metrics=metrics,
        statement=statement,
        facts=None if statement is None else statement.facts,
    )
    if finished:
        folder.write_result(result.to_json())
    return result


def evaluate_run(built: BuiltRun, folder: RunFolder) -> dict[str, float]:
    """Metrics of a trained run; paid for first where it is to be."""
    if built.config.validation_noise is None:
        return evaluate_built(built)
    return paid_accuracy(built, folder.path)


def evaluate_built(built: BuiltRun) -> dict[str, float]:
    """Metrics on the held-out examples; none where there are none."""
    if built.config.validation_noise is not None:
        raise DataError(
            "the accuracy of this run was computed once, with noise that was paid for",
            f"it is in {SCORE_LEDGER}'s folder, in result.json; a second look would be "
            "a release that nobody paid for",
        )
    if built.held_out is None:
        return {}
    loss = per_example_loss(built.loss)
    return evaluate(built.model, built.held_out, loss, built.metrics)


@dataclass(frozen=True)
class Trained:
    """A trained model with what is needed to use it."""

    model: nn.Module
    config: RunConfig
    shape: ModelShape
    step: int
    folder: RunFolder


def load_trained(
    run_dir: Path, *, device: str | None = None, model: str | None = None
) -> Trained:
    """The model of a run's last checkpoint. Private data is not touched.

    Args:
        run_dir: the run's folder.
        device: another one than the run's.
        model: repeats the folder's ``module:factory``, which is then imported.

    Raises:
        CheckpointError: there is none, or it is damaged, or of another run.
    """
    folder = RunFolder.open(run_dir)
    folder.config = folder.config.repeating(model)
    found = checkpoint_folders(folder.checkpoints)
    if not found or folder.shape is None:
        raise CheckpointError(
            f"{run_dir} has no checkpoint yet",
            f"train it first: curvedp resume {run_dir}",
        )
    checkpoint = load_checkpoint(found[-1])
    if folder.ledger.exists():
        run_id = read_ledger(folder.ledger).header.run_id
        if run_id != checkpoint.run_id:
            raise CheckpointError(
                f"{found[-1]} belongs to another run than the ledger beside it",
                "put the files of one run together again",
            )
    made = build_model(folder.config, folder.shape)
    try:
        made.load_state_dict(checkpoint.model)
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{found[-1]} does not fit the model of run.json",
            "put the files of one run together again",
        ) from error
    made.to(choose_device(device or folder.config.device))
    return Trained(made, folder.config, folder.shape, checkpoint.step, folder)


def _save_reference(folder: RunFolder, built: BuiltRun, steps: int) -> None:
    facts = {"recipe": built.config.configured_recipe().facts(), "private": False}
    state = built.model.state_dict()
    checkpoint = Checkpoint(steps, "non-private", facts, state, {})
    save_checkpoint(folder.checkpoints, checkpoint)


def _validation_notes(config: RunConfig) -> tuple[str, ...]:
    if config.validation_data:
        name = Path(config.validation_data).name
        return (f"metrics were computed on {name}, which was declared public",)
    if config.validation is None:
        return ()
    if config.validation_noise is not None:
        return (PAID_NOTE,)
    return (_PUBLIC_SPLIT_NOTE if config.validation_is_public else _VALIDATION_NOTE,)


def _with_notes(
    folder: RunFolder, statement: Statement, said: tuple[str, ...]
) -> Statement:
    if not said:
        return statement
    with Ledger.open(folder.ledger) as ledger:
        for note in said:
            if note not in ledger.notes():
                ledger.note(note)
        notes = list(ledger.notes())
    shown = [text for name, text in statement.lines if name == "note"]
    return replace(
        statement,
        facts={**statement.facts, "notes": notes},
        lines=(*statement.lines, *(("note", n) for n in said if n not in shown)),
    )


def _unfinished(folder: RunFolder, built: BuiltRun) -> RunResult:
    """Stopped before the trainer began; steps of earlier sittings are on disk."""
    paid = 0
    with contextlib.suppress(CurvedpError):
        paid = len(read_ledger(folder.ledger).paid_steps())
    return RunResult(
        built.config,
        folder.path,
        False,
        paid,
        built.planned_steps,
        _shown_seconds(built.config, 0.0),
        built.split,
        {},
    )


def _shown_seconds(config: RunConfig, seconds: float) -> float | None:
    return None if config.privacy_settings().hides_size else seconds


def _stored_result(folder: RunFolder, stored: dict[str, Any]) -> RunResult:
    facts = stored["statement"]
    if facts is not None and facts["epsilon"] is not None:  # inf is stored as a word
        facts = {**facts, "epsilon": float(facts["epsilon"])}
    return RunResult(
        config=folder.config,
        run_dir=folder.path,
        finished=True,
        steps=stored["steps"],
        planned_steps=stored["planned_steps"],
        seconds=stored["seconds"],
        split=stored["metrics_computed_on"],
        metrics={name: float(value) for name, value in stored["metrics"].items()},
        facts=facts,
    )
