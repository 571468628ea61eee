"""What the user declares about a table: columns, ranges, categories, the target.

The declaration replaces measurement. Ranges, vocabularies and class lists found in
private data would depend on single records, and nobody would have paid for them. So
they come from knowledge about the world (an age lies in 0..120), and records that
contradict them are clamped (numbers) or become all zeros (unknown categories).

In a config file::

    [data]
    target = "income"
    classes = ["<=50K", ">50K"]

    [data.columns]
    age = { low = 0, high = 100 }
    job = { categories = ["clerk", "farmer"] }
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from curvedp.data.source import Task, parse_task
from curvedp.errors import DataError
from curvedp.values import is_number

__all__ = ["Categories", "Column", "Range", "Schema", "parse_range"]


@dataclass(frozen=True)
class Range:
    """A number with declared limits, clamped to them and scaled onto an interval.

    Attributes:
        low: Smallest value.
        high: Largest value.
        missing: What an empty cell counts as, before scaling. None refuses such cells.
        onto: The interval that ``[low, high]`` is scaled onto: ``(-1, 1)`` or
            ``(0, 1)``, say.
    """

    low: float
    high: float
    missing: float | None = None
    onto: tuple[float, float] = (-1.0, 1.0)

    def __post_init__(self) -> None:
        if not isinstance(self.onto, tuple) or len(self.onto) != 2:
            raise DataError(f"onto is {self.onto!r}", "use two numbers: (0.0, 1.0)")
        limits = (self.low, self.high, *self.onto)
        if not all(is_number(value) for value in limits):
            raise DataError(f"a range's limits are not finite numbers: {limits}")
        if not (self.low < self.high and self.onto[0] < self.onto[1]):
            raise DataError(f"a range is empty: {limits}", "low must be below high")
        if self.missing is not None and not is_number(self.missing):
            raise DataError(f"missing is {self.missing!r}, not a finite number")

    @property
    def width(self) -> int:
        """Numbers in the input for this column."""
        return 1

    def scale(self, value: float) -> float:
        """Clamp to the limits and map onto the interval; NaN stays NaN."""
        # This order of arguments keeps NaN: both comparisons with it are false.
        clamped = min(max(value, self.low), self.high)
        low, high = self.onto
        return low + (clamped - self.low) / (self.high - self.low) * (high - low)

    def scale_array(self, values: np.ndarray) -> np.ndarray:
        """The same for an array, in float32."""
        low, high = self.onto
        clamped = np.clip(values, self.low, self.high)
        unit = (clamped - self.low) / (self.high - self.low)
        return np.asarray(low + unit * (high - low), dtype=np.float32)


@dataclass(frozen=True)
class Categories:
    """A word with a declared list, coded one-hot; an unlisted word is all zeros."""

    names: tuple[str, ...]

    def __init__(self, names: Sequence[Any]) -> None:
        listed = _texts("categories", names)
        if len(set(listed)) != len(listed):
            raise DataError(f"categories are listed twice: {list(listed)}")
        object.__setattr__(self, "names", listed)

    @property
    def width(self) -> int:
        """Numbers in the input for this column."""
        return len(self.names)


Column = Range | Categories


@dataclass(frozen=True)
class Schema:
    """All that is declared about a table.

    Attributes:
        target: The target's column, or several for regression and multi-label tasks.
        columns: The input columns in the order of the input; others are not read.
        task: Derived from ``classes`` or ``target_range`` when it is not given.
        classes: For classification, the labels in order. Each is a tuple of spellings
            that count as the same class.
        target_range: For regression, the limits of the targets.
        header: Column names of a CSV file that has none in its first row.
        delimiter: What separates the cells of a CSV file.
        comment: Lines of a CSV file that start with this text are no records.
        missing_marks: Cells that count as empty, in numeric columns.
    """

    target: tuple[str, ...]
    columns: Mapping[str, Column]
    task: Task
    classes: tuple[tuple[str, ...], ...] = ()
    target_range: Range | None = None
    header: tuple[str, ...] | None = None
    delimiter: str = ","
    comment: str = ""
    missing_marks: tuple[str, ...] = ("",)

    def __post_init__(self) -> None:
        if not self.columns:
            raise DataError("the schema declares no input columns", _HOW_TO_COLUMNS)
        both = set(self.target) & set(self.columns)
        if both:
            raise DataError(f"{sorted(both)} are both inputs and targets")
        if (self.task is Task.CLASSIFICATION) != bool(self.classes):
            raise DataError(
                f"a {self.task.value} task with classes {list(self.classes)}",
                "declare classes for a classification, and for nothing else",
            )
        if (self.task is Task.REGRESSION) != (self.target_range is not None):
            raise DataError(
                f"a {self.task.value} task with target_range {self.target_range}",
                "declare target_range for a regression, and for nothing else",
            )
        spellings = [word for group in self.classes for word in group]
        if len(set(spellings)) != len(spellings):
            raise DataError(f"a class is listed twice: {spellings}")
        if self.task is Task.CLASSIFICATION:
            if len(self.target) != 1:
                raise DataError("a classification has one target column")
            if len(self.classes) < 2:
                raise DataError("a classification needs two classes or more")
        if len(self.delimiter) != 1 or self.delimiter in '\r\n"':
            raise DataError(f"the delimiter {self.delimiter!r} is not one character")

    @property
    def num_inputs(self) -> int:
        """Length of one input."""
        return sum(column.width for column in self.columns.values())

    @property
    def num_outputs(self) -> int:
        """Classes, or target columns."""
        return len(self.classes) or len(self.target)

    @classmethod
    def from_mapping(cls, table: Mapping[str, Any]) -> Schema:
        """Read a schema from a mapping, such as a table of a TOML file.

        Raises:
            DataError: If a key is unknown, or something needed is undeclared.
        """
        known = {item.name for item in fields(cls)}
        unknown = sorted(set(table) - known)
        if unknown:
            raise DataError(
                f"the schema has unknown keys {unknown}", f"known: {sorted(known)}"
            )
        if "target" not in table:
            raise DataError("the schema names no target column", "declare target=...")
        declared = table.get("columns") or {}
        if not isinstance(declared, Mapping):
            raise DataError("columns is not a table of columns", _HOW_TO_COLUMNS)
        optional: dict[str, Any] = {}
        if table.get("classes") is not None:
            optional["classes"] = _parse_classes(table["classes"])
        if table.get("target_range") is not None:
            optional["target_range"] = parse_range(
                "target_range", table["target_range"]
            )
        if table.get("header") is not None:
            optional["header"] = _texts("header", table["header"])
        if "missing_marks" in table:
            optional["missing_marks"] = _texts("missing_marks", table["missing_marks"])
        for name in ("delimiter", "comment"):
            if name in table:
                optional[name] = str(table[name])
        target = table["target"]
        return cls(
            target=(target,) if isinstance(target, str) else _texts("target", target),
            columns={
                str(name): _parse_column(str(name), declaration)
                for name, declaration in declared.items()
            },
            task=_derive_task(table),
            **optional,
        )


_HOW_TO_COLUMNS = (
    "declare columns such as age = { low = 0, high = 100 } and "
    'job = { categories = ["a", "b"] }; they are not guessed from the data, '
    "because a range or a list found in private records is a release"
)


def parse_range(name: str, declaration: object) -> Range:
    """Read a range from ``Range``, ``{"low": 0, "high": 1}`` or ``[0, 1]``.

    Raises:
        DataError: If the declaration has another form.
    """
    if isinstance(declaration, Range):
        return declaration
    if isinstance(declaration, list | tuple) and len(declaration) == 2:
        return Range(declaration[0], declaration[1])
    if isinstance(declaration, Mapping) and {"low", "high"} <= set(declaration) <= {
        "low",
        "high",
        "missing",
        "onto",
    }:
        settings = dict(declaration)
        if isinstance(settings.get("onto"), list):
            settings["onto"] = tuple(settings["onto"])
        return Range(**settings)
    raise DataError(
        f"{name} is declared as {declaration!r}",
        "a range is { low = 0, high = 100 }, with missing = 50 and onto = [0, 1] "
        "if wanted",
    )


def _parse_column(name: str, declaration: object) -> Column:
    if isinstance(declaration, Categories):
        return declaration
    if isinstance(declaration, Mapping) and set(declaration) == {"categories"}:
        return Categories(declaration["categories"])
    if isinstance(declaration, Range | Mapping):
        return parse_range(name, declaration)
    raise DataError(f"column {name!r} is declared as {declaration!r}", _HOW_TO_COLUMNS)


def _parse_classes(declared: object) -> tuple[tuple[str, ...], ...]:
    if isinstance(declared, str) or not isinstance(declared, Sequence):
        raise DataError(f"classes is {declared!r}", 'use a list: ["no", "yes"]')
    return tuple(
        _texts("classes", item) if isinstance(item, list | tuple) else (_text(item),)
        for item in declared
    )


def _derive_task(table: Mapping[str, Any]) -> Task:
    if table.get("task") is not None:
        return parse_task(table["task"])
    if table.get("classes") is not None:
        return Task.CLASSIFICATION
    if table.get("target_range") is not None:
        return Task.REGRESSION
    raise DataError(
        f"nothing is declared about the target {table['target']!r}; a list of classes "
        "or a range found in private records is a release",
        'declare classes = ["no", "yes"], or target_range = { low = 0, high = 100 }, '
        'or task = "multi-label" with target columns of zeros and ones',
    )


def _texts(name: str, values: object) -> tuple[str, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise DataError(f"{name} is {values!r}", "use a list that is not empty")
    return tuple(_text(value) for value in values)


def _text(value: object) -> str:
    # JSON and TOML write truth in lower case; so do tables that come from them.
    return str(value).lower() if isinstance(value, bool) else str(value)
