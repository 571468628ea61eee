import math
import tomllib

import numpy as np
import pytest

from curvedp.data import Categories, Range, Schema, Task
from curvedp.errors import DataError

COLUMNS = {"age": {"low": 0, "high": 100}}
CONFIG = """
target = "income"
classes = [["<=50K", "<=50K."], ">50K"]
missing_marks = ["", "?"]
delimiter = ";"
comment = "#"

[columns]
age = { low = 0, high = 100, missing = 40 }
hours = { low = 0, high = 99, onto = [0, 1] }
job = { categories = ["clerk", "farmer", 3, true] }
"""


def test_a_schema_is_read_from_toml():
    schema = Schema.from_mapping(tomllib.loads(CONFIG))
    assert schema == Schema(
        target=("income",),
        columns={
            "age": Range(0, 100, missing=40),
            "hours": Range(0, 99, onto=(0, 1)),
            "job": Categories(["clerk", "farmer", "3", "true"]),
        },
        task=Task.CLASSIFICATION,
        classes=(("<=50K", "<=50K."), (">50K",)),
        missing_marks=("", "?"),
        delimiter=";",
        comment="#",
    )
    assert (schema.num_inputs, schema.num_outputs) == (6, 2)


def test_objects_and_tables_declare_alike():
    by_object = Schema.from_mapping(
        {"target": ["a", "b"], "target_range": [0, 1], "columns": {"x": Range(0, 2)}}
    )
    by_table = Schema.from_mapping(
        {
            "target": ["a", "b"],
            "target_range": {"low": 0, "high": 1},
            "columns": {"x": {"low": 0, "high": 2}},
            "task": "regression",
        }
    )
    assert by_object == by_table
    assert (by_object.task, by_object.num_outputs) == (Task.REGRESSION, 2)


@pytest.mark.parametrize(
    ("value", "scaled"),
    [(10, -1), (20, 0), (30, 1), (-5, -1), (1e9, 1), (math.inf, 1), (25, 0.5)],
)
def test_numbers_are_clamped_and_scaled(value, scaled):
    column = Range(10, 30)
    assert column.scale(value) == scaled
    assert column.scale_array(np.array([value])).tolist() == [scaled]
    assert Range(10, 30, onto=(0, 1)).scale(value) == (scaled + 1) / 2


def test_nan_stays_nan():
    assert math.isnan(Range(0, 1).scale(math.nan))
    assert np.isnan(Range(0, 1).scale_array(np.array([np.nan]))).all()


@pytest.mark.parametrize(
    "settings",
    [
        {"low": 1, "high": 1},
        {"low": 2, "high": 1},
        {"low": 0, "high": math.inf},
        {"low": math.nan, "high": 1},
        {"low": "0", "high": 1},
        {"low": 0, "high": True},
        {"low": 0, "high": 1, "missing": "x"},
        {"low": 0, "high": 1, "onto": (1, 0)},
        {"low": 0, "high": 1, "onto": 5},
        {"low": 0, "high": 1, "onto": (0, 1, 2)},
    ],
)
def test_impossible_ranges_are_refused(settings):
    with pytest.raises(DataError):
        Range(**settings)


@pytest.mark.parametrize("names", [[], "ab", ["a", "a"], [1, "1"], None])
def test_impossible_categories_are_refused(names):
    with pytest.raises(DataError, match="categories"):
        Categories(names)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": None}, "target is None"),
        ({"target": []}, "target is"),
        ({"classes": None}, r"nothing is declared about the target[\s\S]*release"),
        ({"columns": {}}, r"no input columns[\s\S]*release"),
        ({"columns": ["age"]}, "not a table of columns"),
        ({"columns": {"age": None}}, "'age' is declared as None"),
        ({"columns": {"age": {"low": 0}}}, "age is declared as"),
        ({"columns": {"age": {"low": 0, "high": 1, "hi": 2}}}, "age is declared as"),
        ({"columns": {"label": COLUMNS["age"]}}, "both inputs and targets"),
        ({"classes": ["a"]}, "two classes or more"),
        ({"classes": ["a", "a"]}, "listed twice"),
        ({"classes": [["a", "b"], "b"]}, "listed twice"),
        ({"classes": "ab"}, "classes is 'ab'"),
        ({"classes": 2}, "classes is 2"),
        ({"target": ["a", "b"]}, "one target column"),
        ({"task": "regression"}, "a regression task with classes"),
        ({"task": "multi-label"}, "a multi-label task with classes"),
        ({"task": "classification", "classes": None}, "task with classes"),
        ({"target_range": [0, 1]}, "classification task with target_range"),
        ({"task": "regression", "classes": None}, "task with target_range None"),
        ({"target_range": [0, 1, 2], "classes": None}, "target_range is declared"),
        ({"delimiter": ",,"}, "delimiter"),
        ({"delimiter": "\n"}, "delimiter"),
        ({"header": "age"}, "header is 'age'"),
        ({"column": {}}, r"unknown keys \['column'\]"),
    ],
)
def test_incomplete_or_contradictory_schemas_are_refused(changes, message):
    table = {"target": "label", "classes": ["a", "b"], "columns": COLUMNS}
    Schema.from_mapping(table)
    with pytest.raises(DataError, match=message):
        Schema.from_mapping(table | changes)


def test_a_target_must_be_named():
    with pytest.raises(DataError, match="names no target"):
        Schema.from_mapping({"classes": ["a", "b"], "columns": COLUMNS})
