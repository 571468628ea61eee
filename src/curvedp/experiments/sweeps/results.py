"""How a sweep ended: its trials, the best of them, and what may be said of epsilon.

If tuning is counted, the result holds the best trial alone. How many trials there were,
what they scored and which of them it was are no part of what is released.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from curvedp.accounting import get_accountant, read_ledger, tally
from curvedp.experiments.config import RunConfig
from curvedp.experiments.jsonable import jsonable
from curvedp.experiments.runs import NOT_PRIVATE, RunResult, resume_run
from curvedp.experiments.scores import SCORE_LEDGER
from curvedp.experiments.sweeps.budget import NOT_COUNTED, Prepared
from curvedp.experiments.sweeps.study import Study, Trial
from curvedp.storage import read_json, write_folder_atomically, write_json

__all__ = ["SweepResult", "TrialRow", "conclude", "train_command", "trial_folder"]

_PRIVACY_FLAGS = {"secure": "--secure-noise"}


@dataclass(frozen=True)
class TrialRow:
    """A trial in the table.

    Attributes:
        number: from 0.
        state: "finished", or "refused": its settings do not go together.
        settings: what was drawn.
        score: of the metric; None if it was refused.
        reason: why it was.
        place: machine and folder of its worker.
        seconds: of training.
    """

    number: int
    state: str
    settings: Mapping[str, Any]
    score: float | None
    reason: str
    place: str | None
    seconds: float | None


@dataclass(frozen=True)
class SweepResult:
    """A finished sweep.

    Attributes:
        prepared: what was run.
        folder: where.
        split: what scores were computed on.
        rows: all trials, best first; empty if tuning is counted.
        best: the best trial; None if there is none. Without its number and its place
            if tuning is counted.
        best_dir: folder of its run, if it is on this machine.
        facts: of its privacy statement; with the total if tuning is counted.
        epsilon_of_all: what all trials together have spent; None where not known.
    """

    prepared: Prepared
    folder: Path
    split: str
    rows: list[TrialRow]
    best: TrialRow | None
    best_dir: Path | None
    facts: dict[str, Any] | None
    epsilon_of_all: float | None

    @property
    def counted(self) -> bool:
        """Whether epsilon counts the tuning."""
        return self.prepared.counted is not None

    @property
    def private(self) -> bool:
        """Whether there is a guarantee."""
        return self.prepared.config.base.private

    def tuning(self) -> str:
        """What is said of the tuning beside every epsilon."""
        counted = self.prepared.counted
        if not self.private:
            return f"{NOT_PRIVATE}: the trials have no guarantee"
        if counted is None:
            return NOT_COUNTED
        return (
            f"tuning is counted: ({counted.epsilon:.4g}, {counted.plan.delta:g})-DP "
            "for the best trial's model, settings and score; the other trials, and how "
            "many there were, must stay secret"
        )

    def command(self) -> str | None:
        """The command that trains with the best settings; None without a best."""
        if self.best is None:
            return None
        return train_command(self.prepared.config.base, self.best.settings)

    def to_json(self) -> dict[str, Any]:
        """As JSON values: what sweep.json holds and ``--json`` prints."""
        config, counted, plan = (
            self.prepared.config,
            self.prepared.counted,
            self.prepared.plan,
        )
        epsilon = None
        if self.private and plan is not None:
            epsilon = plan.epsilon() if counted is None else counted.epsilon
        document: dict[str, Any] = {
            "kind": "curvedp-sweep-result",
            "folder": str(self.folder),
            "recipe": config.base.recipe,
            "private": self.private,
            "tuning_counted": self.counted,
            "tuning": self.tuning(),
            "metric": config.metric,
            "metrics_computed_on": self.split,
            "scores": self._scores(),
            "search": {name: where.to_json() for name, where in config.search.items()},
            "epsilon": epsilon,
            "delta": None if plan is None else plan.delta,
            "relation": None if plan is None else plan.relation.value,
            "sigma": None if plan is None else plan.noise_multiplier,
            "best": None if self.best is None else self._best(),
            "command": self.command(),
            "statement": self.facts,
        }
        if not self.private:
            document["label"] = NOT_PRIVATE
        if config.repeats is not None:
            document["repeats"] = config.repeats.facts()
            return document
        document["epsilon_of_all_trials"] = self.epsilon_of_all
        document["trials"] = [_row_json(row) for row in self.rows]
        return document

    def _scores(self) -> str:
        base = self.prepared.config.base
        if base.validation_data:
            return "exact, on data that was declared public"
        if base.validation_is_public:
            return "exact, on a share of the data that was declared public"
        if base.validation_noise is not None:
            return (
                f"paid for: noise of {base.validation_noise:g} right answers, on a "
                "share of the private data that is not trained on"
            )
        return "exact, on private data, without a guarantee"

    def _best(self) -> dict[str, Any]:
        assert self.best is not None
        found: dict[str, Any] = {
            "settings": dict(self.best.settings),
            "score": self.best.score,
            "run_dir": None if self.best_dir is None else str(self.best_dir),
        }
        return found if self.counted else {"trial": self.best.number, **found}


def trial_folder(folder: Path, number: int) -> Path:
    """The run of a trial."""
    return folder / "trials" / f"trial-{number:05d}"


def conclude(study: Study, prepared: Prepared, folder: Path) -> SweepResult:
    """Choose the best of the finished trials, and write it down."""
    trials = study.trials()
    finished = [t for t in trials if t.state == "finished"]
    chosen = max(finished, key=lambda t: _rank(t, prepared), default=None)
    rows = sorted(map(_row, trials), key=lambda row: _order(row, prepared))
    best_dir = run = None
    if chosen is not None and trial_folder(folder, chosen.number).is_dir():
        best_dir = trial_folder(folder, chosen.number)
        run = resume_run(best_dir, model=prepared.config.base.said_model)
    facts = None if run is None else run.facts
    best = None if chosen is None else _row(chosen)
    everything = None
    if prepared.counted is not None:
        if run is not None and best_dir is not None:
            facts = _total(run, prepared)
            best_dir = _publish(best_dir, folder / "best", facts)
        rows = []
    else:
        everything = _epsilon_of_all(folder, trials)
    result = SweepResult(
        prepared, folder, prepared.built.split, rows, best, best_dir, facts, everything
    )
    write_json(folder / "sweep.json", jsonable(result.to_json()))
    return result


def _rank(trial: Trial, prepared: Prepared) -> tuple[float, str, int]:
    """Larger is better. Equal scores go by a random name of the run if tuning counts.

    Repeat and select needs one order of all outputs: the number of the trial is no part
    of an output, and the run's id, drawn with its first payment, is.
    """
    assert trial.score is not None
    score = trial.score if prepared.config.larger_is_better else -trial.score
    run_id = str((trial.extra or {}).get("run_id", ""))
    if prepared.counted is not None:
        return score, run_id, 0
    return score, "", -trial.number


def _row(trial: Trial) -> TrialRow:
    return TrialRow(
        number=trial.number,
        state=trial.state,
        settings=trial.settings,
        score=trial.score,
        reason=trial.reason,
        place=trial.place,
        seconds=(trial.extra or {}).get("seconds"),
    )


def _order(row: TrialRow, prepared: Prepared) -> tuple[bool, float, int]:
    if row.score is None:
        return True, 0.0, row.number
    sign = -1.0 if prepared.config.larger_is_better else 1.0
    return False, sign * row.score, row.number


def _row_json(row: TrialRow) -> dict[str, Any]:
    document: dict[str, Any] = {
        "trial": row.number,
        "state": row.state,
        "score": row.score,
        "settings": dict(row.settings),
        "place": row.place,
        "seconds": row.seconds,
    }
    return {**document, "reason": row.reason} if row.reason else document


def _total(run: RunResult, prepared: Prepared) -> dict[str, Any]:
    """The statement's facts with the sweep's epsilon in place of the trial's."""
    counted, repeats = prepared.counted, prepared.config.repeats
    assert counted is not None and repeats is not None
    facts = dict(run.facts or {})
    # the one thing that a run alone does not cover, and this sweep does
    chosen = "settings chosen by looking at results"
    left = [text for text in facts.get("not_covered", []) if chosen not in text]
    return {
        **facts,
        "epsilon": counted.epsilon,
        "epsilon_of_one_trial": facts.get("epsilon"),
        "epsilon_spent": counted.epsilon,
        "target_epsilon": counted.target,
        "accountant": "rdp",
        "selection": repeats.facts(),
        "not_covered": [
            *left,
            "the sweep's other trials and their number: whoever sees the folder, or "
            "the storage of the study, sees more than was paid for",
        ],
    }


