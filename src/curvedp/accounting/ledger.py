r"""The append-only account of what a run has spent, one JSON object on a line.

A payment is on disk before its noise is drawn, so the file never says less than the
truth, whenever the run stops. It holds events, step numbers and remarks, and no private
quantity: no batch, no count of examples, no loss. Times are cut to the hour, because
the time that a step takes depends on how many examples were sampled.

>>> import tempfile
>>> from curvedp.accounting.events import PoissonGaussianEvent
>>> from curvedp.barrier import Relation
>>> folder = tempfile.TemporaryDirectory()
>>> header = LedgerHeader("run-1", Relation.ADD_REMOVE, 1e-5)
>>> with Ledger.create(folder.name + "/ledger.jsonl", header) as ledger:
...     payment = ledger.pay(0, 0, PoissonGaussianEvent(1.0, 0.01))
>>> read_ledger(folder.name + "/ledger.jsonl").count()
1
>>> folder.cleanup()
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from curvedp.accounting.chains import LONGEST_LINE, dump_lines
from curvedp.accounting.events import Event
from curvedp.accounting.records import (
    LedgerHeader,
    LedgerRecord,
    Note,
    Payment,
    parse_ledger,
)
from curvedp.errors import LedgerError, StorageError
from curvedp.locks import try_lock
from curvedp.storage import read_regular
from curvedp.values import printable

__all__ = [
    "Ledger",
    "LedgerHeader",
    "LedgerRecord",
    "Payment",
    "read_ledger",
]

_log = logging.getLogger(__name__)
#: Bytes of a ledger: some ten million payments.
LONGEST = 1 << 31
_FLAGS = os.O_RDWR | getattr(os, "O_BINARY", 0)


def read_ledger(path: str | os.PathLike[str]) -> LedgerRecord:
    """Read a ledger without locking or changing it, also while its run goes on.

    Raises:
        LedgerError: the file is missing, foreign or damaged.
    """
    return parse_ledger(Path(path), _read(Path(path)))[0]


class Ledger(LedgerRecord):
    """A ledger that is open for writing, by this process alone.

    Made by :meth:`create` or :meth:`open`, never directly. Attributes and figures are
    those of :class:`LedgerRecord`; ``torn`` says what was cut off when it was opened.

    Guarantees: when :meth:`pay` returns, the payment is on disk. When it raises, the
    file is as it was before, and no noise may be drawn.
    """

    def __init__(self, record: LedgerRecord, descriptor: int, size: int) -> None:
        super().__init__(record.path, record.header, record.torn)
        self.chained, self._chains = record.chained, record._chains
        self._payments, self._notes = record._payments, record._notes
        self._attempts = record._attempts
        self._descriptor: int | None = descriptor
        self._size = size
        self._process = os.getpid()

    @classmethod
    def create(cls, path: str | os.PathLike[str], header: LedgerHeader) -> Ledger:
        """Start a ledger. It appears whole, header and all, or not at all.

        Raises:
            LedgerError: there is a file already; a ledger is never overwritten.
            StorageError: it could not be written.
        """
        target = Path(path)
        line, chains = dump_lines([header])
        draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        try:
            descriptor = os.open(draft, _FLAGS | os.O_CREAT | os.O_EXCL, 0o644)
        except OSError as error:
            raise _storage(target, error) from error
        try:
            try:
                _lock(descriptor, target)  # before anybody else can see the file
                _write(descriptor, line)
                _publish(draft, target)
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(draft)
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, OSError) and not isinstance(error, StorageError):
                raise _storage(target, error) from error
            raise
        record = LedgerRecord(target, header)
        record.chained, record._chains = True, chains
        return cls(record, descriptor, len(line))

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        check: Callable[[LedgerRecord], None] | None = None,
    ) -> Ledger:
        """Open a ledger to go on writing, after a crash too.

        An unfinished last line is cut off, logged, and remarked upon in the ledger:
        :meth:`pay` had not returned, so the noise it was for was never drawn.

        Args:
            path: of the file.
            check: called with what the file says, when it is locked and before it is
                changed; refuses it by raising.

        Raises:
            LedgerError: the file is missing, foreign or damaged, or open elsewhere.
            StorageError: it could not be written.
        """
        target = Path(path)
        try:
            descriptor = os.open(target, _FLAGS | getattr(os, "O_NONBLOCK", 0))
        except FileNotFoundError:
            raise _missing(target) from None
        except OSError as error:
            raise _storage(target, error) from error
        try:
            _lock(descriptor, target)
            content = _read(target)
            record, size = parse_ledger(target, content)
            if check is not None:
                check(record)
            os.lseek(descriptor, size, os.SEEK_SET)
            if size < len(content):
                os.ftruncate(descriptor, size)
            elif not content.endswith(b"\n"):
                _write(descriptor, b"\n")
                size += 1
            ledger = cls(record, descriptor, size)
            if ledger.torn:
                _log.warning("%s: %s", printable(str(target)), ledger.torn)
                ledger.note(f"recovered after a crash: {ledger.torn}")
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, OSError) and not isinstance(error, StorageError):
                raise _storage(target, error) from error
            raise
        return ledger

    def pay(self, step: int, attempt: int, event: Event) -> Payment:
        """Record that ``event`` is about to happen. Call it before drawing the noise.

        Args:
            step: the logical step, numbered from 0.
            attempt: ``next_attempt(step)``. Naming it catches a loop that pays twice
                for one noise, or draws twice for one payment.
            event: what is about to happen.

        Raises:
            LedgerError: the attempt is not the next one, or the ledger is closed, was
                moved, or was written by somebody else.
            StorageError: the payment is not on disk (disk full). Nothing was spent.
        """
        payment = Payment(self._next_seq(), step, attempt, event, _now())
        due = self.next_attempt(step)
        if step < 0 or attempt != due:
            raise LedgerError(
                f"payment for attempt {attempt} at step {step}, where {due} is due",
                "ask next_attempt(step) and pay once for every draw of noise",
            )
        self._append(payment)
        return payment

    def note(self, text: str) -> None:
        """Record a remark, such as that private diagnostics were shown."""
        self._append(Note(self._next_seq(), text, _now()))

    def require_open(self) -> None:
        """Refuse if this process may not write to the run any more.

        Raises:
            LedgerError: the ledger is closed, was moved, or was written by others.
        """
        self._checked_descriptor()

    def close(self) -> None:
        """Release the file and its lock; closing twice is harmless."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _append(self, entry: Payment | Note) -> None:
        descriptor = self._checked_descriptor()
        line, chains = dump_lines([entry], self._chains[-1], chained=self.chained)
        if self._size + len(line) > LONGEST:
            raise LedgerError(
                f"{self.path} would be longer than {LONGEST} bytes, which nobody reads",
                "plan a run with fewer steps",
            )
        try:
            _write(descriptor, line)
        except OSError as error:
            self._roll_back(descriptor)
            raise _storage(self.path, error) from error
        except BaseException:  # an interrupt between write and sync
            self._roll_back(descriptor)
            raise
        self._size += len(line)
        self._chains += chains
        self._add(entry)

    def _roll_back(self, descriptor: int) -> None:
        """Cut off a line that may not have reached the disk."""
        try:
            os.ftruncate(descriptor, self._size)
            os.lseek(descriptor, self._size, os.SEEK_SET)
        except OSError:
            # The file may now end in a torn line, which the next open() deals with.
            # Writing after it would turn it into corruption.
            self.close()

    def _checked_descriptor(self) -> int:
        if self._descriptor is None:
            raise LedgerError(
                f"{self.path} is closed, and its lock is released",
                "attach the run again, or open the ledger with Ledger.open",
            )
        if os.getpid() != self._process:  # a fork shares the lock, and must not write
            raise LedgerError(
                f"{self.path} belongs to the process that was forked",
                "attach the run in the process that trains it",
            )
        held = os.fstat(self._descriptor)
        try:
            named = os.stat(self.path)
        except OSError:
            named = None
        if named is None or (named.st_dev, named.st_ino) != (held.st_dev, held.st_ino):
            raise LedgerError(
                f"{self.path} was moved or deleted while the run goes on",
                "put it back: without it nobody can tell what the run has spent",
            )
        if held.st_size != self._size:
            raise LedgerError(
                f"{self.path} was changed by another program while the run goes on",
                "stop the run and restore the ledger from a copy",
            )
        return self._descriptor


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
    os.fsync(descriptor)


