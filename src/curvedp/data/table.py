"""CSV and JSON Lines tables, read by a declared schema.

One row is one example. Only declared columns are read; messages name the file, the line
and the column, and never a cell's content.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from curvedp.data.files import bare_suffix, brief, text_lines
from curvedp.data.schema import Categories, Range, Schema
from curvedp.data.source import ArrayDataset, DataSource, Task
from curvedp.errors import DataError
from curvedp.storage import parse_json

__all__ = ["RowReader", "load_table", "table_rows"]

_ROWS_PER_BLOCK = 4096
_JSON_SUFFIXES = (".jsonl", ".ndjson")


def load_table(
    path: Path,
    *,
    test: str | Path | None = None,
    schema: Schema | Mapping[str, Any] | None = None,
    with_test: bool = True,
    **declarations: Any,
) -> DataSource:
    """Load a CSV or JSON Lines table, packed by gzip or xz or not at all.

    Args:
        path: ``.csv``, ``.tsv``, ``.jsonl`` or ``.ndjson``, with ``.gz`` or ``.xz``
            after it if packed; any other name is read as CSV.
        test: A table of the same schema for testing.
        schema: What is declared about the columns, see :class:`Schema`.
        with_test: False leaves the file ``test`` closed.
        **declarations: The schema's fields, in place of ``schema``.

    Raises:
        DataError: If the declaration is incomplete, or a row does not fit it.
    """
    plan = _schema_of(path, schema, declarations)
    return DataSource(
        name=path.name,
        train=_load_part(path, plan),
        test=_load_part(Path(test), plan) if with_test and test is not None else None,
        task=plan.task,
        num_outputs=plan.num_outputs,
        input_shape=(plan.num_inputs,),
        facts={
            "format": "JSON Lines" if _is_json(path) else "CSV",
            "scaling": "numbers by declared ranges, categories one-hot",
        },
    )


def _schema_of(
    path: Path,
    schema: Schema | Mapping[str, Any] | None,
    declarations: dict[str, Any],
) -> Schema:
    if schema is not None and declarations:
        raise DataError(
            f"{path}: both a schema and {sorted(declarations)} are given",
            "put all declarations into the schema",
        )
    if isinstance(schema, Schema):
        return schema
    table = dict(declarations if schema is None else schema)
    if bare_suffix(path) == ".tsv":
        table.setdefault("delimiter", "\t")
    try:
        return Schema.from_mapping(table)
    except DataError as error:
        raise DataError(f"{path}: {error.problem}", error.advice) from error


def _is_json(path: Path) -> bool:
    return bare_suffix(path) in _JSON_SUFFIXES


def _load_part(path: Path, schema: Schema) -> ArrayDataset:
    reader = RowReader(path, schema)
    # Blocks of arrays: a Python list of a large table's cells is many times its size.
    inputs: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    used = _ROWS_PER_BLOCK
    for line, row in table_rows(path, schema):
        if used == _ROWS_PER_BLOCK:
            inputs.append(np.zeros((used, schema.num_inputs), np.float32))
            targets.append(np.zeros((used, len(schema.target)), np.float64))
            used = 0
        reader.inputs(line, row, inputs[-1][used])
        reader.targets(line, row, targets[-1][used])
        used += 1
    if not inputs:
        raise DataError(f"{path}: the table has no rows", "give a table with records")
    x, y = np.concatenate(inputs), np.concatenate(targets)
    rows_read = len(x) - _ROWS_PER_BLOCK + used
    x, y = x[:rows_read].copy(), y[:rows_read]
    if schema.task is Task.CLASSIFICATION:
        return ArrayDataset(
            torch.from_numpy(x), torch.from_numpy(y[:, 0].astype(np.int64))
        )
    return ArrayDataset(torch.from_numpy(x), torch.from_numpy(y.astype(np.float32)))


class RowReader:
    """Codes one row at a time into slices of the arrays."""

    def __init__(self, path: Path, schema: Schema) -> None:
        self._path = path
        self._schema = schema
        self._label_of = {
            word: label for label, group in enumerate(schema.classes) for word in group
        }
        self._place_of = {
            name: {word: place for place, word in enumerate(column.names)}
            for name, column in schema.columns.items()
            if isinstance(column, Categories)
        }

    def inputs(self, line: int, row: Mapping[str, Any], x: np.ndarray) -> None:
        """Fill ``x`` from the declared input columns of one row."""
        at = 0
        for name, column in self._schema.columns.items():
            cell = self._cell(line, row, name)
            if isinstance(column, Range):
                value = self._number(line, name, cell, column.missing)
                x[at] = column.scale(value)
            else:
                place = self._place_of[name].get(_word(cell))
                if place is not None:
                    x[at + place] = 1.0
            at += column.width

    def targets(self, line: int, row: Mapping[str, Any], y: np.ndarray) -> None:
        """Fill ``y`` from the target columns of one row."""
        for at, name in enumerate(self._schema.target):
            y[at] = self._target(line, name, self._cell(line, row, name))

    def _target(self, line: int, name: str, cell: object) -> float:
        schema = self._schema
        if schema.task is Task.CLASSIFICATION:
            label = self._label_of.get(_word(cell))
            if label is None:
                raise self._offence(line, name, "is none of the declared classes")
            return label
        value = self._number(line, name, cell, None)
        if schema.target_range is not None:
            return schema.target_range.scale(value)
        if value not in (0.0, 1.0):
            raise self._offence(line, name, "is neither 0 nor 1")
        return value

    def _cell(self, line: int, row: Mapping[str, Any], name: str) -> object:
        if name not in row:
            raise self._offence(line, name, "is absent")
        return row[name]

    def _number(
        self, line: int, name: str, cell: object, missing: float | None
    ) -> float:
        if cell is None or _word(cell) in self._schema.missing_marks:
            if missing is None:
                raise self._offence(
                    line, name, "is empty", "declare missing=... for this column"
                )
            return missing
        if not _is_plain(cell):
            raise self._offence(line, name, "is not a number")
        try:
            return float(cell)  # type: ignore[arg-type]
        except (ValueError, OverflowError):
            raise self._offence(line, name, "is not a number") from None

    def _offence(
        self, line: int, name: str, problem: str, advice: str = ""
    ) -> DataError:
        return DataError(
            f"{self._path}, line {line}: column {name!r} {problem}",
            advice or "correct the table or the declaration",
        )


def _is_plain(cell: object) -> bool:
    """Whether a cell may be a number; 1_0 and digits of other scripts are none."""
    if isinstance(cell, str):
        return cell.isascii() and "_" not in cell
    return isinstance(cell, int | float)


def _word(cell: object) -> str:
    """A cell as the word that classes and categories are compared with."""
    if isinstance(cell, bool):
        return str(cell).lower()
    return "" if cell is None else str(cell).strip()


def table_rows(
    path: Path, schema: Schema, *, with_targets: bool = True
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The rows of a table by column, each with the number of its line.

    Args:
        path: The file.
        schema: What is declared about it.
        with_targets: Whether the target columns have to be there as well.

    Raises:
        DataError: If the file is not a table, or a declared column is absent.
    """
    if _is_json(path):
        return _json_rows(path)
    names = (*schema.columns, *(schema.target if with_targets else ()))
    return _csv_rows(path, schema, names)


