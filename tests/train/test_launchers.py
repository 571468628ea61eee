"""Several processes that a launcher started, and that know nothing of each other."""

from __future__ import annotations

import subprocess
import sys

import pytest

from curvedp import Trainer
from curvedp.accounting import read_ledger
from curvedp.accounting.records import INDEPENDENT_NOTE
from curvedp.errors import ConfigurationError
from curvedp.experiments.config import RunConfig
from curvedp.federated import Client

from ..faults.cases import attach, examples, train
from ..federated.worlds import World
from .loops import small_net

NAMES = ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]
NAMES += ["PMIX_SIZE", "MV2_COMM_WORLD_SIZE", "PALS_NRANKS", "JSM_NAMESPACE_SIZE"]


@pytest.mark.parametrize("name", NAMES)
def test_one_of_several_ranks_without_a_group_is_refused(name, monkeypatch, tmp_path):
    monkeypatch.setenv(name, "2")
    with pytest.raises(ConfigurationError, match=name) as refusal:
        attach(examples(), run_dir=tmp_path / "run")
    assert "one process" in str(refusal.value)
    assert "independent_process=True" in str(refusal.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, "1") for name in NAMES),
        ("SLURM_NTASKS", "8"),  # of the allocation: a single python has it too
        ("WORLD_SIZE", "abc"),
        ("WORLD_SIZE", ""),
        ("WORLD_SIZE", "-2"),
        ("WORLD_SIZE", "2.5"),
        ("WORLD_SIZE", "²"),
    ],
)
def test_one_rank_and_words_that_mean_nothing_are_not(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    attach(examples())


def test_a_launcher_with_more_ranks_than_int_reads_is_one(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "9" * 5000)
    with pytest.raises(ConfigurationError, match="WORLD_SIZE"):
        attach(examples())


def test_steps_are_refused_where_the_launcher_shows_later(monkeypatch):
    private = attach(examples())
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="WORLD_SIZE"):
        train(private)
    assert private._engine.ledger.count() == 0


def test_independent_runs_say_so_in_ledger_and_statement(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    run = tmp_path / "run"
    with attach(examples(), run_dir=run, independent_process=True) as private:
        train(private)
        assert INDEPENDENT_NOTE in str(private.statement())
    assert read_ledger(run / "ledger.jsonl").notes().count(INDEPENDENT_NOTE) == 1
    with attach(examples(), run_dir=run, independent_process=True):
        pass
    assert read_ledger(run / "ledger.jsonl").notes().count(INDEPENDENT_NOTE) == 1


def test_the_trainer_and_a_config_take_the_same_word(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    settings = {"noise_multiplier": 1.0, "sample_rate": 0.5, "steps": 1,
                "expected_batch_size": 10}  # fmt: skip
    table = {"data": "digits", "privacy": {**settings, "independent_process": True}}
    said = RunConfig.from_mapping(table).settled().privacy
    result = Trainer(small_net(), "cross-entropy", **said).fit(examples())
    assert INDEPENDENT_NOTE in str(result.statement)
    with pytest.raises(ConfigurationError, match="independent_process"):
        Trainer(small_net(), "cross-entropy", **settings).fit(examples())


def test_a_client_with_its_ledger_in_memory_is_refused(monkeypatch, tmp_path):
    world = World()
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match=r"run_dir"):
        Client(0, world.together, world.data[0])
    Client(0, world.together, world.data[0], run_dir=tmp_path / "own").close()


RANK = """
import torch
from torch.utils.data import TensorDataset
from curvedp import make_private
from curvedp.errors import ConfigurationError
model = torch.nn.Linear(4, 3)
data = TensorDataset(torch.randn(24, 4), torch.arange(24) % 3)
try:
    make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), data,
                 loss="cross-entropy", epsilon=3.0, sample_rate=0.5, steps=2,
                 expected_batch_size=12)
except ConfigurationError as error:
    print("refused")
"""


@pytest.mark.slow
def test_two_ranks_of_torchrun_are_refused(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
               "--standalone", str(script)]  # fmt: skip
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.count("refused") == 2
