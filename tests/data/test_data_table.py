import gzip
import json
import lzma

import pytest
import torch

from curvedp.data import Categories, Range, Schema, Task, load
from curvedp.data import files as files_module
from curvedp.data import table as table_module
from curvedp.errors import ConfigurationError, DataError

DECLARED = {
    "target": "label",
    "columns": {"age": Range(0, 100), "job": Categories(["clerk", "farmer"])},
    "classes": ["no", "yes"],
}
ROWS = [
    {"age": 50, "job": "farmer", "label": "yes", "secret": "ignored"},
    {"age": 250, "job": "clerk", "label": "no", "secret": ""},
    {"age": 0, "job": "pilot", "label": "yes", "secret": "1"},
]
INPUTS = [[0.0, 0.0, 1.0], [1.0, 1.0, 0.0], [-1.0, 0.0, 0.0]]
TARGETS = [1, 0, 1]
PACKERS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


def csv_text(rows=ROWS, delimiter=",") -> str:
    lines = [list(rows[0])] + [[str(cell) for cell in row.values()] for row in rows]
    return "".join(delimiter.join(line) + "\n" for line in lines)


def json_text(rows=ROWS) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(tmp_path, name: str, text: str):
    packing = next((end for end in (".gz", ".xz") if name.endswith(end)), "")
    path = tmp_path / name
    path.write_bytes(PACKERS[packing](text.encode()))
    return path


@pytest.mark.parametrize("packing", PACKERS)
@pytest.mark.parametrize("kind", [".csv", ".tsv", ".jsonl", ".ndjson"])
def test_round_trip(tmp_path, kind, packing):
    text = json_text() if kind.endswith("l") or kind == ".ndjson" else csv_text()
    if kind == ".tsv":
        text = csv_text(delimiter="\t")
    source = load(write(tmp_path, f"people{kind}{packing}", text), **DECLARED)
    assert source.task is Task.CLASSIFICATION
    assert (source.num_classes, source.input_shape) == (2, (3,))
    assert source.train.inputs.tolist() == INPUTS
    assert source.train.targets.tolist() == TARGETS
    assert source.train.inputs.dtype == torch.float32
    assert source.test is None


def test_a_schema_object_a_mapping_and_a_test_table(tmp_path):
    train = write(tmp_path, "train.csv", csv_text())
    held_out = write(tmp_path, "test.csv", csv_text(ROWS[:1]))
    for schema in (DECLARED, Schema.from_mapping(DECLARED)):
        source = load(train, schema=schema, test=held_out)
        assert source.train.targets.tolist() == TARGETS
        assert source.test is not None
        assert source.test.targets.tolist() == [1]
    with pytest.raises(DataError, match="both a schema and"):
        load(train, schema=DECLARED, target="label")


def test_other_rows_do_not_change_a_row(tmp_path):
    alone = load(write(tmp_path, "one.csv", csv_text(ROWS[:1])), **DECLARED)
    among = load(write(tmp_path, "all.csv", csv_text()), **DECLARED)
    assert torch.equal(alone.train.inputs[0], among.train.inputs[0])


def test_files_without_header_with_comments_marks_and_spellings(tmp_path):
    text = "| a note\n\n39, clerk, no.\n?,  farmer ,yes\n\n"
    source = load(
        write(tmp_path, "adult.data", text),
        format="table",
        header=["age", "job", "label"],
        comment="|",
        missing_marks=["?"],
        target="label",
        classes=[["no", "no."], "yes"],
        columns={
            "age": {"low": 0, "high": 100, "missing": 75, "onto": [0, 1]},
            "job": {"categories": ["clerk", "farmer"]},
        },
    )
    expected = torch.tensor([[0.39, 1, 0], [0.75, 0, 1]])
    assert torch.allclose(source.train.inputs, expected)
    assert source.train.targets.tolist() == [0, 1]


def test_regression_targets_are_clamped_and_scaled(tmp_path):
    path = write(tmp_path, "prices.csv", "size,price\n1,0\n2,50\n2,900\n")
    source = load(
        path, target="price", target_range=[0, 100], columns={"size": Range(1, 2)}
    )
    assert source.task is Task.REGRESSION
    assert source.train.targets.tolist() == [[-1.0], [0.0], [1.0]]


def test_multi_label_targets(tmp_path):
    rows = [{"x": 1, "cat": True, "dog": 0}, {"x": 0, "cat": 0, "dog": "1"}]
    declared = {
        "target": ["cat", "dog"],
        "task": "multi-label",
        "columns": {"x": Range(0, 1)},
    }
    source = load(write(tmp_path, "pets.jsonl", json_text(rows)), **declared)
    assert source.train.targets.tolist() == [[1, 0], [0, 1]]
    rows[0]["dog"] = 2
    with pytest.raises(DataError, match=r"line 1: column 'dog' is neither 0 nor 1"):
        load(write(tmp_path, "pets.jsonl", json_text(rows)), **declared)


def test_words_may_be_quoted_and_hold_the_delimiter(tmp_path):
    text = '\ufeffage,job,label\n50, "farmer, big\nand small",yes\n'
    declared = DECLARED | {"columns": {"job": Categories(["farmer, big\nand small"])}}
    source = load(write(tmp_path, "quoted.csv", text), **declared)
    assert source.train.inputs.tolist() == [[1.0]]


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path):
    source = load(write(tmp_path, "bom.csv", "\ufeff" + csv_text()), **DECLARED)
    assert source.train.inputs.tolist() == INPUTS