def _csv_rows(
    path: Path, schema: Schema, names: tuple[str, ...]
) -> Iterator[tuple[int, dict[str, str]]]:
    mark = schema.comment
    # A comment becomes an empty line, which is skipped below but still counted.
    lines = (
        "\n" if mark and line.startswith(mark) else line for line in text_lines(path)
    )
    reader = csv.reader(
        lines, delimiter=schema.delimiter, skipinitialspace=True, strict=True
    )
    header = schema.header
    try:
        for cells in reader:
            line = reader.line_num
            if not cells:
                continue
            if header is None:
                header = tuple(cell.strip() for cell in cells)
                if len(set(header)) != len(header):
                    raise DataError(
                        f"{path}: the header names a column twice", "rename one of them"
                    )
                _refuse_unknown_columns(path, names, header)
                continue
            if len(cells) != len(header):
                raise DataError(
                    f"{path}, line {line}: {len(cells)} cells where the header has "
                    f"{len(header)}",
                    "correct the row, or declare header or delimiter",
                )
            yield line, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise DataError(
            f"{path}, line {reader.line_num}: malformed CSV ({error})",
            "are the quotes balanced, and is the delimiter declared?",
        ) from error


def _refuse_unknown_columns(
    path: Path, names: tuple[str, ...], header: tuple[str, ...]
) -> None:
    absent = [name for name in names if name not in header]
    if absent:
        raise DataError(
            f"{path}: the header has no column {absent[0]!r}",
            "correct the declaration or the delimiter; if the first row is data, "
            "declare header (its text is not shown: it may be a record)",
        )


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, text in enumerate(text_lines(path), start=1):
        if not text.strip():
            continue
        try:
            row = parse_json(text, constants=True)
        except ValueError as error:
            raise DataError(
                f"{path}, line {line}: malformed JSON ({_reason(error)})",
                'one record per line: {"age": 41, "label": "yes"}',
            ) from error
        if not isinstance(row, dict):
            raise DataError(
                f"{path}, line {line}: not a JSON object",
                'one record per line: {"age": 41, "label": "yes"}',
            )
        yield line, row


def _reason(error: ValueError) -> str:
    """Why it is no JSON; what a decoder says after a colon is of the line."""
    return brief(getattr(error, "msg", error)).partition(":")[0]
