"""Run folders, ledgers and studies that somebody else wrote."""

import hashlib
import json
import os
import shutil
import sqlite3
import struct

import pytest
from typer.testing import CliRunner

from curvedp.accounting.records import chain_of
from curvedp.cli.app import app
from curvedp.train.checkpoint import _seal
from tests.hostile.conftest import edit_json

pytestmark = pytest.mark.hostile

COMMANDS = ["resume", "evaluate", "predict"]


def unfinished(run):
    (run / "result.json").unlink()
    return run


DEEP = '{"kind": ' + "[" * 50_000
RUN_JSON = {
    "empty": "",
    "a list": "[]",
    "a number": "3",
    "deep": DEEP,
    "deep and closed": '{"kind": ' + "[" * 5000 + "]" * 5000 + "}",
    "NaN": '{"kind": "curvedp-run", "version": NaN}',
    "a key twice": '{"kind": "x", "kind": "curvedp-run", "version": 1, "config": {}}',
    "another kind": '{"kind": "other", "version": 1}',
    "a later version": '{"kind": "curvedp-run", "version": 99}',
    "a list as a version": '{"kind": "curvedp-run", "version": [1]}',
    "no config": '{"kind": "curvedp-run", "version": 1}',
    "a list as config": '{"kind": "curvedp-run", "version": 1, "config": []}',
    "an unknown key": '{"kind": "curvedp-run", "version": 1, "config": {"os": 1}}',
    "a sweep of nothing": '{"kind": "curvedp-sweep", "version": 1}',
    "a comparison of nothing": '{"kind": "curvedp-compare", "version": 1}',
    "a comparison": '{"kind": "curvedp-comparison", "version": 1}',
    "a long number": '{"kind": "curvedp-run", "version": ' + "1" * 5000 + "}",
    "no text": "\ud800",
}


@pytest.mark.parametrize("case", RUN_JSON)
@pytest.mark.parametrize(
    "command",
    ["resume", *(pytest.param(c, marks=pytest.mark.slow) for c in COMMANDS[1:])],
)
def test_run_json(refused, trained, command, case):
    unfinished(trained)
    content = RUN_JSON[case].encode("utf-8", "surrogatepass")
    (trained / "run.json").write_bytes(content)
    assert "run.json" in refused(command, trained)


CONFIG = {
    "data": [3, [], {}, "", None, "/dev/zero", "../nowhere", "\x00"],
    "model": [3, [], {}, "os:system", "subprocess:getoutput", "torch:load", "x" * 5000],
    "model_options": [3, [], "x", {"a": 1}, {"self": 1}],
    "data_options": [
        3,
        [],
        "x",
        {"test": "/dev/zero"},
        {"with_test": 1},
        {"a": 10**400},
    ],
    "recipe": [3, [], {}, "", "os:system"],
    "recipe_settings": [
        3,
        [],
        "x",
        {"clip_norm": 10**400},
        {"mode": "x"},
        {"mode": []},
    ],
    "privacy": [3, [], "x", {}, {"epsilon": "x"}, {"steps": 10**30}],
    "metrics": [3, "x", [3], [[]], {}],
    "seed": ["x", -1, 10**400, [], 1.5],
    "device": [3, [], "cuda:99", "../x"],
    "checkpoint_every": [0, -1, "x", 10**400],
    "public_data": [3, [], {}],
    "validation": ["x", [], 10**400, -1],
    "unsafe_reproducible_noise": ["x", -1, 10**400],
}
CHANGES = [(name, value) for name, values in CONFIG.items() for value in values]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value"), CHANGES, ids=lambda v: str(v)[:16])
def test_the_config_in_run_json(refused, trained, name, value, trap):
    unfinished(trained)

    def change(content):
        content["config"][name] = value
        if name == "model":
            content["config"]["model_options"] = {"command": f"touch {trap}"}

    edit_json(trained / "run.json", change)
    refused("resume", trained)


