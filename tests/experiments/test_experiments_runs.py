import errno
import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from curvedp.accounting import read_ledger
from curvedp.errors import (
    CheckpointError,
    ConfigurationError,
    CouplingError,
    CoverageError,
    CurvedpError,
    DataError,
    LedgerError,
    StorageError,
)
from curvedp.experiments import (
    StopRequest,
    build_run,
    load_trained,
    resume_run,
    train_run,
)
from curvedp.train.journal import Journal


def parameters(run_dir):
    return load_trained(run_dir).model.state_dict()


def same(one, other):
    return all(torch.equal(v, other[k]) for k, v in one.items())


def test_a_run_leaves_its_files_and_learns(config, tmp_path):
    result = train_run(config, tmp_path / "run")
    assert result.finished
    assert result.steps == 12
    assert result.metrics["accuracy"] > 0.8
    stored = json.loads((tmp_path / "run" / "result.json").read_text())
    assert stored["metrics_computed_on"] == "test"
    assert stored["metrics"] == result.metrics
    assert stored["private"] is False  # reproducible noise has no guarantee
    assert read_ledger(tmp_path / "run" / "ledger.jsonl").is_gapless()


def test_initialisation_follows_the_seed_and_leaves_the_global_state_alone(config):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one = build_run(config).model.state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert same(one, build_run(config).model.state_dict())
    assert not same(one, build_run(replace(config, seed=2)).model.state_dict())


def test_stopped_at_random_steps_ten_times_it_ends_with_the_same_bits(config, tmp_path):
    config = replace(config, privacy={**config.privacy, "epochs": 16})  # 48 steps
    train_run(config, tmp_path / "unbroken")
    places = sorted(random.Random(7).sample(range(1, 48), 10))
    stop = StopRequest()
    result = train_run(
        config, tmp_path / "broken", stop=stop, on_progress=_stop_at(places, stop)
    )
    sittings = 1
    while not result.finished:
        stop = StopRequest()
        result = resume_run(
            tmp_path / "broken", stop=stop, on_progress=_stop_at(places, stop)
        )
        sittings += 1
    assert sittings == 11
    assert same(parameters(tmp_path / "unbroken"), parameters(tmp_path / "broken"))
    ledger = read_ledger(tmp_path / "broken" / "ledger.jsonl")
    assert ledger.is_gapless()
    assert ledger.count() == 48


def _stop_at(places, stop):
    def report(progress):
        if places and progress.step == places[0]:
            places.pop(0)
            stop()

    return report


def test_a_stop_before_the_first_step_leaves_a_folder_to_resume(config, tmp_path):
    stop = StopRequest()
    stop()
    result = train_run(config, tmp_path / "run", stop=stop)
    assert not result.finished
    assert result.steps == 0
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["run.json"]
    assert resume_run(tmp_path / "run").finished
    train_run(config, tmp_path / "other")
    assert same(parameters(tmp_path / "run"), parameters(tmp_path / "other"))


def test_resuming_a_finished_run_gives_its_result_again(config, tmp_path):
    first = train_run(config, tmp_path / "run")
    again = resume_run(tmp_path / "run")
    assert again.finished
    assert again.metrics == first.metrics
    assert read_ledger(tmp_path / "run" / "ledger.jsonl").count() == 12


def test_a_lost_release_is_paid_again_and_stays_in_the_budget(
    config, tmp_path, monkeypatch
):
    write = Journal.write

    def full_disk(self, release, *rest):
        if release.step == 7:
            raise StorageError("cannot write: No space left on device", "free some")
        write(self, release, *rest)

    monkeypatch.setattr(Journal, "write", full_disk)
    with pytest.raises(StorageError):
        train_run(config, tmp_path / "run")
    monkeypatch.undo()
    ledger = read_ledger(tmp_path / "run" / "ledger.jsonl")
    assert ledger.count() == 8  # what was paid for is not thrown away
    assert resume_run(tmp_path / "run").finished
    ledger = read_ledger(tmp_path / "run" / "ledger.jsonl")
    assert ledger.next_attempt(7) == 2
    assert ledger.is_gapless()
    assert ledger.count() == 12


