"""Data sets for the command line and the examples; nothing is measured from them."""

from curvedp.data.load import FORMATS, load
from curvedp.data.schema import Categories, Range, Schema
from curvedp.data.source import (
    ArrayDataset,
    DataSource,
    Task,
    check_labels,
    parse_task,
    split_validation,
)

__all__ = [
    "FORMATS",
    "ArrayDataset",
    "Categories",
    "DataSource",
    "Range",
    "Schema",
    "Task",
    "check_labels",
    "load",
    "parse_task",
    "split_validation",
]
