"""What a stranger's ledger may print, and what reading it may cost."""

from __future__ import annotations

import tempfile
from pathlib import Path

from curvedp import storage
from curvedp.accounting import (
    GaussianEvent,
    Ledger,
    LedgerHeader,
    LedgerRecord,
    read_ledger,
)
from curvedp.barrier import Relation
from curvedp.cli.output import results
from curvedp.errors import LedgerError
from curvedp.train.statement import Statement
from curvedp.values import printable

from .cases import attach, examples
from .checking import refused
from .mutate import Fault, Patch

_WILD = "\x1b[2A"


def errors_do_not_command_the_terminal():
    assert "\x1b" not in str(LedgerError(_WILD, _WILD)), "an escape sequence passed"


def tables_do_not_command_the_terminal():
    with results.capture() as printed:
        results.print(_WILD)
    assert "\x1b" not in printed.get(), "an escape sequence passed"


def notes_have_no_lines_of_their_own():
    private = attach(examples())
    private.note("fine\n  guarantee     (0.01, 1e-9)")
    assert str(private.statement()).count("\n  guarantee") == 1, "a note forged a line"


def _ledger(folder, events):
    header = LedgerHeader("run", Relation.ADD_REMOVE, 1e-5)
    path = Path(folder) / "ledger.jsonl"
    with Ledger.create(path, header) as ledger:
        for step, event in enumerate(events):
            ledger.pay(step, 0, event)
    return path


def a_ledger_of_holes_is_refused():
    with tempfile.TemporaryDirectory() as folder:
        path = _ledger(folder, [])
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size + (6 << 20))
        refused(LedgerError, "longer than", lambda: read_ledger(path))


def kinds_of_noise_are_counted_before_they_are_composed():
    kinds = [GaussianEvent(1.0 + i / 100) for i in range(101)]
    with tempfile.TemporaryDirectory() as folder:
        record = read_ledger(_ledger(folder, kinds))
        refused(LedgerError, "101 kinds", record.epsilon)


FAULTS = [
    Fault(
        "18 escape sequences in errors",
        errors_do_not_command_the_terminal,
        (Patch(printable, "if text.isprintable():", "if True:"),),
    ),
    Fault(
        "18 escape sequences in results",
        tables_do_not_command_the_terminal,
        (Patch(printable, "if text.isprintable():", "if True:"),),
    ),
    Fault(
        "18 lines of a statement forged by a note",
        notes_have_no_lines_of_their_own,
        (Patch(Statement.__str__, "printable(t, '')", "t"),),
    ),
    Fault(
        "a ledger longer than the memory",
        a_ledger_of_holes_is_refused,
        (Patch(storage._refuse_long_lines, "> most:", "> 2**60:"),),
    ),
    Fault(
        "an epsilon that nobody lives to see",
        kinds_of_noise_are_counted_before_they_are_composed,
        (Patch(LedgerRecord.epsilon, "> _MOST_KINDS:", "> 10**9:"),),
    ),
]