def test_a_full_disk_at_the_start_leaves_nothing(config, tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("curvedp.storage._sync_file", full)
    with pytest.raises(StorageError, match="No space left"):
        train_run(config, tmp_path / "deep" / "run")
    assert not (tmp_path / "deep").exists()


def test_the_non_private_reference_is_labelled(config, tmp_path):
    reference = replace(
        config, recipe="non-private", privacy={"batch_size": 30, "epochs": 4}
    )
    result = train_run(reference, tmp_path / "run")
    document = result.to_json()
    assert document["label"] == "NOT PRIVATE"
    assert document["epsilon"] is None
    assert document["private"] is False
    assert not (tmp_path / "run" / "ledger.jsonl").exists()
    assert load_trained(tmp_path / "run").step == 12


def test_a_stopped_reference_starts_again(config, tmp_path):
    reference = replace(
        config, recipe="non-private", privacy={"batch_size": 30, "epochs": 4}
    )
    stop = StopRequest()
    stopped = train_run(
        reference, tmp_path / "run", stop=stop, on_progress=_stop_at([3], stop)
    )
    assert (stopped.finished, stopped.steps) == (False, 3)
    assert resume_run(tmp_path / "run").steps == 12


def test_metrics_on_a_validation_split_are_labelled_and_noted(config, tmp_path):
    split = replace(config, validation=0.3)
    split = replace(split, privacy={**split.privacy, "batch_size": 20})
    result = train_run(split, tmp_path / "run")
    assert result.split == "validation"
    notes = read_ledger(tmp_path / "run" / "ledger.jsonl").notes()
    assert any("validation split" in note for note in notes)
    assert any("validation split" in note for note in result.facts["notes"])


def test_without_a_test_split_no_accuracy_is_computed(config, tmp_path, blobs):
    import numpy as np

    arrays = np.load(blobs)
    path = tmp_path / "only-train.npz"
    np.savez(path, x=arrays["x_train"], y=arrays["y_train"])
    result = train_run(replace(config, data=str(path)), tmp_path / "run")
    assert result.metrics == {}
    assert "release" in result.to_json()["metrics_note"]


def test_the_private_loss_is_shown_only_when_asked_for(config, tmp_path):
    seen = []
    train_run(config, tmp_path / "quiet", on_progress=seen.append)
    assert {p.private_loss for p in seen} == {None}
    loud = replace(config, show_private_training_loss=True)
    train_run(loud, tmp_path / "loud", on_progress=seen.append)
    assert seen[-1].private_loss is not None
    notes = read_ledger(tmp_path / "loud" / "ledger.jsonl").notes()
    assert any("training loss was shown" in note for note in notes)


# -- refusals: a clear error before anything is spent or written ----------------------

MODELS = """
from torch import nn

def mixes(input_shape, num_outputs):
    return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, num_outputs))

class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 3)
        self.spare = nn.Linear(2, 2)
    def forward(self, x):
        return self.out(x)

def too_few(): return nn.Linear(6, 2)
def wrong_input(): return nn.Linear(7, 3)
def no_module(): return 3
def fine(input_shape, num_outputs, scale): return nn.Linear(6, num_outputs)
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    (tmp_path / "own_models_for_tests.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_models_for_tests"


@pytest.mark.parametrize(
    ("factory", "error", "words"),
    [
        ("mixes", CouplingError, "BatchNorm"),
        ("Unused", CoverageError, "spare"),
        ("too_few", DataError, "3 outputs"),
        ("wrong_input", ConfigurationError, "cannot take inputs"),
        ("no_module", ConfigurationError, "not a torch module"),
        ("fine", ConfigurationError, "scale"),
        ("absent", ConfigurationError, "absent"),
    ],
)
def test_models_that_cannot_be_trained_leave_nothing(
    config, tmp_path, models, factory, error, words
):
    with pytest.raises(error, match=words):
        train_run(replace(config, model=f"{models}:{factory}"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_from_a_factory_trains(config, tmp_path, models):
    own = replace(config, model=f"{models}:fine", model_options={"scale": 2})
    assert train_run(own, tmp_path / "run").finished


def test_an_existing_run_is_never_overwritten(config, tmp_path):
    train_run(config, tmp_path / "run")
    before = (tmp_path / "run" / "result.json").read_bytes()
    with pytest.raises(ConfigurationError, match="exists already"):
        train_run(config, tmp_path / "run")
    assert (tmp_path / "run" / "result.json").read_bytes() == before


def test_a_missing_ledger_is_not_replaced_by_a_new_one(config, tmp_path):
    _interrupted(config, tmp_path / "run")
    (tmp_path / "run" / "ledger.jsonl").unlink()
    with pytest.raises(LedgerError, match="missing"):
        resume_run(tmp_path / "run")
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


@pytest.mark.parametrize("damage", ["ledger", "checkpoint", "foreign", "run"])
def test_damaged_and_foreign_files_are_refused(config, tmp_path, damage):
    run = tmp_path / "run"
    _interrupted(config, run)
    checkpoint = sorted((run / "checkpoints").iterdir())[-1]
    if damage == "ledger":
        lines = (run / "ledger.jsonl").read_text().splitlines()
        (run / "ledger.jsonl").write_text("\n".join([lines[0], *lines[2:], ""]))
    elif damage == "checkpoint":
        (checkpoint / "model.safetensors").write_bytes(b"not tensors")
    elif damage == "run":
        (run / "run.json").write_text('{"kind": "something"}')
    else:
        _interrupted(replace(config, seed=3), tmp_path / "other")
        (run / "ledger.jsonl").write_bytes(
            (tmp_path / "other" / "ledger.jsonl").read_bytes()
        )
    with pytest.raises(CurvedpError):
        resume_run(run)
    if damage in ("checkpoint", "foreign"):
        with pytest.raises(CheckpointError):
            load_trained(run)


def _interrupted(config, run):
    stop = StopRequest()
    train_run(config, run, stop=stop, on_progress=_stop_at([6], stop))


def test_an_infinite_epsilon_and_a_diverged_run_are_stored_as_words(config, tmp_path):
    wild = replace(
        config,
        recipe_settings={"learning_rate": 1e38},
        privacy={**config.privacy, "noise_multiplier": 1e-6},
    )
    train_run(wild, tmp_path / "run")
    stored = json.loads((tmp_path / "run" / "result.json").read_text())
    assert stored["epsilon"] == "inf"
    assert stored["metrics"]["loss"] in ("nan", "inf")
    again = resume_run(tmp_path / "run")
    assert again.facts["epsilon"] == float("inf")
    assert again.metrics["loss"] != 0.0


@pytest.mark.parametrize("hidden", [True, False])
def test_where_the_size_is_protected_one_example_less_moves_nobody_else(
    config, blobs, tmp_path, hidden
):
    """Of the parts that are set apart; where the size is public, places stay."""
    arrays = dict(np.load(blobs))
    fewer = tmp_path / "fewer.npz"
    np.savez(fewer, **{k: v[1:] if "train" in k else v for k, v in arrays.items()})
    if hidden:
        rate = {"sample_rate": 0.3, "steps": 12, "expected_batch_size": 20.0}
        privacy = {"noise_multiplier": 2.0, "delta": 1e-3, **rate}
        config = replace(config, privacy=privacy)
    parts = []
    for data in (blobs, fewer):
        run = build_run(replace(config, data=str(data), validation=0.3))
        parts.append(
            [{tuple(x.tolist()) for x in p.inputs} for p in (run.train, run.held_out)]
        )
    moved = sum(len(whole ^ less) for whole, less in zip(*parts, strict=True))
    assert moved == 1 if hidden else moved > 1