def _publish(source: Path, target: Path, facts: dict[str, Any]) -> Path:
    """Copy the best run to a folder whose name says nothing about the others."""

    def write(folder: Path) -> None:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        result = read_json(folder / "result.json")
        total = {"run_dir": str(target), "epsilon": facts["epsilon"]}
        write_json(
            folder / "result.json", jsonable({**result, **total, "statement": facts})
        )

    write_folder_atomically(target, write)
    return target


def _epsilon_of_all(folder: Path, trials: list[Trial]) -> float | None:
    """By the ledgers of all trials, if they are all here and private.

    Nobody is in the training part and in the validation part, so the dearer one counts.
    """
    folders = [trial_folder(folder, trial.number) for trial in trials]
    here = [path for path in folders if (path / "ledger.jsonl").exists()]
    refused = sum(trial.state == "refused" for trial in trials)
    if not here or len(here) < len(trials) - refused:
        return None
    parts = []
    for name in ("ledger.jsonl", SCORE_LEDGER):
        ledgers = [read_ledger(p / name) for p in here if (p / name).exists()]
        if any(r.is_oracle or r.is_unsafe for r in ledgers):
            return None
        if ledgers:
            header = ledgers[0].header
            total = tally(ledger.event() for ledger in ledgers)
            accountant = get_accountant(header.accountant)
            parts.append(accountant.epsilon(total, header.relation, header.delta))
    return max(parts)


