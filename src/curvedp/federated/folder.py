"""What a server keeps in its folder: checkpoints, releases, and who was drawn.

**The mean of a round is stored before it is used.** A server that has lost its newest
checkpoint repeats the rounds since the one before from what is stored: nobody is asked,
no noise is drawn. Made again, a mean could be of other clients or have other noise for
the missing ones, and the two together would tell more than was paid for.

``drawn.json`` says who was drawn for the round that is open. Where the draw is in the
price it is a secret of the server's, and goes as soon as the round is closed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from curvedp.accounting import Ledger, MemoryLedger
from curvedp.barrier import Release
from curvedp.errors import CheckpointError
from curvedp.storage import as_storage_error, read_json, write_atomically
from curvedp.train.checkpoint import (
    Checkpoint,
    checkpoint_folders,
    load_checkpoint,
    save_checkpoint,
)
from curvedp.train.journal import Journal

__all__ = ["ServerFolder"]


class ServerFolder:
    """The files of a server, beside its ledger.

    Args:
        folder: of the run; None keeps nothing.
        ledger: of the run, which is open.
    """

    def __init__(self, folder: Path | None, ledger: Ledger | MemoryLedger) -> None:
        self._folder = folder
        self._ledger = ledger
        self._journal = None if folder is None else Journal(folder / "journal", ledger)

    # -- checkpoints -------------------------------------------------------------------

    def save(self, checkpoint: Checkpoint) -> None:
        """Store where the run is, and forget releases that are not needed any more."""
        if self._folder is None or self._journal is None:
            return
        oldest = save_checkpoint(self._folder / "checkpoints", checkpoint)
        self._journal.drop_before(oldest)

    def newest(self, facts: dict[str, object]) -> Checkpoint | None:
        """The newest checkpoint; None in a folder without a run.

        Raises:
            CheckpointError: it is of another run, or rounds were made and it is gone.
        """
        if self._folder is None:
            return None
        folders = checkpoint_folders(self._folder / "checkpoints")
        if not folders:
            if self._ledger.count() > 1:
                raise CheckpointError(
                    f"{self._folder} has paid for {self._ledger.count()} rounds and "
                    "has no checkpoint",
                    "restore the checkpoints; the rounds cannot be made again",
                )
            return None
        stored = load_checkpoint(folders[-1])
        if stored.facts != facts or stored.run_id != self._ledger.header.run_id:
            raise CheckpointError(
                f"{folders[-1]} belongs to another run",
                "give this run a folder of its own",
            )
        return stored

    # -- releases ----------------------------------------------------------------------

    def keep(self, release: Release) -> None:
        """Store the mean of a round. It is on disk when this returns."""
        if self._journal is not None:
            self._journal.write(release, [])

    def kept(self, first: int) -> Iterator[Release]:
        """Means of rounds from ``first`` on, without a gap."""
        number = first
        while self._journal is not None:
            entry = self._journal.read(number)
            if entry is None:
                return
            yield entry[0]
            number += 1

    def give_up(self, first: int, end: int) -> None:
        """Note that means of rounds from ``first`` on are lost, before round ``end``.

        They were closed: what was made of them may have been seen.
        """
        self._ledger.note(
            f"the mean of round {first} was missing or unreadable after a crash; "
            f"rounds from {first} to {end - 1} move nothing and are not made again"
        )
        if self._journal is not None:
            self._journal.drop_from(first)

    # -- who was drawn -----------------------------------------------------------------

    def drawn(self, round_number: int) -> list[int] | None:
        """Who was drawn for a round, if that is stored."""
        path = self._drawn_path
        if path is None or not path.exists():
            return None
        stored = read_json(path)
        if stored["round"] != round_number:
            return None
        return [int(i) for i in stored["clients"]]

    def keep_drawn(self, round_number: int, clients: Sequence[int]) -> None:
        """Store who was drawn, before anybody is asked."""
        if self._drawn_path is not None:
            content = json.dumps({"round": round_number, "clients": list(clients)})
            write_atomically(
                self._drawn_path, lambda path: _write_secret(path, content)
            )

    def forget_drawn(self) -> None:
        """Remove the draw of a round that is closed."""
        if self._drawn_path is not None:
            with as_storage_error(self._drawn_path, "remove"):
                self._drawn_path.unlink(missing_ok=True)

    @property
    def _drawn_path(self) -> Path | None:
        return None if self._folder is None else self._folder / "drawn.json"


def _write_secret(path: Path, content: str) -> None:
    """Write a file that its owner alone may read."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with os.fdopen(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
        file.write(content)
