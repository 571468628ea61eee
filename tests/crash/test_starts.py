"""The first moments of a run: races for a folder, and kills before it is a run."""

import contextlib
import json
import os
from dataclasses import replace

import pytest

from curvedp.accounting import Ledger, LedgerHeader, read_ledger
from curvedp.barrier import Relation
from curvedp.errors import ConfigurationError, LedgerError, StorageError
from curvedp.experiments import RunFolder, resume_run, train_run
from curvedp.locks import LOCK_NAME, sole_writer
from tests.crash.runs import check_tidy, end, start, train_flags
from tests.crash.test_windows import Crash, crash_after
from tests.experiments.conftest import config

pytestmark = pytest.mark.fault

__all__ = ["config"]


def contents(folder):
    return {
        p.relative_to(folder): p.is_file() and p.read_bytes()
        for p in folder.rglob("*")
        if p.name != LOCK_NAME
    }


@pytest.fixture
def reference(config):
    return replace(
        config, recipe="non-private", privacy={"batch_size": 30, "epochs": 4}
    )


# -- two at the same moment ------------------------------------------------------------


def test_of_several_trains_at_the_same_moment_one_wins(blobs, tmp_path):
    runs = [start(tmp_path, *train_flags(blobs, 40)) for _ in range(3)]
    ends = sorted(end(process) for process in runs)
    assert [code for code, *_ in ends] == [0, 2, 2], ends
    for _, output, message in ends[1:]:
        assert output == "" and "Traceback" not in message
        assert "in use by another run" in message or "exists already" in message
    assert json.loads(ends[0][1])["finished"]
    record = read_ledger(tmp_path / "run" / "ledger.jsonl")
    assert record.count() == 40 and record.is_gapless()
    check_tidy(tmp_path / "run")


@pytest.mark.parametrize("kind", ["config", "reference"])
def test_a_folder_in_use_is_left_alone(kind, tmp_path, request):
    settings, run = request.getfixturevalue(kind), tmp_path / "run"
    RunFolder.create(run, settings)
    # what whoever holds the lock is writing; a reference has no ledger to guard it
    writing = "checkpoints/.step-00000012.1.tmp" if kind == "reference" else "x"
    (run / writing).mkdir(parents=True)
    with sole_writer(run):
        before = contents(run)
        with pytest.raises(ConfigurationError, match="run is in use by another run"):
            resume_run(run)
        with pytest.raises(ConfigurationError, match="exists already"):
            train_run(settings, run)
        assert contents(run) == before
    assert resume_run(run).finished
    check_tidy(run)


def test_who_comes_second_to_an_empty_folder_is_refused(config, tmp_path):
    with sole_writer(tmp_path / "run"):  # the other has not written run.json yet
        with pytest.raises(ConfigurationError, match="in use"):
            train_run(config, tmp_path / "run")
        assert (tmp_path / "run" / LOCK_NAME).exists(), "the lock of the first is gone"
    assert not (tmp_path / "run").exists()


def test_a_failed_start_removes_nothing_that_another_process_holds(config, tmp_path):
    with sole_writer(tmp_path / "run"):
        folder = RunFolder.create(tmp_path / "run", config)
        header = LedgerHeader("other", Relation.ADD_REMOVE, 1e-5)
        with Ledger.create(folder.ledger, header) as ledger:  # a loop that attached it
            before = contents(folder.path)
            with pytest.raises(LedgerError, match="in use"):
                Ledger.open(folder.ledger)
            folder.discard_if_unspent()
            assert contents(folder.path) == before
            ledger.require_open()
        folder.discard_if_unspent()  # nobody holds it, and nothing was paid for
        assert contents(folder.path) == {}