SHAPES = [
    3, [], {}, {"input_shape": [10**12], "num_outputs": 2, "task": "classification"},
    {"input_shape": [3], "num_outputs": 10**13, "task": "classification"},
    {"input_shape": [-3], "num_outputs": 2, "task": "classification"},
    {"input_shape": [3], "num_outputs": "2x", "task": "classification"},
    {"input_shape": [3], "num_outputs": 2, "task": "eval"},
    {"input_shape": [10**400], "num_outputs": 2, "task": "classification"},
    {"input_shape": None, "num_outputs": 2, "task": "classification"},
    {"input_shape": [2], "num_outputs": 2, "task": "classification"},
    {"input_shape": [1] * 100, "num_outputs": 2, "task": "classification"},
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=range(len(SHAPES)))
def test_the_shape_in_run_json(refused, trained, shape):
    edit_json(trained / "run.json", lambda c: c.update(model_shape=shape))
    refused("predict", trained)


RESULTS = [
    "", "[]", DEEP, '{"kind": "curvedp-result"}', '{"kind": ["curvedp-result"]}',
    '{"kind": "curvedp-result", "statement": 3, "steps": "x"}',
]  # fmt: skip


@pytest.mark.parametrize("content", RESULTS, ids=range(len(RESULTS)))
def test_result_json(refused, trained, content):
    (trained / "result.json").write_text(content)
    assert "result.json" in refused("resume", trained)


# -- checkpoints -----------------------------------------------------------------------