def train_command(
    base: RunConfig, settings: Mapping[str, Any], test: str | None = None
) -> str:
    """``curvedp train`` on all of the training data, judged by the test part.

    Args:
        base: of the sweep.
        settings: of the best trial.
        test: the test file, which a sweep does not know.
    """
    words = ["curvedp", "train", "--data", base.data]
    options = {**base.data_options, **({} if test is None else {"test": test})}
    words += [w for k, v in options.items() for w in ("-D", f"{k}={toml_value(v)}")]
    if base.model:
        words += ["--model", base.model]
    for name, value in base.model_options.items():
        words += ["-M", f"{name}={toml_value(value)}"]
    if base.public_data:
        words += ["--public-data", base.public_data]
    for name, value in base.public_data_options.items():
        words += ["-P", f"{name}={toml_value(value)}"]
    words += ["--recipe", base.recipe]
    for name, value in {**base.recipe_settings, **settings}.items():
        words += ["--set", f"{name}={toml_value(value)}"]
    for name, value in base.privacy.items():
        flag = _PRIVACY_FLAGS.get(name, f"--{name.replace('_', '-')}")
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            words += [flag, str(value)]
    for name in ("loss", "augment", "precision", "norm_precision"):
        if getattr(base, name):
            words += [f"--{name.replace('_', '-')}", getattr(base, name)]
    if base.views > 1:
        words += ["--views", str(base.views)]
    return shlex.join(words)


def toml_value(value: Any) -> str:
    """As ``-D``, ``-M`` and ``--set`` read it."""
    if isinstance(value, Mapping):
        parts = (f"{json.dumps(str(k))} = {toml_value(v)}" for k, v in value.items())
        return "{" + ", ".join(parts) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(v) if not isinstance(v, str) else
                               json.dumps(v) for v in value) + "]"  # fmt: skip
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
