"""Rule 7 on disk: what a ledger, a journal and a closed run must not let pass."""

from __future__ import annotations

import tempfile
from pathlib import Path

from curvedp.errors import CheckpointError, ConfigurationError, LedgerError

from .cases import attach, examples, train
from .checking import refused


def two_steps_in(run):
    private = attach(examples(), steps=2, run_dir=run)
    private.save()
    train(private)
    return private


def cut_ledger_is_refused():
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        two_steps_in(run).close()
        ledger = run / "ledger.jsonl"
        ledger.write_bytes(ledger.read_bytes().splitlines(keepends=True)[0])
        refused(
            LedgerError, "cut short", lambda: attach(examples(), steps=2, run_dir=run)
        )


def twice_paid_step_cannot_be_cut_off():
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        private = attach(examples(), steps=2, run_dir=run)
        private._engine.ledger.pay(0, 0, private.plan.step_event())  # a lost release
        train(private)
        private.close()
        ledger = run / "ledger.jsonl"
        lines = ledger.read_bytes().splitlines(keepends=True)
        ledger.write_bytes(b"".join(lines[:-1]))
        refused(
            LedgerError, "cut short", lambda: attach(examples(), steps=2, run_dir=run)
        )


def flipped_release_is_not_applied():
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        two_steps_in(run).close()
        entry = run / "journal" / "step-00000000.safetensors"
        content = bytearray(entry.read_bytes())
        content[-2] ^= 0x40
        entry.write_bytes(content)
        with attach(examples(), steps=2, run_dir=run) as private:
            refused(CheckpointError, "match their checksum", private.resume)


def closed_run_writes_nothing():
    with tempfile.TemporaryDirectory() as folder:
        private = two_steps_in(Path(folder) / "run")
        private.close()
        refused(LedgerError, "is closed", private.save)
        refused(LedgerError, "is closed", lambda: private._engine.journal.drop_from(0))


def promised_steps_are_kept():
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        two_steps_in(run).close()
        refused(
            ConfigurationError,
            "planned_steps",
            lambda: attach(examples(), steps=3, run_dir=run),
        )
