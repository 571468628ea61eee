"""``curvedp doctor`` as a person or a script would call it."""

import importlib
import json
import sys

import pytest
from typer.testing import CliRunner

from curvedp.cli.app import app
from curvedp.diagnostics import Verdict
from tests.diagnostics.architectures import TEN
from tests.diagnostics.test_verdicts import EXPECTED, private_step

NETS = """
import torch
from torch import nn

def convolutional(input_shape=(3, 8, 8), norm=True):
    channels = input_shape[0]
    layers = [nn.Conv2d(channels, 8, 3), nn.BatchNorm2d(8) if norm else nn.Identity()]
    return nn.Sequential(*layers, nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(2))

def whole(width=8):
    model = nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.Flatten(),
                          nn.Linear(36 * width, 2))
    return model, torch.zeros(2, 3, 8, 8)

def half_dead():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.used = nn.BatchNorm1d(16), nn.Linear(16, 2)
            self.spare = nn.Linear(16, 2)
        def forward(self, x):
            return self.used(self.norm(x))
    return Net()

def tagger():
    return nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 3))

def number():
    return 3

constant = 3
"""


@pytest.fixture
def call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_nets.py").write_text(NETS)
    sys.modules.pop("my_nets", None)
    importlib.invalidate_caches()

    def run(*arguments, code=0):
        result = CliRunner().invoke(app, ["doctor", *map(str, arguments)])
        assert result.exit_code == code, (result.output, result.exception)
        return result

    yield run
    sys.modules.pop("my_nets", None)


def test_a_built_in_model_is_ready(call):
    result = call("small-cnn", "--input-shape", "1,28,28", "--option", "num_outputs=3")
    assert "verdict: ready" in result.stdout
    assert "an estimate" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_problems_and_their_fix(call):
    result = call("my_nets:whole", code=1)
    assert "ready after --fix" in result.stdout
    assert "GroupNorm(4, 8)" in result.stdout
    found = json.loads(call("my_nets:whole", "--json", code=1).stdout)
    assert found["verdict"] == "ready after --fix"
    assert found["changes"][0]["name"] == "1"
    assert found["cost_estimate"]["extra_flops_ratio"] > 0


def test_options_reach_the_factory(call):
    found = json.loads(
        call("my_nets:whole", "--option", "width=4", "--batch-size", 8, "--json",
             code=1).stdout
    )  # fmt: skip
    assert found["batch_size"] == 8
    assert found["layers"][0]["outputs"] == [4, 6, 6]


def test_token_inputs(call):
    shape = ("--input-shape", "7", "--input-dtype", "int")
    assert "ready" in call("my_nets:tagger", *shape, "--vocabulary", 11).stdout
    error = call("my_nets:tagger", *shape, "--vocabulary", 99, code=2).stderr
    assert "does not run" in error


@pytest.mark.parametrize("target", ["fixed_net.py", "folder"])
def test_fix_writes_a_factory_that_trains(call, tmp_path, target):
    result = call("my_nets:whole", "--fix", target)
    assert "after the fix: ready" in result.stdout
    name = "fixed_net.py" if target.endswith(".py") else "folder/my_nets_whole_fixed.py"
    path = tmp_path / name
    text = path.read_text()
    assert "- 1: BatchNorm2d(8) -> GroupNorm(4, 8)" in text
    namespace = {}
    exec(compile(text, str(path), "exec"), namespace)
    model, inputs = namespace["factory"](width=4)
    assert model[1].num_channels == 4
    assert private_step(model, inputs)
    error = call("my_nets:whole", "--fix", target, code=2).stderr
    assert "not overwritten" in error.replace("\n", " ")
    assert path.read_text() == text
    assert [p.name for p in path.parent.iterdir() if p.suffix == ".tmp"] == []
    if name == "fixed_net.py":
        sys.modules.pop("fixed_net", None)
        importlib.invalidate_caches()
        assert "verdict: ready" in call("fixed_net:factory").stdout
        sys.modules.pop("fixed_net", None)


def test_fix_says_what_it_cannot_do(call, tmp_path):
    shape = ("--input-shape", "16")
    found = json.loads(
        call("my_nets:half_dead", *shape, "--fix", "f.py", "--json", code=1).stdout
    )
    assert found["verdict"] == "not possible"
    assert found["fix"]["after"]["verdict"] == "not possible"
    assert [p["names"] for p in found["problems"]] == [["norm"], ["spare"]]
    assert (tmp_path / "f.py").exists()
    text = call("my_nets:half_dead", *shape, code=1).stdout
    assert "refused" in text
    assert "freeze it" in text


def test_fix_writes_nothing_where_nothing_has_to_change(call, tmp_path):
    shape = ("--input-shape", "7", "--input-dtype", "int")
    result = call("my_nets:tagger", *shape, "--fix", "f.py")
    assert "no file is written" in result.stderr
    assert not (tmp_path / "f.py").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("my_nets:number", "--input-shape", "3"),
        ("my_nets:constant", "--input-shape", "3"),
        ("my_nets:missing", "--input-shape", "3"),
        ("no_such_module:net", "--input-shape", "3"),
        ("my_nets:tagger",),
        ("my_nets:tagger", "--input-shape", "a,b"),
        ("my_nets:tagger", "--input-shape", "0"),
        ("my_nets:tagger", "--input-shape", "7", "--input-dtype", "text"),
        ("my_nets:tagger", "--input-shape", "7", "--vocabulary", "0"),
        ("my_nets:tagger", "--input-shape", "7"),
        ("my_nets:whole", "--option", "height=3"),
        ("my_nets:whole", "--option", "height"),
        ("my_nets:whole", "--fix", "not-a-name.py"),
        ("my_nets:whole", "--batch-size", "0"),
        ("my_nets:convolutional", "--input-shape", "3,8,8"),
        ("vit",),
        ("no-such-model", "--input-shape", "3,8,8"),
        ("small-cnn", "--input-shape", "1,28,28", "--fix", "f.py"),
    ],
)
def test_errors_are_one_message(call, arguments):
    result = call(*arguments, code=2)
    assert "error:" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("make", TEN, ids=lambda make: make.__name__)
def test_ten_architectures_as_a_person_would_ask(call, make, monkeypatch, tmp_path):
    name = f"tests.diagnostics.architectures:{make.__name__}"
    expected = EXPECTED[make]
    code = 0 if expected is Verdict.READY else 1
    monkeypatch.setenv("COLUMNS", "100")
    text = call(name, code=code).stdout
    assert text.startswith(f"verdict: {expected.value}\n")
    assert ("problems" in text) == (code == 1)
    assert max(map(len, text.splitlines())) <= 100
    fixable = expected is Verdict.READY_AFTER_FIX
    assert ("with --fix" in text) == fixable
    file = tmp_path / f"fixed_{make.__name__}.py"
    call(name, "--fix", file, code=0 if fixable else code)
    assert file.exists() == fixable
    if fixable:
        monkeypatch.syspath_prepend(tmp_path)
        again = call(f"{file.stem}:factory").stdout
        assert again.startswith("verdict: ready\n")
