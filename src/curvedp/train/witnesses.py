"""What the other files of a run have seen of its ledger.

Lines that are missing at a ledger's end cannot be found from the ledger alone. But
checkpoints and journal entries hold the head that it had when they were made, and a
release in the journal has been paid for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from curvedp.accounting import LedgerRecord
from curvedp.errors import CheckpointError, LedgerError
from curvedp.train.checkpoint import checkpoint_folders, read_head
from curvedp.train.journal import Journal

__all__ = ["Witness", "check_ledger", "witnesses"]

_RESTORE = (
    "restore the ledger from a copy; without those lines nobody can tell what the run "
    "has spent"
)


@dataclass(frozen=True)
class Witness:
    """A file that was written when the ledger had certain lines.

    Attributes:
        file: the checkpoint or the journal entry.
        head: of the ledger then; None if the file is too old to say, or damaged.
        run_id: of the run that the file names; None for a journal entry.
        paid_step: step whose payment the ledger must have; None for a checkpoint.
    """

    file: Path
    head: tuple[int, str] | None
    run_id: str | None = None
    paid_step: int | None = None


def witnesses(run_dir: Path, *, tolerant: bool = False) -> list[Witness]:
    """Checkpoints and journal entries of a run, those that have seen the most first.

    Args:
        run_dir: the run's folder.
        tolerant: pass over damaged checkpoints. Otherwise the newest one has to be
            sound; what an older one has seen, the newest has seen too.

    Raises:
        CheckpointError: the newest checkpoint is damaged.
    """
    found = []
    folders = checkpoint_folders(run_dir / "checkpoints")
    for folder in reversed(folders):
        try:
            run_id, head = read_head(folder)
        except CheckpointError:
            if folder == folders[-1] and not tolerant:
                raise
            continue
        found.append(Witness(folder, head, run_id=run_id))
    journal = Journal(run_dir / "journal")
    for step in reversed(journal.steps()):
        found.append(Witness(journal.path(step), journal.head(step), paid_step=step))
    return found


def check_ledger(record: LedgerRecord, seen: Iterable[Witness]) -> None:
    """Refuse a ledger that lacks lines which the run's other files have seen.

    Raises:
        LedgerError: it was cut short, exchanged or rewritten.
        CheckpointError: a checkpoint belongs to another run.
    """
    for witness in seen:
        if witness.run_id not in (None, record.header.run_id):
            raise CheckpointError(
                f"{witness.file} belongs to another run than the ledger beside it",
                "put the files of one run together again",
            )
        step = witness.paid_step
        if step is not None and not record.next_attempt(step):
            raise LedgerError(
                f"{record.path} has no payment for step {step}, whose release is in "
                "the journal: it was cut short or exchanged",
                _RESTORE,
            )
        head = witness.head
        if head is not None and not record.has_head(*head):
            raise LedgerError(
                f"{record.path} does not have the line {head[0] + 1} that it had when "
                f"{witness.file} was made: it was cut short, exchanged or rewritten",
                _RESTORE,
            )
