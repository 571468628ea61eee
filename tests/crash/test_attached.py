"""What is checked whenever a run folder is attached, and refused once it is closed."""

import json
import os
import shutil
from datetime import UTC, datetime, timedelta

import pytest
import torch

from curvedp.accounting import ledger as ledger_module
from curvedp.accounting import read_ledger
from curvedp.accounting.records import chain_of
from curvedp.errors import (
    ConfigurationError,
    CurvedpError,
    LedgerError,
)
from curvedp.noise import restore_release
from curvedp.train.checkpoint import _seal
from curvedp.train.journal import Journal
from tests.accounting.test_accounting_ledger import unchain
from tests.faults.cases import attach, examples, parameters

pytestmark = pytest.mark.fault

STEPS = 8


class Crash(BaseException):
    pass


def attached(run, **options):
    return attach(examples(), run_dir=run, steps=STEPS, **options)


def train(private, until):
    for x, y in private.loader:
        private.optimizer.zero_grad()
        private.loss(private.model(x), y).backward()
        private.optimizer.step()
        if private.step >= until:
            return


def lines_of(run):
    return (run / "ledger.jsonl").read_text().splitlines(keepends=True)


def cut(run, lines):
    (run / "ledger.jsonl").write_text("".join(lines_of(run)[:-lines]))


@pytest.fixture
def run(tmp_path):
    """Four steps: checkpoints before and after them, and all releases."""
    with attached(tmp_path / "run") as private:
        private.save()
        train(private, 4)
        private.save()
    return tmp_path / "run"


def test_a_payment_made_again_cannot_be_cut_off(run, monkeypatch):
    def crash(*_):
        raise Crash

    with attached(run) as private:
        private.resume()
        with monkeypatch.context() as patch, pytest.raises(Crash):
            patch.setattr(Journal, "write", crash)
            train(private, 5)
    with attached(run) as private:
        private.resume()
        train(private, 5)  # paid a second time; this release is in the journal
    assert read_ledger(run / "ledger.jsonl").next_attempt(4) == 2
    cut(run, 1)
    assert read_ledger(run / "ledger.jsonl").next_attempt(4) == 1
    with pytest.raises(LedgerError, match=r"line 7 .*step-00000004\S* was made"):
        attached(run)


@pytest.mark.parametrize("witness", ["checkpoints", "journal"])
@pytest.mark.parametrize("lines", [1, 4])
def test_a_ledger_cut_short_offers_no_steps_without_resume_either(run, lines, witness):
    shutil.rmtree(run / {"checkpoints": "journal", "journal": "checkpoints"}[witness])
    cut(run, lines)
    with pytest.raises(LedgerError, match="cut short") as caught:
        attached(run)
    assert "restore the ledger from a copy" in str(caught.value)
    with pytest.raises(LedgerError, match="cut short"):  # and it is not locked
        attached(run)


def test_an_unchained_ledger_cut_short_is_found_by_its_head_too(tmp_path):
    with attached(tmp_path / "run"):
        pass
    unchain(tmp_path / "run" / "ledger.jsonl")
    with attached(tmp_path / "run") as private:
        train(private, 4)
        private.save()
    cut(tmp_path / "run", 1)
    shutil.rmtree(tmp_path / "run" / "journal")
    with pytest.raises(LedgerError, match="cut short"):
        attached(tmp_path / "run")


def test_more_steps_than_the_header_promises_are_refused(run):
    with pytest.raises(ConfigurationError, match="planned_steps = 8, and this one has"):
        attach(examples(), run_dir=run, steps=STEPS + 1)
    with pytest.raises(ConfigurationError, match="delta"):
        attached(run, delta=1e-7)


def test_a_closed_run_writes_nothing_more(run):
    private = attached(run)
    private.resume()
    train(private, 5)
    journal = private._engine.journal
    private.close()
    release = restore_release({"weight": torch.ones(3, 4)}, "identity", 5, noise_std=1)
    with attached(run):  # the folder is another's now, which has tried it
        before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
        for write in (
            private.save,
            private.resume,
            lambda: private.note("too late"),
            lambda: train(private, 6),
            lambda: journal.write(release, []),
            lambda: journal.drop_from(0),
            lambda: journal.drop_before(9),
        ):
            with pytest.raises(LedgerError, match="is closed"):
                write()
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == before


def test_a_journal_without_a_ledger_is_for_reading(run):
    with pytest.raises(TypeError, match="only be read"):
        Journal(run / "journal").drop_from(0)


def test_a_failed_attach_leaves_no_lock(run):
    with pytest.raises(CurvedpError):
        attached(run, physical_batch_size=0)
    attached(run).close()


# -- runs of older versions ------------------------------------------------------------


def forget_noise_source(run):
    """As a version without a choice of sources wrote the folder."""
    previous, lines = "", [json.loads(line) for line in lines_of(run)]
    for number, line in enumerate(lines):
        del line["chain"]
        if not number:
            del line["facts"]["noise_source"]
        previous = line["chain"] = chain_of(line, previous)
    (run / "ledger.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    shutil.rmtree(run / "journal")
    for file in (run / "checkpoints").glob("*/checkpoint.json"):
        content = json.loads(file.read_text()) | {"ledger": None}
        del content["facts"]["noise_source"]
        file.write_text(json.dumps(content | {"seal": _seal(content)}))


def test_a_run_that_names_no_noise_source_had_the_default_one(run):
    forget_noise_source(run)
    with attached(run) as private:
        private.resume()
        assert private.step == 4
        train(private, STEPS)
    record = read_ledger(run / "ledger.jsonl")
    assert record.count() == STEPS and record.is_gapless()


def test_a_run_that_names_no_noise_source_was_not_secure(run):
    pytest.importorskip("cryptography")
    forget_noise_source(run)
    with pytest.raises(ConfigurationError, match=r"noise_source = 'numpy Philox'"):
        attached(run, secure=True, unsafe_reproducible_noise=None)


# -- the clock -------------------------------------------------------------------------


def test_a_clock_that_runs_backwards_changes_nothing(tmp_path, monkeypatch):
    class Backwards(datetime):
        passed = 0

        @classmethod
        def now(cls, tz=None):
            cls.passed += 1
            return datetime(2026, 1, 31, tzinfo=UTC) - timedelta(days=cls.passed)

    with attached(tmp_path / "steady") as private:
        train(private, STEPS)
        expected = parameters(private.model)
    monkeypatch.setattr(ledger_module, "datetime", Backwards)
    run = tmp_path / "run"
    for until in (3, 5, STEPS):
        with attached(run) as private:
            private.resume()
            train(private, until)
            private.save()
        for age, path in enumerate(sorted(run.rglob("*"))):  # newer files look older
            os.utime(path, (10**9 - age, 10**9 - age))
    record = read_ledger(run / "ledger.jsonl")
    times = [p.time for p in record.payments()]
    assert times == sorted(times, reverse=True) and len(set(times)) == STEPS
    assert [(p.step, p.attempt) for p in record.payments()] == [
        (step, 0) for step in range(STEPS)
    ]
    with attached(run) as private:
        private.resume()
        assert torch.equal(parameters(private.model), expected)
        assert private.steps_left() == 0
