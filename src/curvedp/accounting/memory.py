"""A ledger in memory, for loops that keep their own state and write no files.

It says the same as a file would, but a crash loses what was paid since its text was
last stored. A run that matters has a run folder.
"""

from __future__ import annotations

from pathlib import Path

from curvedp.accounting.chains import dump_lines
from curvedp.accounting.events import Event
from curvedp.accounting.records import (
    LedgerHeader,
    LedgerRecord,
    Note,
    Payment,
    parse_ledger,
)
from curvedp.errors import LedgerError

__all__ = ["MemoryLedger"]


class MemoryLedger(LedgerRecord):
    """Payments in memory; ``to_text`` and ``absorb`` carry them across processes."""

    def __init__(self, header: LedgerHeader) -> None:
        super().__init__(Path("(memory)"), header)
        self._entries: list[Payment | Note] = []
        self._taken: dict[str, int] = {}  # payments taken over, by the run they are of

    def pay(self, step: int, attempt: int, event: Event) -> Payment:
        """Record that ``event`` is about to happen."""
        payment = Payment(self._next_seq(), step, attempt, event, "")
        self._add(payment)
        self._entries.append(payment)
        return payment

    def note(self, text: str) -> None:
        """Record a remark."""
        entry = Note(self._next_seq(), text)
        self._add(entry)
        self._entries.append(entry)

    def require_open(self) -> None:
        """Nothing to hold: it is always open."""

    def close(self) -> None:
        """Nothing to release."""

    def to_text(self) -> str:
        """The lines that a file would have."""
        return dump_lines([self.header, *self._entries])[0].decode()

    def absorb(self, text: str) -> None:
        """Take over the payments of a stored ledger that this one does not have yet.

        A rewind never gives money back: where this ledger has paid more than the
        stored one of the same run, what it has paid stays. Runs that have gone on apart
        are not put together: equal steps of both would be counted once.
        """
        stored, _ = parse_ledger(Path("(stored state)"), text.encode())
        same = ("relation", "delta", "planned_steps", "facts")
        if any(getattr(stored.header, n) != getattr(self.header, n) for n in same):
            raise LedgerError(
                "the stored ledger belongs to a run with other settings",
                "restore it into a run that was made with the same settings",
            )
        origin, paid = stored.header.run_id, stored.count()
        known = (
            self.count() if origin == self.header.run_id else self._taken.get(origin, 0)
        )
        if self.count() and paid > known:
            raise LedgerError(
                "the stored ledger has payments that this run did not begin with, and "
                "this run has paid for steps of its own: one of the two would be "
                "forgotten",
                "restore it into a run that was just attached",
            )
        self._taken[origin] = max(paid, known)
        for payment in stored.payments():
            if payment.attempt >= self.next_attempt(payment.step):
                self.pay(payment.step, payment.attempt, payment.event)
        for note in stored.notes():
            if note not in self.notes():
                self.note(note)
