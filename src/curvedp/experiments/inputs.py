"""Inputs without targets, for predictions: arrays, tables, or any readable data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from curvedp import data as datasets
from curvedp.data import Schema
from curvedp.data.files import bare_suffix
from curvedp.data.npz import read_npz
from curvedp.data.table import RowReader, table_rows
from curvedp.errors import DataError, withheld
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
    with withheld("reading the inputs"):
        return _read_inputs(trained, path)


def _read_inputs(trained: Trained, path: Path | None) -> Tensor:
    if path is None:
        inputs = _test_inputs(trained)
    elif not (path.is_file() or path.is_dir()):
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
            f"{path}: there is no array 'x' of examples",
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
    if bare_suffix(path) == ".tsv":
        schema = replace(schema, delimiter="\t")
    reader, rows = RowReader(path, schema), []
    for line, row in table_rows(path, schema, with_targets=False):
        rows.append(np.zeros(schema.num_inputs, np.float32))
        reader.inputs(line, row, rows[-1])
    if not rows:
        raise DataError(f"{path}: the table has no rows", "give a table with records")
    return torch.from_numpy(np.stack(rows))
