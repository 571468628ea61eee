"""A crash at every single call to the operating system, one after the other."""

import contextlib
import errno
import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from curvedp import Trainer
from curvedp.accounting import read_ledger
from curvedp.errors import StorageError
from curvedp.storage import clear_leftovers, write_atomically, write_folder_atomically

pytestmark = pytest.mark.fault

STEPS = 5
CALLS = ["write", "fsync", "replace", "link", "unlink", "rmdir", "mkdir", "ftruncate"]


class Crash(BaseException):
    """The process is gone: nothing after this reaches the disk."""


def crash_after(patch, count, error=Crash, calls=CALLS):
    """From the given call on every call fails; the counter says how many were left."""
    left = [count]

    def broken(original):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                raise error()
            return original(*args, **kwargs)

        return call

    for name in calls:
        # a test's disk need not be forced, which takes most of the time
        original = (lambda _: None) if name == "fsync" else getattr(os, name)
        patch.setattr(os, name, broken(original))
    return left


def fit(folder, resume=False):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 3), torch.arange(24) % 2)
    model = nn.Linear(3, 2)
    result = Trainer(
        model, "cross-entropy", noise_multiplier=1.0, delta=1e-2, sample_rate=0.25,
        expected_batch_size=6, steps=STEPS, run_dir=folder, checkpoint_every=2, seed=0,
        unsafe_reproducible_noise=0,
    ).fit(data, resume=resume)  # fmt: skip
    return result, model.weight.detach()


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """How many calls an unbroken run makes, and what it ends with."""
    with pytest.MonkeyPatch.context() as patch:
        left = crash_after(patch, 10**6)
        _, weight = fit(tmp_path_factory.mktemp("unbroken") / "run")
    return 10**6 - left[0], weight


def full():
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_only():
    return OSError(errno.EROFS, os.strerror(errno.EROFS))


@pytest.mark.parametrize(
    ("error", "stride"),
    [
        (Crash, 5),
        (full, 13),
        (read_only, 13),
        pytest.param(Crash, 1, marks=pytest.mark.slow),
        pytest.param(full, 1, marks=pytest.mark.slow),
    ],
)
def test_whatever_call_is_the_last_the_run_can_be_resumed(
    tmp_path, calls, error, stride
):
    total, expected = calls
    assert total > 60
    raised = Crash if error is Crash else StorageError
    repeated = stopped = 0
    for count in range(0, total, stride):
        run = tmp_path / str(count)
        with pytest.MonkeyPatch.context() as patch:
            crash_after(patch, count, error)
            try:
                fit(run)
            except raised as problem:
                stopped += 1
                if error is not Crash:
                    assert str(run) in str(problem)
        with pytest.MonkeyPatch.context() as patch:
            crash_after(patch, 10**6)
            result, weight = fit(run, resume=True)
        record = read_ledger(run / "ledger.jsonl")
        assert result.finished and record.is_gapless() and record.chained
        assert record.count() == STEPS
        again = STEPS - result.steps
        assert again <= 1
        repeated += again
        if not again:
            assert torch.equal(weight, expected)
        assert list(run.rglob(".*")) == []
        assert len(list((run / "checkpoints").iterdir())) == 2
        shutil.rmtree(run)
    # tidying up after the last checkpoint may fail without a word
    assert stopped > 0.8 * total / stride
    assert 0 < repeated < 0.5 * total / stride


def test_a_folder_is_the_old_or_the_new_one_at_every_moment(tmp_path):
    path = tmp_path / "folder"

    def store(text):
        write_folder_atomically(path, lambda p: (p / "file").write_text(text) and None)

    seen = set()
    for count in range(40):
        store("old")
        with pytest.MonkeyPatch.context() as patch:
            left = crash_after(patch, count)
            with contextlib.suppress(Crash):
                store("new")
        clear_leftovers(tmp_path)
        seen.add((path / "file").read_text())
        assert [p.name for p in tmp_path.iterdir()] == ["folder"]
    assert left[0] > 0, "the last rounds did not crash"
    assert seen == {"old", "new"}


def test_leftovers_of_the_dead_are_cleared_and_those_of_the_living_are_not(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for owner in (gone.pid, os.getppid(), "x"):
        (tmp_path / f".file.{owner}.tmp").touch()
    write_atomically(tmp_path / "file", lambda p: p.touch())
    kept = {"file", f".file.{os.getppid()}.tmp", ".file.x.tmp"}
    assert set(os.listdir(tmp_path)) == kept


def test_a_failed_replacement_leaves_the_old_folder(tmp_path, monkeypatch):
    path = tmp_path / "folder"
    write_folder_atomically(path, lambda p: (p / "file").write_text("old") and None)
    original = os.replace

    def replace(source, target):
        if str(source).endswith(".tmp"):
            raise full()
        original(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(StorageError, match="No space left"):
        write_folder_atomically(path, lambda p: (p / "file").write_text("new") and None)
    assert (path / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["folder"]


def test_a_new_folder_is_forced_to_disk_with_its_parents(tmp_path, monkeypatch):
    synced = []
    original = os.fsync

    def fsync(descriptor):
        synced.append(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_atomically(tmp_path / "a" / "b" / "file", lambda p: p.touch())
    folders = [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")]
    assert [p for p in synced if p in folders] == folders


def test_the_journal_is_dropped_after_the_checkpoint_is_on_disk(tmp_path, monkeypatch):
    done = []
    replace, fsync, unlink = os.replace, os.fsync, os.unlink

    def spy(name, original):
        def call(what, *args, **kwargs):
            text = f"/proc/self/fd/{what}" if isinstance(what, int) else str(what)
            done.append((name, os.path.realpath(text), *map(str, args)))
            return original(what, *args, **kwargs)

        return call

    monkeypatch.setattr(os, "replace", spy("replace", replace))
    monkeypatch.setattr(os, "fsync", spy("fsync", fsync))
    monkeypatch.setattr(os, "unlink", spy("unlink", unlink))
    fit(tmp_path)
    folder = str(tmp_path / "checkpoints")
    placed = next(n for n, c in enumerate(done) if c[-1].endswith("step-00000004"))
    synced = next(
        n for n, c in enumerate(done) if n > placed and c[:2] == ("fsync", folder)
    )
    dropped = [
        n for n, c in enumerate(done)
        if c[0] == "unlink" and c[1].endswith("journal/step-00000001.safetensors")
    ]  # fmt: skip
    assert placed < synced < dropped[0]
