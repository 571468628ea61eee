"""Files of limited size, single flipped bits, forks and copies of a run."""

import os
import random
import resource
import shutil

import pytest
import torch

from curvedp.accounting import read_ledger
from curvedp.errors import CurvedpError, LedgerError, StorageError
from curvedp.train.engine import Engine
from curvedp.train.journal import Journal
from tests.crash.test_attached import attached, train
from tests.crash.test_windows import STEPS, Crash, crash_after
from tests.crash.test_windows import fit as fitted
from tests.faults.cases import attach, examples, parameters

pytestmark = pytest.mark.fault


# -- a limit on the size of files ------------------------------------------------------


@pytest.mark.parametrize("size", [1500, 2500, 2900])
def test_a_file_that_may_not_grow_stops_the_run_which_then_finishes(tmp_path, size):
    """The kernel refuses the write half-way through a line, as a quota does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        with pytest.raises(StorageError, match="too large") as caught:
            fitted(tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(tmp_path / "run") in str(caught.value)
    paid = 0
    if (tmp_path / "run" / "ledger.jsonl").exists():
        paid = read_ledger(tmp_path / "run" / "ledger.jsonl").count()
    assert paid < STEPS
    result, _ = fitted(tmp_path / "run", resume=True)
    record = read_ledger(tmp_path / "run" / "ledger.jsonl")
    assert result.finished and record.count() == STEPS and record.is_gapless()
    assert sum(p.attempt > 0 for p in record.payments()) <= 1
    assert list((tmp_path / "run").rglob(".*")) == []


# -- single bits -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def broken_off(tmp_path_factory):
    """A run that was killed after its third step, and how it would have ended."""
    folder = tmp_path_factory.mktemp("bits")
    original = Engine.apply

    def apply(self, release):
        original(self, release)
        if release.step == 2:
            raise Crash

    with pytest.MonkeyPatch.context() as patch:
        crash_after(patch, 10**6)  # nothing is forced to disk, which takes long
        _, expected = fitted(folder / "whole")
        patch.setattr(Engine, "apply", apply)
        with pytest.raises(Crash):
            fitted(folder / "run")
    assert Journal(folder / "run" / "journal").steps()[-1] == 2
    return folder / "run", expected


def flip(path, chance):
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


@pytest.mark.parametrize(
    "flips", [24, pytest.param(1500, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_a_flipped_bit_is_found_or_does_no_harm(broken_off, tmp_path, flips):
    source, expected = broken_off
    chance, ends = random.Random(11), {"refused": 0, "paid again": 0, "same": 0}
    for number in range(flips):
        run = shutil.copytree(source, tmp_path / str(number))
        files = sorted(p for p in run.rglob("*") if p.is_file() and p.stat().st_size)
        flip(chance.choice(files), chance)
        before = (run / "ledger.jsonl").read_bytes()
        with pytest.MonkeyPatch.context() as patch:
            crash_after(patch, 10**6)
            try:
                _, weight = fitted(run, resume=True)
            except CurvedpError as error:
                ends["refused"] += 1
                assert error.advice and str(run) in str(error)
                assert (run / "ledger.jsonl").read_bytes() == before
            else:
                record = read_ledger(run / "ledger.jsonl")
                again = sum(p.attempt > 0 for p in record.payments())
                assert record.count() <= STEPS and record.is_gapless()
                ends["paid again" if again else "same"] += 1
                # other parameters than those of the unbroken run were paid for
                assert again or torch.equal(weight, expected)
        shutil.rmtree(run)
    # most of the others hit releases that a checkpoint has made superfluous
    assert ends["refused"] > flips / 6, ends


# -- forks and copies ------------------------------------------------------------------


def in_a_fork(action):
    """What the action raises in a forked process, by name and text."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            action()
            said = "nothing"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as pipe:
        return pipe.read()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("folder", [False, True])
def test_a_forked_process_neither_pays_nor_draws(tmp_path, folder, secure):
    if secure:
        pytest.importorskip("cryptography")
    options = {"run_dir": tmp_path / "run"} if folder else {}
    options |= {"secure": secure, "unsafe_reproducible_noise": None}
    with attach(examples(), steps=8, **options) as private:
        train(private, 2)
        said = in_a_fork(lambda: train(private, 3))
        assert "forked" in said and "Error: " in said
        if folder:
            assert read_ledger(tmp_path / "run" / "ledger.jsonl").count() == 2
        train(private, 4)  # the parent goes on
        assert private.step == 4


def test_copies_of_a_run_that_both_go_on_never_share_noise(tmp_path):
    """Whoever resumes takes fresh entropy: the copies' releases cannot cancel."""
    with attached(tmp_path / "one", unsafe_reproducible_noise=None) as private:
        train(private, 3)
        private.save()
        before = parameters(private.model)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    released = []
    for name in ("one", "two"):
        with attached(tmp_path / name, unsafe_reproducible_noise=None) as private:
            private.resume()
            assert torch.equal(parameters(private.model), before)
            train(private, 4)
        release, _ = Journal(tmp_path / name / "journal").read(3)
        released.append(torch.cat([v.flatten() for v in release.values.values()]))
    assert not torch.isclose(*released).any()


def test_two_processes_cannot_hold_one_ledger(tmp_path):
    with attached(tmp_path / "run") as private:
        train(private, 2)
        with pytest.raises(LedgerError, match="in use by another run"):
            attached(tmp_path / "run")
        train(private, 3)
    assert read_ledger(tmp_path / "run" / "ledger.jsonl").count() == 3