def _publish(draft: Path, target: Path) -> None:
    """Give the finished file its name, never taking that of another file."""
    try:
        os.link(draft, target)
    except FileExistsError:
        raise _exists(target) from None
    except OSError:
        # Some file systems have no hard links; there the check is not atomic.
        if target.exists():
            raise _exists(target) from None
        os.replace(draft, target)
    if os.name != "posix":  # elsewhere a folder cannot be opened, nor needs it
        return
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError:
        os.unlink(target)
        raise
    finally:
        os.close(folder)


def _lock(descriptor: int, path: Path) -> None:
    if not try_lock(descriptor):
        raise LedgerError(
            f"{path} is in use by another run",
            "wait until it ends, or give this run a folder of its own",
        )


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, LONGEST, LONGEST_LINE)
    except FileNotFoundError:
        raise _missing(path) from None
    except OSError as error:
        raise LedgerError(
            f"{path} cannot be read: {error.strerror or error}",
            "give the path of a run's ledger file, as it was written",
        ) from error


def _now() -> str:
    now = datetime.now(UTC)
    return now.replace(minute=0, second=0, microsecond=0).isoformat(timespec="minutes")


def _missing(path: Path) -> LedgerError:
    return LedgerError(
        f"there is no ledger at {path}", "give the path of a run's ledger"
    )


def _exists(path: Path) -> LedgerError:
    return LedgerError(
        f"{path} exists already, and a ledger is never overwritten",
        "resume that run, or give the new run a folder of its own",
    )


def _storage(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"the ledger {path} could not be written: {error.strerror or error}",
        "nothing was spent; free some space or check the permissions, then resume",
    )