def test_not_a_number_is_let_through(tmp_path):
    text = "age,job,label\nnan,clerk,yes\n-inf,clerk,yes\n"
    inputs = load(write(tmp_path, "nan.csv", text), **DECLARED).train.inputs
    assert inputs[0, 0].isnan()
    assert inputs[1, 0] == -1
    text = '{"age": NaN, "job": null, "label": "yes"}\n'
    inputs = load(write(tmp_path, "nan.jsonl", text), **DECLARED).train.inputs
    assert inputs[0, 0].isnan()
    assert inputs[0, 1:].tolist() == [0, 0]


def test_rows_beyond_one_block(tmp_path, monkeypatch):
    monkeypatch.setattr(table_module, "_ROWS_PER_BLOCK", 4)
    for count in (3, 4, 5, 8):
        rows = [ROWS[0] | {"age": age} for age in range(count)]
        path = write(tmp_path, "long.csv", csv_text(rows))
        source = load(path, **DECLARED)
        ages = (source.train.inputs[:, 0] + 1) * 50
        assert torch.allclose(ages, torch.arange(count, dtype=torch.float32))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("age,job,label\n50,clerk,maybe\n", "line 2: column 'label' is none of the"),
        ("age,job,label\n\nten,clerk,no\n", "line 3: column 'age' is not a number"),
        ("age,job,label\n,clerk,no\n", r"'age' is empty[\s\S]*missing="),
        ("age,job,label\n50,clerk\n", "line 2: 2 cells where the header has 3"),
        ("age,job,label\n50,clerk,no,1\n", "line 2: 4 cells where the header has 3"),
        ("age,work,label\n50,clerk,no\n", r"no column 'job'[\s\S]*declare header"),
        ("age,job,age\n50,clerk,no\n", "names a column twice"),
        ("age,job,label\n", "no rows"),
        ("", "no rows"),
        ('age,job,label\n50,"clerk,no\n', "malformed CSV"),
        ("age,job,label\n50," + "a" * 200_000 + ",no\n", "line 2: malformed CSV"),
    ],
)
def test_bad_csv_is_refused_with_its_place(tmp_path, text, message):
    with pytest.raises(DataError, match=message) as caught:
        load(write(tmp_path, "bad.csv", text), **DECLARED)
    assert "bad.csv" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"age": 1, "job": "clerk"}', "line 1: column 'label' is absent"),
        ('{"age": null, "job": "clerk", "label": "no"}', "'age' is empty"),
        ('{"age": [1], "job": "clerk", "label": "no"}', "'age' is not a number"),
        ('{"age": 1' + "0" * 400 + ', "job": "a", "label": "no"}', "not a number"),
        ("[1, 2]", "line 1: not a JSON object"),
        ("\n{", "line 2: malformed JSON"),
        ("[" * 100_000, "malformed JSON"),
        ("", "no rows"),
    ],
)
def test_bad_json_is_refused_with_its_place(tmp_path, text, message):
    with pytest.raises(DataError, match=message) as caught:
        load(write(tmp_path, "bad.jsonl", text), **DECLARED)
    assert "bad.jsonl" in str(caught.value)


def test_messages_do_not_quote_cells(tmp_path):
    for text in ("age,job,label\nSECRET,clerk,no\n", "age,job,label\n1,clerk,SECRET\n"):
        with pytest.raises(DataError) as caught:
            load(write(tmp_path, "bad.csv", text), **DECLARED)
        assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("left_out", ["target", "columns", "classes"])
def test_nothing_is_guessed(tmp_path, left_out):
    path = write(tmp_path, "people.csv", csv_text())
    declared = {key: value for key, value in DECLARED.items() if key != left_out}
    with pytest.raises(DataError, match="declare") as caught:
        load(path, **declared)
    assert "people.csv" in str(caught.value)


def test_an_unknown_option_is_refused(tmp_path):
    path = write(tmp_path, "people.csv", csv_text())
    with pytest.raises(ConfigurationError, match="no option 'column'"):
        load(path, column={})


@pytest.mark.parametrize("packing", [".gz", ".xz"])
def test_damaged_packing_is_refused(tmp_path, packing):
    path = write(tmp_path, f"people.csv{packing}", csv_text())
    path.write_bytes(path.read_bytes()[:-15])
    with pytest.raises(DataError, match="damaged or truncated"):
        load(path, **DECLARED)
    path.write_bytes(b"plain text")
    with pytest.raises(DataError, match="damaged or truncated"):
        load(path, **DECLARED)


def test_text_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "latin.csv"
    path.write_bytes("age,job,label\n50,bûcheron,no\n".encode("latin-1"))
    with pytest.raises(DataError, match="not UTF-8"):
        load(path, **DECLARED)


def test_a_line_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files_module, "MAX_LINE_CHARACTERS", 64)
    path = write(tmp_path, "bomb.jsonl.gz", "a" * 1000)
    with pytest.raises(DataError, match="longer than 64 characters"):
        load(path, **DECLARED)
    longest = json_text(ROWS[:1])
    monkeypatch.setattr(files_module, "MAX_LINE_CHARACTERS", len(longest))
    path = write(tmp_path, "exact.jsonl", longest * 2)
    assert len(load(path, **DECLARED).train) == 2
