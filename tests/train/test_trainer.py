"""The Trainer: tasks, stopping, resuming, crashes."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from curvedp import Trainer
from curvedp.accounting import read_ledger
from curvedp.errors import CheckpointError, ConfigurationError, CurvedpError
from curvedp.train import (
    CsvLog,
    EarlyStopping,
    TensorBoardLog,
    evaluate,
    per_example_loss,
)
from curvedp.train.engine import Engine

from ..faults.cases import examples, parameters

STEPS = 12


def net():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))


def trainer(model=None, **options):
    settings = {
        "noise_multiplier": 1.0,
        "sample_rate": 0.4,
        "steps": STEPS,
        "expected_batch_size": 10,
        "seed": 1,
        "unsafe_reproducible_noise": 2,
        "checkpoint_every": 4,
        "physical_batch_size": 6,
    }
    return Trainer(
        model or net(), options.pop("loss", "cross-entropy"), **{**settings, **options}
    )


def unbroken():
    run = trainer()
    run.fit(examples())
    return parameters(run.model)


@pytest.mark.parametrize(
    ("loss", "outputs", "targets"),
    [
        ("cross-entropy", 3, torch.randint(0, 3, (24,))),
        ("mse", 1, torch.randn(24)),
        ("bce", 5, torch.randint(0, 2, (24, 5)).float()),
        (nn.SmoothL1Loss(), 2, torch.randn(24, 2)),
        (lambda o, y: (o - y).abs().sum(1), 2, torch.randn(24, 2)),
    ],
)
def test_tasks(loss, outputs, targets):
    run = trainer(nn.Linear(4, outputs), loss=loss, steps=3)
    before = parameters(run.model)
    result = run.fit(TensorDataset(torch.randn(24, 4), targets))
    assert result.steps == 3
    assert result.finished
    assert not torch.equal(parameters(run.model), before)


def test_language_modelling():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.positions = nn.Embedding(17, 8), nn.Embedding(6, 8)
            self.head = nn.Linear(8, 17)

        def forward(self, ids):
            places = self.positions(torch.arange(ids.shape[1]))
            return self.head(torch.tanh(self.table(ids) + places))

    ids = torch.randint(0, 17, (24, 6))
    targets = ids.roll(-1, 1)
    targets[:, -2:] = -100
    result = trainer(Model(), loss="language-modelling", steps=2).fit(
        TensorDataset(ids, targets)
    )
    assert result.steps == 2


def test_a_token_mean_over_the_batch_is_refused():
    def token_mean(output, targets):
        loss = per_example_loss("language-modelling")(output, targets)
        return loss * (targets != 0).sum(1) / (targets != 0).sum()

    ids = torch.randint(0, 7, (12, 5))
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    with pytest.raises(CurvedpError, match="couples examples"):
        trainer(model, loss=token_mean).fit(TensorDataset(ids, ids))


@pytest.mark.parametrize("recipe", ["dp-sgd", "dp-adam", "dp-adamw", "non-private"])
def test_recipes_learn(recipe):
    torch.manual_seed(0)
    x = torch.randn(400, 4)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    model = nn.Linear(4, 2)
    run = Trainer(
        model,
        "cross-entropy",
        recipe,
        noise_multiplier=0.6,
        batch_size=50,
        epochs=8,
        delta=1e-4,
        seed=0,
        unsafe_reproducible_noise=0,
        learning_rate=0.05 if "adam" in recipe else 0.5,
    )
    result = run.fit(data)
    loss = per_example_loss("cross-entropy")
    assert evaluate(model, data, loss)["accuracy"] > 0.9
    assert (result.statement is None) == (recipe == "non-private")


def stopped_and_resumed(folder, stops):
    """Run to the end, stopping after each of the given steps."""
    finished, resume = False, False
    while not finished:
        run = trainer(run_dir=folder)
        run._observers = [
            lambda p, r=run: r.request_stop() if p.step - 1 in stops else None
        ]
        finished = run.fit(examples(), resume=resume).finished
        resume = True
    return run


def test_stopped_at_random_points_and_resumed_is_bit_identical(tmp_path):
    expected = unbroken()
    generator = torch.Generator().manual_seed(0)
    for attempt in range(10):
        folder = tmp_path / str(attempt)
        stops = set(torch.randperm(STEPS - 1, generator=generator)[:2].tolist())
        run = stopped_and_resumed(folder, stops)
        assert torch.equal(parameters(run.model), expected)
        record = read_ledger(folder / "ledger.jsonl")
        assert record.is_gapless()
        assert record.count() == STEPS


@pytest.mark.parametrize("crash_at", [0, 3, 4, 7, STEPS - 1])
@pytest.mark.parametrize("where", ["before the update", "before the journal"])
def test_crashes_lose_nothing_that_was_kept(tmp_path, monkeypatch, crash_at, where):
    class Crash(BaseException):
        pass

    if where == "before the update":  # the release is in the journal
        original = Engine.apply

        def crash(self, release):
            if release.step == crash_at:
                raise Crash
            original(self, release)

        monkeypatch.setattr(Engine, "apply", crash)
    else:  # paid, noise drawn, release lost
        from curvedp.train.journal import Journal

        write = Journal.write

        def crash(self, release, groups):
            if release.step == crash_at:
                raise Crash
            write(self, release, groups)

        monkeypatch.setattr(Journal, "write", crash)
    with pytest.raises(Crash):
        trainer(run_dir=tmp_path).fit(examples())
    monkeypatch.undo()

    run = trainer(run_dir=tmp_path)
    result = run.fit(examples(), resume=True)
    record = read_ledger(tmp_path / "ledger.jsonl")
    assert record.is_gapless()
    assert record.count() == STEPS  # never more than planned
    if where == "before the update":
        assert torch.equal(parameters(run.model), unbroken())
        assert [p.attempt for p in record.payments()] == [0] * STEPS
    else:
        assert result.steps == STEPS - 1  # one payment bought nothing
        attempts = [p.attempt for p in record.payments() if p.step == crash_at]
        assert attempts == ([0, 1] if crash_at < STEPS - 1 else [0])


def test_without_a_journal_lost_steps_are_paid_again(tmp_path, monkeypatch):
    class Crash(BaseException):
        pass

    original = Engine.apply

    def crash(self, release):
        original(self, release)
        if release.step == 6:  # the last checkpoint is that of step 4
            raise Crash

    monkeypatch.setattr(Engine, "apply", crash)
    with pytest.raises(Crash):
        trainer(run_dir=tmp_path, journal=False).fit(examples())
    monkeypatch.undo()
    result = trainer(run_dir=tmp_path, journal=False).fit(examples(), resume=True)
    record = read_ledger(tmp_path / "ledger.jsonl")
    assert record.count() == STEPS
    assert result.steps == STEPS - 3  # steps 4, 5 and 6 were paid for twice
    assert not (tmp_path / "journal").exists()


def test_a_finished_run_resumes_to_itself(tmp_path):
    trainer(run_dir=tmp_path).fit(examples())
    run = trainer(run_dir=tmp_path)
    result = run.fit(examples(), resume=True)
    assert result.finished
    assert torch.equal(parameters(run.model), unbroken())
    assert read_ledger(tmp_path / "ledger.jsonl").count() == STEPS


def test_a_damaged_checkpoint_can_be_removed_without_losing_a_step(tmp_path):
    trainer(run_dir=tmp_path).fit(examples())
    newest = max((tmp_path / "checkpoints").iterdir())
    shutil.rmtree(newest)
    run = trainer(run_dir=tmp_path)
    assert run.fit(examples(), resume=True).steps == STEPS
    assert torch.equal(parameters(run.model), unbroken())
    assert read_ledger(tmp_path / "ledger.jsonl").count() == STEPS


def test_frozen_batch_norm_stays_frozen():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    model[1].requires_grad_(False).eval()
    trainer(model, steps=2).fit(examples())
    assert not model[1].training
    assert int(model[1].num_batches_tracked) == 0


@pytest.mark.parametrize("recipe", ["dp-sgd", "non-private"])
def test_data_loaders_and_collate_functions(recipe):
    def collate(items):
        x, y = zip(*items, strict=True)
        return 2 * torch.stack(x), torch.stack(y)

    results = []
    x, y = examples().tensors
    for data in (
        DataLoader(examples(), batch_size=3, collate_fn=collate),
        TensorDataset(2 * x, y),
    ):
        run = trainer(steps=2, recipe=recipe)
        run.fit(data)
        results.append(parameters(run.model))
    torch.testing.assert_close(*results)


def test_a_folder_is_used_once(tmp_path):
    trainer(run_dir=tmp_path).fit(examples())
    with pytest.raises(ConfigurationError, match="holds a run already"):
        trainer(run_dir=tmp_path).fit(examples())


def test_other_settings_do_not_continue_a_ledger(tmp_path):
    trainer(run_dir=tmp_path).fit(examples())
    with pytest.raises(ConfigurationError, match="noise_multiplier"):
        trainer(run_dir=tmp_path, noise_multiplier=0.5).fit(examples(), resume=True)


def test_damaged_checkpoints_are_refused_by_name(tmp_path):
    trainer(run_dir=tmp_path).fit(examples())
    newest = max((tmp_path / "checkpoints").iterdir())
    tensors = newest / "model.safetensors"
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    with pytest.raises(CheckpointError, match="checksum"):
        trainer(run_dir=tmp_path).fit(examples(), resume=True)
    (newest / "checkpoint.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be used"):
        trainer(run_dir=tmp_path).fit(examples(), resume=True)
    (newest / "checkpoint.json").write_text(json.dumps({"kind": "other"}))
    with pytest.raises(CheckpointError, match="not a curvedp checkpoint"):
        trainer(run_dir=tmp_path).fit(examples(), resume=True)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    trainer(run_dir=tmp_path).fit(examples())
    other = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3))
    with pytest.raises(CheckpointError, match="does not fit"):
        trainer(other, run_dir=tmp_path).fit(examples(), resume=True)


def test_files_hold_no_secret_and_no_pickle(tmp_path):
    trainer(run_dir=tmp_path, unsafe_reproducible_noise=987654321).fit(examples())
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert path.suffix in {".json", ".jsonl", ".safetensors"}
            assert b"987654321" not in path.read_bytes()


def test_logs_hold_public_quantities_only(tmp_path):
    path = tmp_path / "logs" / "run.csv"
    seen = []
    trainer(
        steps=3,
        on_progress=[CsvLog(path), seen.append],
        show_private_training_loss=True,
    ).fit(examples())
    lines = path.read_text().splitlines()
    assert lines == ["step,steps,learning_rate", "1,3,0.1", "2,3,0.1", "3,3,0.1"]
    assert all(p.private_loss is not None for p in seen)  # shown, and yet not logged


def test_tensorboard_is_optional(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigurationError, match="tensorboard"):
        TensorBoardLog(tmp_path)


def test_early_stopping_on_public_data():
    stopping = EarlyStopping(examples(12, seed=9), metric="loss", every=1, patience=2)
    result = trainer(steps=STEPS, learning_rate=0.0, early_stopping=stopping).fit(
        examples()
    )
    # with a rate of zero the first look is the best one
    assert result.stopped_early
    assert result.steps == 3
    assert any("declared public" in n for n in result.statement.facts["notes"])
    # the statement claims the planned epsilon, not that of three steps
    whole = trainer(steps=STEPS).fit(examples()).statement.facts
    assert result.statement.facts["epsilon"] == whole["epsilon"]
    assert result.statement.facts["epsilon_spent"] < whole["epsilon"]
    with pytest.raises(ConfigurationError, match="patience"):
        EarlyStopping(examples(), patience=0)


def test_the_global_random_state_is_left_alone():
    run, data = trainer(steps=2), examples()
    before = torch.get_rng_state()
    run.fit(data)
    assert torch.equal(torch.get_rng_state(), before)


def test_secret_noise_differs_between_runs():
    results = []
    for _ in range(2):
        run = trainer(unsafe_reproducible_noise=None, steps=1)
        run.fit(examples())
        results.append(parameters(run.model))
    assert not torch.equal(*results)
