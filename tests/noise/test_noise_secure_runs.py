"""``secure=True`` in every tier of the API, and what it is refused with."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from curvedp import Trainer, make_private
from curvedp.clipping import FlatClipping
from curvedp.errors import ConfigurationError
from curvedp.noise import SecureStreams, Stream
from curvedp.plan import Plan, SamplingPlan

SETTINGS = {
    "noise_multiplier": 1.0,
    "sample_rate": 0.25,
    "steps": 3,
    "expected_batch_size": 10,
    "delta": 1e-5,
    "secure": True,
}
AES = "AES-256-CTR, grid 2^-26"


def examples(n=40):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 4, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (n,), generator=generator))


def attach(**options):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"loss": "cross-entropy", **SETTINGS, **options}
    return make_private(model, optimizer, examples(), **settings)


def train(private):
    for x, y in private.loader:
        private.optimizer.zero_grad()
        private.loss(private.model(x), y).backward()
        private.optimizer.step()


@pytest.fixture
def no_numpy_secrets(monkeypatch):
    """Any use of numpy's generators for noise or sampling fails the test."""
    made = np.random.Philox

    def watched(sequence):
        assert sequence.spawn_key[0] not in (
            Stream.NOISE.value,
            Stream.SAMPLING.value,
        )
        return made(sequence)

    monkeypatch.setattr(np.random, "Philox", watched)


@pytest.mark.usefixtures("no_numpy_secrets")
def test_a_loop_with_secure_noise(tmp_path):
    private = attach(run_dir=tmp_path / "run")
    before = private.model.module.weight.detach().clone()
    train(private)
    assert private.step == 3
    assert not torch.equal(before, private.model.module.weight)
    header = json.loads((tmp_path / "run/ledger.jsonl").read_text().splitlines()[0])
    assert AES in json.dumps(header)
    assert isinstance(private._engine.streams, SecureStreams)


def test_a_run_that_is_resumed_has_a_new_key_and_the_same_source(tmp_path):
    with attach(run_dir=tmp_path / "run") as private:
        private.save()
        first = private._engine.streams
    with attach(run_dir=tmp_path / "run") as private:
        private.resume()
        train(private)
        assert private._engine.streams is not first
    with pytest.raises(ConfigurationError, match="noise_source"):
        attach(run_dir=tmp_path / "run", secure=False)


def test_no_file_of_a_run_holds_the_key(tmp_path, monkeypatch):
    key = bytes(range(100, 132))
    monkeypatch.setattr("os.urandom", lambda n: key[:n])
    with attach(run_dir=tmp_path / "run") as private:
        train(private)
        private.save()
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert files
    for path in files:
        content = path.read_bytes()
        assert key not in content, path
        assert key.hex().encode() not in content, path


@pytest.mark.usefixtures("no_numpy_secrets")
def test_the_trainer_with_secure_noise():
    result = Trainer(nn.Linear(4, 3), "cross-entropy", **SETTINGS).fit(examples())
    assert result.finished
    facts = result.statement.facts
    assert facts["noise_source"] == AES
    assert facts["private"]
    text = str(result.statement)
    assert AES in text
    assert "floating-point noise" not in text
    assert "timing" in text


def test_the_statement_of_the_default_noise_says_what_it_is():
    private = attach(secure=False)
    text = str(private.statement())
    assert "numpy Philox, 256-bit OS entropy" in text
    assert "rounding of floating-point noise" in text
    unsafe = attach(secure=False, unsafe_reproducible_noise=1).statement()
    assert "OS entropy" not in str(unsafe)
    assert "unsafe" in unsafe.facts["noise_source"]


def test_epsilon_is_that_of_the_default_noise():
    assert attach().plan.epsilon() == attach(secure=False).plan.epsilon()


def test_adaptive_clipping_and_virtual_batches():
    private = attach(clipping="adaptive", physical_batch_size=4)
    train(private)
    assert private.step == 3


def test_secure_and_reproducible_exclude_each_other():
    with pytest.raises(ConfigurationError, match="unsafe_reproducible_noise"):
        attach(unsafe_reproducible_noise=0)
    plan = Plan.make(
        SamplingPlan.by_rate(0.1, 2, 10.0),
        FlatClipping(1.0),
        delta=1e-5,
        noise_multiplier=1.0,
        secure=True,
    )
    with pytest.raises(ConfigurationError, match="exclude each other"):
        plan.streams(unsafe_reproducible_noise=3)


def command_line(*arguments):
    script = "import sys; from curvedp.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", script, "train", "--data", "digits", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


RATE = ("--sample-rate", "0.02", "--steps", "2", "--expected-batch-size", "25")


def test_the_command_line_with_secure_noise(tmp_path):
    folder = str(tmp_path / "run")
    done = command_line(
        "--noise-multiplier", "1", *RATE, "--secure-noise", "--model", "logreg",
        "--run-dir", folder, "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["statement"]["noise_source"] == AES
    stored = json.loads((tmp_path / "run" / "run.json").read_text())
    assert '"secure": true' in json.dumps(stored)


def test_the_command_line_refuses_reproducible_secure_noise(tmp_path):
    folder = tmp_path / "run"
    done = command_line(
        "--noise-multiplier", "1", *RATE, "--secure-noise", "--run-dir", str(folder),
        "--unsafe-reproducible-noise", "1",
    )  # fmt: skip
    assert done.returncode == 2
    assert "exclude each other" in done.stderr
    assert not folder.exists()


def test_without_the_package_the_extra_is_named():
    script = """
import sys
sys.modules["cryptography"] = None  # importing it raises ImportError
from curvedp.errors import ConfigurationError
from curvedp.noise import RandomStreams, SecureStreams
RandomStreams(0)
try:
    SecureStreams(0)
except ConfigurationError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "'cryptography'" in done.stdout
    assert "pip install 'curvedp[secure]'" in done.stdout
