"""Watching a run: logs of public quantities, and stopping early on public data.

What an observer gets is a :class:`Progress`: steps and learning rates, which are
settings, and nothing that depends on private data without noise. The training loss is
never logged here, also when it is shown on request.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from curvedp.errors import ConfigurationError, missing_extra
from curvedp.layers import PerExampleLoss
from curvedp.storage import as_storage_error
from curvedp.train.metrics import evaluate

__all__ = ["CsvLog", "EarlyStopping", "Progress", "TensorBoardLog"]


@dataclass(frozen=True)
class Progress:
    """What may be shown while training: public quantities.

    Attributes:
        step: logical steps made.
        steps: logical steps planned.
        learning_rate: of the first parameter group.
        private_loss: mean training loss of the step, only if it was asked for.
    """

    step: int
    steps: int
    learning_rate: float = 0.0
    private_loss: float | None = None


class CsvLog:
    """Writes a line a step: step, planned steps, learning rate."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        with as_storage_error(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not self._path.exists():
                self._append(["step", "steps", "learning_rate"])

    def __call__(self, progress: Progress) -> None:
        with as_storage_error(self._path):
            self._append([progress.step, progress.steps, progress.learning_rate])

    def _append(self, row: list[Any]) -> None:
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow(row)


class TensorBoardLog:
    """The same for TensorBoard; needs the package ``tensorboard``."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise missing_extra("tensorboard", "tensorboard") from None
        self._writer: Any = SummaryWriter(str(folder))

    def __call__(self, progress: Progress) -> None:
        # dated by the step: how long steps take tells the number of examples
        at = {"global_step": progress.step, "walltime": float(progress.step)}
        self._writer.add_scalar("learning_rate", progress.learning_rate, **at)
        self._writer.add_scalar("steps_left", progress.steps - progress.step, **at)
        self._writer.flush()


@dataclass
class EarlyStopping:
    """Stop when a metric on data that is *declared public* no longer improves.

    A decision that looks at private data would be a release. One that looks at public
    data and released parameters is free; the epsilon that holds then is the planned
    one, which is the one that statements print.

    Attributes:
        public_data: pairs (inputs, targets) that nobody needs to be protected from.
        metric: "accuracy", "auc", "f1" (higher is better) or "loss" (lower is better).
        every: steps between looks.
        patience: looks without improvement after which the run stops.
    """

    public_data: Any
    metric: str = "accuracy"
    every: int = 10
    patience: int = 5

    def __post_init__(self) -> None:
        for name in ("every", "patience"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(
                    f"{name} must be a whole number from 1 on, not {value!r}"
                )

    def watcher(self, model: nn.Module, loss: PerExampleLoss) -> Callable[[int], bool]:
        """A function of the step that says when to stop; fresh for each run."""
        best, looks = float("-inf"), 0

        def look(step: int) -> bool:
            nonlocal best, looks
            if step % self.every:
                return False
            value = evaluate(model, self.public_data, loss, (self.metric,))[self.metric]
            score = -value if self.metric == "loss" else value
            best, looks = (score, 0) if score > best else (best, looks + 1)
            return looks >= self.patience

        return look
