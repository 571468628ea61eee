"""Inputs without targets, for predictions: arrays, tables, or any readable data set."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvedp import data as datasets
from curvedp.data import Range, Schema
from curvedp.data.files import bare_suffix, text_lines
from curvedp.data.npz import read_npz
from curvedp.errors import DataError
from curvedp.experiments.runs import Trained

__all__ = ["read_inputs"]

_TABLES = (".csv", ".tsv", ".jsonl", ".ndjson")


def read_inputs(trained: Trained, path: Path | None) -> Tensor:
    """The inputs in a file, read as the run's declaration says; no targets needed.

    Args:
        trained: the run.
        path: ``.npz`` with an array ``x``, a table with the declared columns, or a
            folder in the format of the training data. None takes the run's test split.

    Raises:
        DataError: the file cannot be read, or has another shape than the model takes.
    """
    if path is None:
        inputs = _test_inputs(trained)
    elif not path.exists():
        raise DataError(f"{path}: there is no such file or folder", "is it spelt so?")
    elif path.is_dir():
        source = datasets.load(path, **trained.config.data_options)
        inputs = (source.test or source.train).inputs
    elif bare_suffix(path) == ".npz":
        inputs = _array_inputs(path)
    elif bare_suffix(path) in _TABLES:
        inputs = _table_inputs(path, _schema(trained))
    else:
        raise DataError(
            f"{path}: inputs are read from .npz, {', '.join(_TABLES)} and folders"
        )
    if tuple(inputs.shape[1:]) != trained.shape.input_shape:
        raise DataError(
            f"an input has shape {list(inputs.shape[1:])}, and the model takes "
            f"{list(trained.shape.input_shape)}",
            "prepare the inputs as the training data was",
        )
    return inputs


def _test_inputs(trained: Trained) -> Tensor:
    source = datasets.load(trained.config.data, **trained.config.data_options)
    if source.test is None:
        raise DataError(
            f"{source.name} has no test split to predict", "give --input FILE"
        )
    return source.test.inputs


def _array_inputs(path: Path) -> Tensor:
    arrays = read_npz(path)
    name = next((n for n in ("x", "x_test") if n in arrays), None)
    if name is None or arrays[name].ndim < 2:
        raise DataError(
            f"{path}: there is no array 'x' of examples (it has {sorted(arrays)})",
            "write it with numpy.savez(path, x=...)",
        )
    x = arrays[name]
    if x.dtype == np.uint8:
        return torch.from_numpy(x).float().div_(255.0)
    if x.dtype.kind != "f":
        raise DataError(f"{path}: x has type {x.dtype}", "store uint8 or floats")
    return torch.from_numpy(x.astype(np.float32))


def _schema(trained: Trained) -> Schema:
    options = {k: v for k, v in trained.config.data_options.items() if k != "test"}
    options.pop("format", None)
    declared = options.get("schema", options)
    if not isinstance(declared, Mapping) or "columns" not in declared:
        raise DataError(
            "the run was not trained on a table with declared columns",
            "give the inputs as .npz with an array x",
        )
    return Schema.from_mapping(declared)


def _table_inputs(path: Path, schema: Schema) -> Tensor:
    rows = [_coded(path, line, row, schema) for line, row in _rows(path, schema)]
    if not rows:
        raise DataError(f"{path}: the table has no rows")
    return torch.tensor(rows, dtype=torch.float32)


def _rows(path: Path, schema: Schema) -> Iterator[tuple[int, Mapping[str, Any]]]:
    lines = text_lines(path)
    if bare_suffix(path) in (".jsonl", ".ndjson"):
        for number, text in enumerate(lines, start=1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except ValueError as error:
                raise DataError(f"{path}, line {number}: malformed JSON") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number}: not a JSON object")
            yield number, row
        return
    mark = schema.comment
    reader = csv.DictReader(
        ("\n" if mark and line.startswith(mark) else line for line in lines),
        fieldnames=schema.header,
        delimiter="\t" if bare_suffix(path) == ".tsv" else schema.delimiter,
        skipinitialspace=True,
        strict=True,
    )
    try:
        for row in reader:
            yield reader.line_num, {k.strip(): v for k, v in row.items() if k}
    except csv.Error as error:
        raise DataError(
            f"{path}, line {reader.line_num}: malformed CSV ({error})"
        ) from error


def _coded(
    path: Path, line: int, row: Mapping[str, Any], schema: Schema
) -> list[float]:
    coded: list[float] = []
    for name, column in schema.columns.items():
        if name not in row:
            raise DataError(f"{path}, line {line}: the column {name!r} is absent")
        cell = row[name]
        text = str(cell).lower() if isinstance(cell, bool) else str(cell).strip()
        if isinstance(column, Range):
            coded.append(_scaled(f"{path}, line {line}", name, cell, column, schema))
        else:
            coded += [float(text == word) for word in column.names]
    return coded


def _scaled(place: str, name: str, cell: Any, column: Range, schema: Schema) -> float:
    if cell is None or str(cell).strip() in schema.missing_marks:
        if column.missing is None:
            raise DataError(f"{place}: {name!r} is empty", "declare missing = ...")
        return column.scale(column.missing)
    try:
        return column.scale(float(cell))
    except (TypeError, ValueError):
        raise DataError(f"{place}: {name!r} is not a number") from None