def safetensors(header, content=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + content


def entry(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


HEADERS = {
    "empty": b"",
    "short": b"\x01",
    "no header": safetensors(b""),
    "a header of exabytes": safetensors({}, length=2**60),
    "a header of 100 MB": safetensors({}, length=100_000_001),
    "not JSON": safetensors(b"{]"),
    "deep": safetensors(b'{"a":' * 3000),
    "an array": safetensors([]),
    "no offsets": safetensors({"w": {"dtype": "F32", "shape": [1]}}),
    "offsets beyond the end": safetensors({"w": entry([4], 0, 16)}, bytes(8)),
    "offsets backwards": safetensors({"w": entry([1], 8, 4)}, bytes(8)),
    "negative offsets": safetensors({"w": entry([1], -4, 0)}, bytes(8)),
    "a shape that lies": safetensors({"w": entry([10**9, 10**9], 0, 4)}, bytes(4)),
    "a shape that overflows": safetensors({"w": entry([2**63, 2**63], 0, 4)}, bytes(4)),
    "an unknown type": safetensors({"w": entry([1], 0, 4, "PICKLE")}, bytes(4)),
    "overlapping": safetensors(
        {"v": entry([1], 0, 4), "w": entry([1], 0, 4)}, bytes(4)
    ),
    "a gap": safetensors({"w": entry([1], 4, 8)}, bytes(8)),
    "bytes at the end": safetensors({"w": entry([1], 0, 4)}, bytes(40)),
    "no tensors": safetensors({}),
    "another model's": safetensors({"w": entry([1], 0, 4)}, bytes(4)),
    "a pickle": b"\x80\x04\x95" + bytes(60),
    "a zip": b"PK\x03\x04" + bytes(60),
}


def reseal(folder, **changes):
    """As a forger would: checksums that fit what is there."""

    def change(content):
        content.update(changes)
        for name in content["sha256"]:
            data = (folder / name).read_bytes()
            content["sha256"][name] = hashlib.sha256(data).hexdigest()
        content["seal"] = _seal(content)

    edit_json(folder / "checkpoint.json", change)


def newest(run):
    return sorted((run / "checkpoints").iterdir())[-1]


@pytest.mark.parametrize("case", HEADERS)
@pytest.mark.parametrize(
    "file", ["model", pytest.param("state", marks=pytest.mark.slow)]
)
def test_safetensors_with_checksums_that_fit(refused, trained, file, case):
    unfinished(trained)
    (newest(trained) / f"{file}.safetensors").write_bytes(HEADERS[case])
    reseal(newest(trained))
    if file == "state" and case in ("no tensors", "another model's"):
        return  # logistic regression by SGD keeps none
    assert newest(trained).name in refused("resume", trained)
    if file == "model":
        assert newest(trained).name in refused("predict", trained)


STATES = [
    3, [], {}, {"$dict": 3}, {"$dict": [[[], 1]]}, {"$tensor": "none"}, {"$os": 1},
    {"$dict": []}, {"$dict": [["step", 10**30]]}, {"$dict": [["step", "x"]]},
    {"$dict": [["step", -1]]}, {"$list": 3}, {"a": 1, "b": 2},
]  # fmt: skip


@pytest.mark.parametrize("state", STATES, ids=range(len(STATES)))
def test_a_state_with_a_checksum_that_fits(refused, trained, state):
    reseal(newest(unfinished(trained)), state=state)
    assert newest(trained).name in refused("resume", trained)


@pytest.mark.parametrize(
    "content", ["", "[]", "3", DEEP, '{"kind": NaN}', '{"kind": []}']
)
def test_checkpoint_json(refused, trained, content):
    unfinished(trained)
    (newest(trained) / "checkpoint.json").write_text(content)
    for command in ("resume", "predict"):
        assert newest(trained).name in refused(command, trained)


def test_a_folder_whose_name_is_no_step(refused, trained):
    (trained / "checkpoints" / "step-x; rm").mkdir()
    refused("predict", trained)
    refused("resume", unfinished(trained))


def test_files_that_never_end(refused, trained):
    unfinished(trained)
    for name in ("run.json", "ledger.jsonl", "checkpoints/{}/checkpoint.json"):
        path = trained / name.format(newest(trained).name)
        content = path.read_bytes()
        for make in (os.mkfifo, lambda p: p.symlink_to("/dev/zero")):
            path.unlink()
            make(path)
            refused("resume", trained)
        path.unlink()
        path.write_bytes(content)


# -- ledgers ---------------------------------------------------------------------------


def forged(trained, change):
    """The ledger with other values and a chain that fits."""
    path = trained / "ledger.jsonl"
    lines, previous = [json.loads(x) for x in path.read_text().splitlines()], ""
    change(lines)
    text = []
    for line in lines:
        line.pop("chain", None)
        try:
            previous = line["chain"] = chain_of(line, previous)
        except ValueError:  # NaN: no chain is possible
            line["chain"] = "0" * 64
        text.append(json.dumps(line) + "\n")
    path.write_text("".join(text))
    return path


EVENTS = [
    None, 3, "x", [], {}, {"kind": []}, {"kind": "os"}, {"kind": "composed"},
    {"kind": "composed", "parts": 3}, {"kind": "composed", "parts": [3]},
    {"kind": "composed", "parts": [{"event": {}, "count": 1}]},
    {"kind": "gaussian", "noise_multiplier": -1},
    {"kind": "gaussian", "noise_multiplier": float("nan")},
    {"kind": "gaussian", "noise_multiplier": 10**400},
    {"kind": "gaussian", "noise_multiplier": True},
    {"kind": "poisson-gaussian", "noise_multiplier": 1, "sample_rate": 2},
    {"kind": "repeat-and-select", "event": None, "mean": 3, "shape": 1},
]  # fmt: skip


def composed(count, levels=1):
    event = {"kind": "gaussian", "noise_multiplier": 1.0}
    for _ in range(levels):
        event = {"kind": "composed", "parts": [{"event": event, "count": count}]}
    return event


EVENTS += [
    composed(-1),
    composed(1.5),
    composed(10**30),
    composed(10**5, 9),
    composed(1, 100),
]


@pytest.mark.parametrize("event", EVENTS, ids=range(len(EVENTS)))
def test_events_of_a_ledger(refused, trained, event):
    path = forged(trained, lambda lines: lines[2].update(event=event))
    assert "ledger.jsonl, line 3" in refused(
        "privacy", "spent", path
    ) or "count" in str(event)


FIELDS = [
    (0, "run_id", []), (0, "relation", 3), (0, "delta", "x"), (0, "delta", 10**400),
    (0, "delta", float("nan")), (0, "accountant", []), (0, "accountant", "os:system"),
    (0, "planned_steps", 10**30), (0, "planned_steps", -1), (0, "planned_steps", "x"),
    (0, "target_epsilon", "x"), (0, "facts", 3), (0, "facts", [1]), (0, "notes", 3),
    (0, "facts", {"noise_multiplier": "x", "sample_rate": 1}),
    (0, "facts", {"noise_multiplier": 1, "sample_rate": 10**400}),
    (0, "facts", {"noise_multiplier": 1, "sample_rate": []}),
    (0, "version", 99), (0, "version", []), (0, "unit", []),
    (1, "seq", 7), (1, "seq", "1"), (1, "step", -3), (1, "step", 10**30),
    (1, "step", 10**12), (1, "step", 1.5), (1, "attempt", 5), (1, "attempt", None),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("line", "name", "value"), FIELDS, ids=lambda v: str(v)[:16])
def test_fields_of_a_ledger(refused, trained, line, name, value):
    path = forged(trained, lambda lines: lines[line].update({name: value}))
    shutil.copy(path, trained.parent / "alone.jsonl")
    assert "alone.jsonl" in refused("privacy", "spent", trained.parent / "alone.jsonl")
    refused("resume", unfinished(trained))


def test_lines_of_a_ledger(refused, trained):
    path = trained / "ledger.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    for bad in (DEEP + "\n", "[" * 5000 + "]" * 5000 + "\n", "{}\n", "\n", "\x00\n",
                '{"seq": NaN}\n', '{"seq": ' + "1" * 5000 + "}\n",
                "\udcff\n"):  # fmt: skip
        text = "".join([*lines[:2], bad, *lines[2:]])
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        assert "ledger.jsonl, line 3" in refused("privacy", "spent", path)
        path.write_bytes((bad + "".join(lines)).encode("utf-8", "surrogateescape"))
        refused("privacy", "spent", path)
    path.write_text(
        lines[0].replace('"kind"', '"kind": 1, "kind"') + "".join(lines[1:])
    )
    assert "twice" in refused("privacy", "spent", path)


# -- studies ---------------------------------------------------------------------------


@pytest.fixture
def sweep(blobs, tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("curvedp.experiments.sweeps.study._PATIENCE", 0.5)
    return [
        "sweep", "--data", blobs, "-D", "num_classes=3", "--model", "logreg",
        "--noise-multiplier", "2", "--delta", "1e-3", "--batch-size", "30",
        "--epochs", "1", "--seed", "1", "--device", "cpu", "--validation", "0.3",
        "--validation-is-public", "--trials", "2", "--run-dir", "sweep",
    ]  # fmt: skip


def foreign(path):
    with sqlite3.connect(path) as database:
        database.execute("create table studies (name text)")
        database.execute("create table version_info (a int)")
        database.execute("insert into studies values ('x')")


def test_studies_that_are_not_ours(refused, sweep, tmp_path):
    import optuna

    (tmp_path / "text.db").write_text("not a database" * 100)
    (tmp_path / "empty.db").mkdir()
    foreign(tmp_path / "foreign.db")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    optuna.create_study(storage=f"sqlite:///{tmp_path}/other.db", study_name="s")
    urls = [
        f"sqlite:///{tmp_path}/text.db", f"sqlite:///{tmp_path}/empty.db",
        f"sqlite:///{tmp_path}/foreign.db", f"sqlite:///{tmp_path}/other.db",
        f"sqlite:///{tmp_path}/no/such/folder.db", "x", "evil+driver://host/name",
        "sqlite://", "file:///etc/passwd", "postgresql://u:secret@host/name",
    ]  # fmt: skip
    for url in urls:
        if url == "sqlite://":
            continue  # in memory: of nobody else
        message = refused(*sweep, "--storage", url, "--study", "s")
        assert "secret" not in message


@pytest.mark.slow
def test_a_study_with_hostile_facts(refused, sweep, tmp_path):
    assert CliRunner().invoke(app, [str(f) for f in sweep]).exit_code == 0
    (tmp_path / "sweep" / "sweep.json").unlink(missing_ok=True)
    database = tmp_path / "sweep" / "study.db"
    for value in ("3", "[]", '{"facts": 3}', '{"facts": {}, "trials": "x"}', DEEP, "x"):
        with sqlite3.connect(database) as connection:
            connection.execute(
                "update study_user_attributes set value_json = ?", (value,)
            )
        connection.close()
        refused("resume", tmp_path / "sweep")
