"""Calls that must be refused: one message with the way out, and nothing left behind."""

import json
import os

import pytest
from typer.testing import CliRunner

from curvedp.cli.app import app
from tests.experiments.conftest import blobs

__all__ = ["blobs", "refused", "trained", "trap"]

PRIVACY = [
    "--noise-multiplier", "2", "--delta", "1e-3", "--batch-size", "2", "--epochs", "1",
    "--device", "cpu", "--run-dir", "run",
]  # fmt: skip


def contents(folder):
    """Every path below a folder with what is in it; links are not followed."""
    found = {}
    for root, folders, files in os.walk(folder):
        if "__pycache__" in root:
            continue
        for name in (*folders, *files):
            path = os.path.join(root, name)
            plain = os.path.isfile(path) and not os.path.islink(path)
            found[path] = os.path.getsize(path) if plain else None
    return {p: s for p, s in found.items() if "__pycache__" not in p}


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """Call a command that must refuse; gives its message on one line."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        before = contents(tmp_path)
        result = CliRunner().invoke(app, [str(a) for a in arguments])
        if not isinstance(result.exception, SystemExit | type(None)):
            raise result.exception
        assert result.exit_code == 2, result.output
        assert result.stdout == "" and "Traceback" not in result.stderr
        assert "error: " in result.stderr and "\n  -> " in result.stderr, result.stderr
        assert len(result.stderr) < 4000, "a message is no dump of the file"
        assert contents(tmp_path) == before, "something was left behind"
        return " ".join(result.stderr.split())

    def train(data, *options):
        flags = [*PRIVACY, *(x for o in options for x in ("-D", o))]
        message = call("train", "--data", data, *flags)
        assert os.path.basename(str(data)) in message, message
        return message

    call.train = train
    return call


@pytest.fixture(scope="session")
def trained_once(tmp_path_factory):
    """A finished run of a tiny table, made once."""
    folder = tmp_path_factory.mktemp("trained")
    rows = [
        "a,b,y",
        *(f"{k % 7},{'uv'[k % 2]},{['no', 'yes'][k % 2]}" for k in range(40)),
    ]
    (folder / "table.csv").write_text("\n".join(rows) + "\n")
    (folder / "config.toml").write_text(TABLE.format(source=folder / "table.csv"))
    flags = ["train", "--config", folder / "config.toml", "--model", "logreg", *PRIVACY]
    flags[flags.index("run")] = folder / "run"
    result = CliRunner().invoke(app, [str(f) for f in flags])
    assert result.exit_code == 0, result.output
    return folder / "run"


TABLE = """
[data]
source = "{source}"
target = "y"
classes = ["no", "yes"]
columns = {{ a = {{ low = 0, high = 6 }}, b = {{ categories = ["u", "v"] }} }}
"""


@pytest.fixture
def trained(trained_once, tmp_path):
    """A copy of that run, to be broken."""
    import shutil

    return shutil.copytree(trained_once, tmp_path / "theirs")


@pytest.fixture
def trap(tmp_path):
    """A file that code would make, if any were run; checked at the end."""
    sprung = tmp_path.parent / f"{tmp_path.name}-sprung"
    yield sprung
    assert not sprung.exists(), "code of the file was run"


def edit_json(path, change):
    """Change a JSON file by a function, which may give another value."""
    content = json.loads(path.read_text())
    changed = change(content)
    path.write_text(json.dumps(content if changed is None else changed))
