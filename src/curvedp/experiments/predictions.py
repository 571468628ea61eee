"""Predictions of a trained model, and the files they go into."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import expit, softmax
from torch import Tensor

from curvedp.data import Task
from curvedp.data.schema import parse_range
from curvedp.errors import ConfigurationError, withheld
from curvedp.experiments.runs import Trained
from curvedp.storage import write_atomically

__all__ = [
    "FORMATS",
    "check_output",
    "predict_inputs",
    "to_text",
    "write_predictions",
]

#: Files that predictions can be written to.
FORMATS = (".csv", ".jsonl", ".json")
_ROWS = 512


def predict_inputs(trained: Trained, inputs: Tensor) -> list[dict[str, Any]]:
    """One record for each input.

    A classification gives ``prediction`` (the declared class name if there is one) and
    its ``probability``; a multi-label task a probability for each label; a regression
    its values in the units of the declared target range.
    """
    device = next(trained.model.parameters()).device
    trained.model.eval()
    with torch.no_grad(), withheld("the model"):
        cuts = range(0, len(inputs), _ROWS)
        parts = [trained.model(inputs[i : i + _ROWS].to(device)) for i in cuts]
    outputs = torch.cat(parts).float().cpu().numpy().reshape(len(inputs), -1)
    task = trained.shape.task
    if task is Task.CLASSIFICATION:
        chances = softmax(outputs, axis=1)
        names = _class_names(trained)
        return [
            {
                "index": i,
                "prediction": names[k] if names else int(k),
                "probability": float(chances[i, k]),
            }
            for i, k in enumerate(outputs.argmax(1))
        ]
    values = expit(outputs) if task is Task.MULTI_LABEL else _unscaled(trained, outputs)
    columns = _target_names(trained)
    return [
        {"index": i, **{c: float(v) for c, v in zip(columns, row, strict=True)}}
        for i, row in enumerate(values)
    ]


def to_text(records: list[dict[str, Any]], suffix: str) -> str:
    """The records as the text of a file."""
    if suffix == ".json":
        return json.dumps(records, indent=2) + "\n"
    if suffix == ".jsonl":
        return "".join(json.dumps(record) + "\n" for record in records)
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def check_output(path: Path, *, overwrite: bool) -> None:
    """Refuse an output that could not be written, before anything is computed."""
    if path.suffix not in FORMATS:
        raise ConfigurationError(
            f"{path}: the format does not show in the name",
            f"end it in one of: {', '.join(FORMATS)}",
        )
    if path.exists() and not overwrite:
        raise ConfigurationError(
            f"{path} exists already", "choose another name, or add --overwrite"
        )


def write_predictions(path: Path, records: list[dict[str, Any]]) -> None:
    """Write the file, whole or not at all."""
    text = to_text(records, path.suffix)
    write_atomically(path, lambda p: _write(p, text))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _declared(trained: Trained) -> dict[str, Any]:
    options = dict(trained.config.data_options)
    return dict(options.get("schema", options))


def _class_names(trained: Trained) -> list[str]:
    classes = _declared(trained).get("classes") or []
    first = [c[0] if isinstance(c, list | tuple) else c for c in classes]
    return [str(c) for c in first]


def _target_names(trained: Trained) -> list[str]:
    target = _declared(trained).get("target")
    names = [target] if isinstance(target, str) else list(target or ())
    count = trained.shape.num_outputs
    return names if len(names) == count else [f"output_{k}" for k in range(count)]


def _unscaled(trained: Trained, outputs: np.ndarray) -> np.ndarray:
    """Back into the units of the declared range, which the targets were scaled from."""
    declared = _declared(trained).get("target_range")
    if declared is None:
        return outputs
    limits = parse_range("target_range", declared)
    low, high = limits.onto
    unit = (outputs - low) / (high - low)
    return np.asarray(limits.low + unit * (limits.high - limits.low))
