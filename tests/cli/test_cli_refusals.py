"""Bad input: one message with the way out, exit code 2, nothing half-written."""

import errno
import os
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from curvedp.cli.app import app

MODELS = """
from torch import nn

def mixes(num_outputs):
    return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, num_outputs))

class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 3)
        self.spare = nn.Linear(2, 2)
    def forward(self, x):
        return self.out(x)
"""

BASE = {
    "--model": "logreg",
    "--noise-multiplier": "2",
    "--delta": "1e-3",
    "--batch-size": "30",
    "--epochs": "2",
    "--run-dir": "run",
    "--device": "cpu",
}


@pytest.fixture
def refused(tmp_path, monkeypatch, blobs):
    """Call a command that must fail; gives its message."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models_of_the_cli_tests.py").write_text(MODELS)
    before = sorted(tmp_path.rglob("*"))

    def run(*arguments, unchanged=True):
        result = CliRunner().invoke(app, [str(a) for a in arguments])
        assert result.exit_code == 2, (result.output, result.exception)
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
        if unchanged:
            now = [
                p for p in sorted(tmp_path.rglob("*")) if "__pycache__" not in str(p)
            ]
            assert now == before
        return result.stderr

    return run


def train_flags(blobs, changes):
    flags = {"--data": blobs, "-D": "num_classes=3", **BASE, **changes}
    given = ((k,) if v is True else (k, v) for k, v in flags.items() if v is not None)
    return ["train", *(x for pair in given for x in pair)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"--noise-multiplier": None, "--epsilon": "0"}, "epsilon"),
        ({"--noise-multiplier": None, "--epsilon": "-1"}, "epsilon"),
        ({"--noise-multiplier": None}, "either epsilon"),
        ({"--epsilon": "3"}, "either epsilon"),
        ({"--noise-multiplier": "-2"}, "noise"),
        ({"--delta": "0.5"}, "--allow-large-delta"),
        ({"--delta": "0"}, "delta"),
        ({"--delta": "1.5"}, "delta"),
        (
            {
                "--batch-size": None,
                "--epochs": None,
                "--sample-rate": "1.5",
                "--steps": "3",
                "--expected-batch-size": "9",
            },
            "sample_rate",
        ),
        (
            {
                "--batch-size": None,
                "--epochs": None,
                "--sample-rate": "0.5",
                "--steps": "3",
            },
            "expected_batch_size",
        ),
        ({"--sample-rate": "0.5"}, "cannot be combined"),
        ({"--batch-size": "91"}, "larger than the dataset"),
        ({"--batch-size": "0"}, "batch_size"),
        ({"--epochs": "-3"}, "epochs"),
        ({"--relation": "add-remove"}, "zero-out"),
        ({"--relation": "neighbours"}, "unknown relation"),
        ({"--accountant": "guess"}, "guess"),
        ({"--recipe": "dp-sgdd"}, "unknown recipe"),
        ({"--learning-rate": "-1"}, "learning_rate"),
        ({"--clip-norm": "0"}, "clip_norm"),
        ({"--clipping": "round"}, "unknown clipping"),
        ({"--model": "resnet-9000"}, "unknown model"),
        ({"--model": "no_such_module:make"}, "cannot be imported"),
        ({"--model": "models_of_the_cli_tests:mixes"}, "BatchNorm"),
        ({"--model": "models_of_the_cli_tests:Unused"}, "spare"),
        ({"--model": "cnn"}, "takes images"),
        ({"-M": "depth=3"}, "depth"),
        ({"-M": "depth"}, "KEY=VALUE"),
        ({"--data": "nowhere.npz"}, "no such file"),
        ({"-D": "num_classes=2"}, "label of example"),
        ({"-D": "classes=2"}, "classes"),
        ({"-D": None}, "num_classes"),
        ({"--metric": "precision"}, "unknown metric"),
        ({"--loss": "hinge"}, "unknown loss"),
        ({"--device": "tpu"}, "device"),
        ({"--cuda-graph": True}, "cuda_graph needs a model on a CUDA device"),
        ({"--validation": "1.5"}, "fraction"),
        ({"--seed": "-1"}, "seed"),
        ({"--views": "4"}, "without an augmentation"),
        ({"--augment": "rotations"}, "unknown augmentation"),
        ({"--physical-batch-size": "0"}, "physical_batch_size"),
        ({"--checkpoint-every": "0"}, "checkpoint_every"),
        ({"--config": "nowhere.toml"}, "nowhere.toml"),
        ({"--config": "models_of_the_cli_tests.py"}, "not a TOML file"),
        ({"--run-dir": "blobs.npz"}, "exists already"),
        ({"--run-dir": "blobs.npz/run"}, "cannot"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, dict) else value,
)
def test_train_refuses(refused, blobs, changes, words):
    message = refused(*train_flags(blobs, changes))
    assert "error: " in message
    assert words in message


def test_the_way_out_of_a_large_delta_works(blobs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = [*train_flags(blobs, {"--delta": "0.5"}), "--allow-large-delta"]
    assert CliRunner().invoke(app, [*map(str, flags), "--dry-run"]).exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--no-such-option"],
        ["train", "--epochs", "many"],
        ["no-such-command"],
        ["privacy", "calibrate"],
    ],
)
def test_usage_errors_exit_2(arguments):
    assert CliRunner().invoke(app, arguments).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "5", "--sigma", "1"], "either"),
        ([], "either"),
        (["--steps", "5", "--relation", "other"], "relation"),
        (["--steps", "0"], "steps"),
        (["--steps", "5", "--accountant", "x"], "accountant"),
        (["--steps", "5", "--delta", "2"], "delta"),
    ],
)
def test_calibrate_refuses(refused, arguments, words):
    common = ["privacy", "calibrate", "--epsilon", "1", "--sample-rate", "0.1"]
    assert words in refused(*common, *arguments)


@pytest.mark.parametrize("rate", ["0", "1.1"])
def test_privacy_epsilon_refuses_a_rate_outside_its_range(refused, rate):
    message = refused(
        "privacy", "epsilon", "--sigma", "1", "--steps", "2", "--sample-rate", rate
    )
    assert "rate" in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["--recipes", "dp-sgd,nope"], "nope"),
        (["--recipes", "dp-sgd,dp-sgd"], "twice"),
        (["--recipes", ","], "no recipe"),
        (["--seeds", "0"], "seeds"),
        (["--set", "dp-sgd.speed=3"], "speed"),
        (["--set", "speed=3"], "RECIPE.SETTING"),
        (["--plot", "picture.doc"], "picture"),
    ],
)
def test_compare_refuses(refused, blobs, changes, words):
    flags = train_flags(blobs, {})[1:]
    assert words in refused("compare", *flags, *changes)


def test_compare_needs_held_out_examples(refused, tmp_path, blobs):
    arrays = np.load(blobs)
    np.savez(blobs, x=arrays["x_train"], y=arrays["y_train"])
    assert "--validation" in refused("compare", *train_flags(blobs, {})[1:])


@pytest.mark.parametrize("command", ["resume", "evaluate", "predict"])
def test_what_is_not_a_run_is_refused(refused, tmp_path, command):
    assert "run.json" in refused(command, tmp_path)


@pytest.mark.parametrize("content", ["", "{}\n", "not a ledger\n", "[1]\n", "\x00\n"])
def test_foreign_ledgers_are_refused(refused, tmp_path, content):
    (tmp_path / "ledger.jsonl").write_text(content)
    message = refused("privacy", "spent", tmp_path / "ledger.jsonl", unchanged=False)
    assert "not a curvedp ledger" in message


def test_a_missing_ledger_is_refused(refused, tmp_path):
    assert "no ledger" in refused("privacy", "spent", tmp_path / "none.jsonl")


def test_a_full_disk(refused, blobs, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("curvedp.storage._sync_file", full)
    message = refused(*train_flags(blobs, {}))
    assert "No space left" in message
    assert "free some space" in message


def test_a_read_only_disk(refused, blobs, monkeypatch):
    def read_only(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("curvedp.storage.os.replace", read_only)
    assert "Read-only" in refused(*train_flags(blobs, {}))


def test_a_full_disk_in_the_middle_says_how_to_go_on(
    refused, blobs, tmp_path, monkeypatch
):
    from curvedp.storage import _sync_file

    calls = []

    def fills_up(path):
        calls.append(path)
        if path.name.startswith(".step-00000003.safetensors"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        _sync_file(path)

    monkeypatch.setattr("curvedp.storage._sync_file", fills_up)
    message = refused(*train_flags(blobs, {}), unchanged=False)
    assert "curvedp resume run" in message
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["resume", "run"]).exit_code == 0


def test_debug_shows_the_traceback(blobs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = train_flags(blobs, {"--recipe": "nope"})
    result = CliRunner().invoke(app, [*map(str, flags), "--debug"])
    assert result.exit_code == 2
    assert "Traceback" in result.stderr


def test_without_typer_the_message_names_the_extra():
    code = (
        "import sys; sys.modules['typer'] = None; "
        "from curvedp.cli import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "pip install 'curvedp[cli]'" in done.stderr
    assert "Traceback" not in done.stderr
