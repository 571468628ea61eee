"""Data that was declared public and is the private data, or a part or a copy of it."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from curvedp import Trainer, make_private
from curvedp.errors import ConfigurationError, NotPrivateError
from curvedp.probes import OracleProbe, PublicProbe
from curvedp.train import EarlyStopping
from tests.cli.conftest import blobs, call, config

__all__ = ["blobs", "call", "config"]

DECLARED = {
    "noise_multiplier": 1.0, "sample_rate": 0.5, "steps": 2,
    "expected_batch_size": 20, "physical_batch_size": 8,
}  # fmt: skip


def rows(n=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (n,), generator=generator))


def attach(private, probes, **settings):
    model = nn.Linear(5, 3)
    return make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.1), private,
        recipe="dp-kfc", loss="cross-entropy", probe_size=8, probe_batches=1,
        probes=probes, **{"probe": "public", **DECLARED, **settings},
    )  # fmt: skip


PRIVATE = rows()
TAKEN = {
    "the dataset itself": PRIVATE,
    "its inputs": PRIVATE.tensors[0],
    "some of its rows": PRIVATE.tensors[0][7:20],
    "a subset": Subset(PRIVATE, range(10)),
    "a subset of a subset": Subset(Subset(PRIVATE, range(5, 30)), range(10)),
    "together with others": ConcatDataset([rows(9, seed=4), PRIVATE]),
    "other labels": TensorDataset(PRIVATE.tensors[0], torch.zeros(40).long()),
    "a copy": TensorDataset(*(x.clone() for x in PRIVATE.tensors)),
    "a copy of some rows": PRIVATE.tensors[0][3:20].clone(),
    "a shuffled copy, half of it": torch.cat(
        [PRIVATE.tensors[0][torch.randperm(40)[:10]], rows(10, 8).tensors[0]]
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_private_rows_are_not_public_because_somebody_says_so(name):
    with pytest.raises(ConfigurationError, match="private data itself"):
        attach(PRIVATE, PublicProbe(TAKEN[name]))


@pytest.mark.parametrize("private", [Subset(PRIVATE, range(20, 40)), PRIVATE])
def test_a_subset_is_held_against_what_is_trained_on(private):
    public = Subset(PRIVATE, range(20, 30))
    with pytest.raises(ConfigurationError, match="private data itself"):
        attach(private, PublicProbe(public))


def test_parts_that_do_not_meet_may_be_declared_apart():
    x, y = PRIVATE.tensors
    few = torch.randint(0, 2, (40, 5)).float()  # of 32 rows that there can be
    for private, public in [
        (Subset(PRIVATE, range(20)), Subset(PRIVATE, range(20, 40))),
        (TensorDataset(x[:20], y[:20]), TensorDataset(x[20:], y[20:])),
        (TensorDataset(x[::2], y[::2]), x[1::2]),
        (PRIVATE, rows(seed=5)),
        (TensorDataset(few.repeat(3, 1), torch.zeros(120).long()), few.clone()),
        (PRIVATE, torch.cat([x[:2].clone(), rows(30, seed=6).tensors[0]])),
    ]:
        attach(private, PublicProbe(public)).close()


def test_an_oracle_under_any_name_has_no_epsilon():
    with pytest.raises(ConfigurationError, match="looks at private data"):
        attach(PRIVATE, OracleProbe(PRIVATE))
    with pytest.raises(ConfigurationError, match="private data itself"):
        attach(PRIVATE, PublicProbe(PRIVATE), probe="oracle")
    with attach(PRIVATE, None, probe="oracle") as private:
        with pytest.raises(NotPrivateError):
            private.epsilon()
        assert "NO PRIVACY GUARANTEE" in str(private.statement())


def test_a_run_is_not_stopped_by_its_own_data():
    watch = EarlyStopping(Subset(PRIVATE, range(9)), metric="loss")
    trainer = Trainer(
        nn.Linear(5, 3), "cross-entropy", early_stopping=watch, learning_rate=0.1,
        **DECLARED,
    )  # fmt: skip
    with pytest.raises(ConfigurationError, match="early_stopping"):
        trainer.fit(PRIVATE)


# -- on the command line ---------------------------------------------------------------


@pytest.fixture
def table(blobs):
    """A run in a TOML file; what is given goes below its recipe."""

    def written(path, recipe=""):
        path.write_text(
            f'data = {{source = "{blobs}", num_classes = 3}}\nmodel = "logreg"\n'
            "[privacy]\nnoise_multiplier = 2.0\ndelta = 1e-3\nbatch_size = 30\n"
            'epochs = 1\n[recipe]\nname = "dp-kfc"\nprobe_size = 16\n'
            f"probe_batches = 1\n{recipe}"
        )
        return path

    return written


def test_an_oracle_is_one_from_a_file_too_and_stays_one(call, table, tmp_path):
    config = table(tmp_path / "run.toml", 'probe = "oracle"\n')
    said = call("train", "--config", config, "--run-dir", "run")
    assert "NOT PRIVATE" in said.stdout
    stored = tmp_path / "run" / "run.json"
    text = stored.read_text()
    assert text.count('"oracle"') == 1
    stored.write_text(text.replace('"oracle"', '"synthetic"'))
    assert "epsilon" not in call("privacy", "spent", "run", code=2).stdout


@pytest.mark.parametrize("copied", ["inputs", "other labels", "most rows"])
def test_a_copy_of_the_private_file_is_not_public(call, table, blobs, tmp_path, copied):
    with np.load(blobs) as file:
        x, y = file["x_train"], file["y_train"]
    if copied == "other labels":
        y = np.zeros_like(y)
    if copied == "most rows":
        x, y = x[10:], y[10:]
    np.savez(tmp_path / "public.npz", x=x, y=y)
    flags = ["--public-data", tmp_path / "public.npz", "--run-dir", "run"]
    flags += ["--public-option", "num_classes=3"]
    config = table(tmp_path / "run.toml")
    said = call("train", "--config", config, *flags, code=2).stderr
    assert "private data itself" in said
    assert not (tmp_path / "run").exists()