def test_a_failed_start_in_a_folder_that_was_there_leaves_it_empty(config, tmp_path):
    (tmp_path / "run").mkdir()
    bad = replace(config, model="no-such-model")
    with pytest.raises(ConfigurationError):
        train_run(bad, tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []
    assert train_run(config, tmp_path / "run").finished


# -- the lock --------------------------------------------------------------------------


def test_the_lock_of_a_killed_process_locks_nothing(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK_NAME).touch()
    with sole_writer(tmp_path / "run"):
        pass
    assert list((tmp_path / "run").iterdir()) == []


def test_a_lock_that_was_removed_before_it_was_taken_is_taken_again(
    tmp_path, monkeypatch
):
    from curvedp import locks

    original, tries = locks.try_lock, []

    def late(descriptor):  # its owner ends between our open and our lock
        if not tries:
            (tmp_path / "run" / LOCK_NAME).unlink()
            (tmp_path / "run").rmdir()
        tries.append(descriptor)
        return original(descriptor)

    monkeypatch.setattr(locks, "try_lock", late)
    with sole_writer(tmp_path / "run"):
        assert len(tries) == 2
        monkeypatch.undo()
        with (
            pytest.raises(ConfigurationError, match="in use"),
            sole_writer(tmp_path / "run"),
        ):
            pass


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    def read_only(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("curvedp.locks.os.open", read_only)
    with (
        pytest.raises(StorageError, match=r"run: Read-only"),
        sole_writer(tmp_path / "run"),
    ):
        pass


# -- killed before it is a run ---------------------------------------------------------


def test_train_starts_where_a_train_was_killed_before_run_json(blobs, tmp_path):
    flags = train_flags(blobs, 4)
    code, *_ = end(start(tmp_path, *flags, die=["replace", 0]))
    assert code == -9
    left = sorted(p.name for p in (tmp_path / "run").iterdir())
    assert len(left) == 2 and left[0].startswith(".run.json.") and left[1] == LOCK_NAME
    code, _, message = end(start(tmp_path, "resume", "run"))
    assert code == 2 and "start it again" in message
    code, output, message = end(start(tmp_path, *flags))
    assert code == 0, message
    assert json.loads(output)["finished"]
    check_tidy(tmp_path / "run")


@pytest.mark.parametrize("kind", ["config", "reference"])
def test_wherever_a_start_is_killed_train_or_resume_goes_on(kind, tmp_path, request):
    settings = request.getfixturevalue(kind)
    again = {"train": 0, "resume": 0}
    for count in range(40):
        run = tmp_path / str(count) / "run"
        with pytest.MonkeyPatch.context() as patch:
            crash_after(patch, count)
            try:
                train_run(settings, run)
            except Crash:
                pass
            else:
                break
        done = (run / "result.json").exists()  # then its lock is all that may be left
        with pytest.MonkeyPatch.context() as patch:
            crash_after(patch, 10**6)
            if (run / "run.json").exists():
                again["resume"] += 1
                result = resume_run(run)
            else:
                again["train"] += 1
                result = train_run(settings, run)
        assert result.finished
        assert [p.name for p in run.rglob(".*")] in ([], [LOCK_NAME] * done)
    assert min(again.values()) > 2, again


def test_wherever_a_failed_start_is_killed_while_it_tidies_up(config, tmp_path):
    """What is left can be trained anew or resumed at every moment."""
    states = set()
    for count in range(20):
        run = tmp_path / str(count)
        with sole_writer(run):
            folder = RunFolder.create(run, config)
            header = LedgerHeader("run", Relation.ADD_REMOVE, 1e-5)
            Ledger.create(folder.ledger, header).close()
            (folder.checkpoints / "step-00000000").mkdir(parents=True)
            (folder.checkpoints / "step-00000000" / "checkpoint.json").touch()
            with pytest.MonkeyPatch.context() as patch:
                crash_after(patch, count)
                with contextlib.suppress(Crash):
                    folder.discard_if_unspent()
        names = {p.name for p in run.glob("[!.]*")} if run.exists() else set()
        states.add(frozenset(names))
        # never a checkpoint without its ledger, nor anything without run.json
        assert "ledger.jsonl" in names or "checkpoints" not in names
        assert "run.json" in names or not names
        if names and "ledger.jsonl" not in names:
            assert resume_run(run).finished
            check_tidy(run)
    assert len(states) == 4 and frozenset() in states, states
    assert os.listdir(tmp_path / "0")
