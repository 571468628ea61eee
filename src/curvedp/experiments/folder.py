"""The folder of a run: its config, ledger, journal, checkpoints and result.

``run.json`` is written before anything else, so that a run that was stopped at any
moment can be resumed; what nobody has paid for yet is removed again if it fails.
Whoever writes into the folder holds its lock (:func:`curvedp.locks.sole_writer`).
"""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from curvedp._version import __version__
from curvedp.accounting import Ledger
from curvedp.errors import ConfigurationError, CurvedpError, LedgerError
from curvedp.experiments.building import ModelShape
from curvedp.experiments.config import NOT_PRIVATE, RunConfig
from curvedp.experiments.jsonable import jsonable
from curvedp.locks import LOCK_NAME
from curvedp.storage import (
    as_storage_error,
    clear_leftovers,
    read_json,
    remove_folder,
    write_json,
)
from curvedp.train.checkpoint import checkpoint_folders

__all__ = ["RunFolder", "default_run_dir"]

KIND, VERSION = "curvedp-run", 1
# In the order in which they are removed: at every moment between, what is left can be
# resumed.
_CONTENTS = (
    "result.json", "checkpoints", "journal", "score-ledger.jsonl", "ledger.jsonl",
    "run.json",
)  # fmt: skip


def default_run_dir(data: str, what: str, root: Path = Path("runs")) -> Path:
    """``runs/<data>-<what>-<UTC time>``."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return root / f"{Path(data).stem}-{what}-{stamp}"


class RunFolder:
    """Paths and small files of a run. Made by :meth:`create` or :meth:`open`."""

    def __init__(
        self, path: Path, config: RunConfig, shape: ModelShape | None = None
    ) -> None:
        self.path = path
        self.config = config
        self.shape = shape

    @property
    def ledger(self) -> Path:
        """The ledger's file."""
        return self.path / "ledger.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def result(self) -> Path:
        """The result's file, there when the run is finished."""
        return self.path / "result.json"

    @classmethod
    def create(cls, path: Path, config: RunConfig) -> RunFolder:
        """Claim a new folder and write run.json into it; the caller holds its lock.

        Raises:
            ConfigurationError: something is there already.
            StorageError: it cannot be written.
        """
        refuse_existing(path)
        clear_leftovers(path, "run.json.*")
        folder = cls(path, config.settled())
        folder._write()
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Read the folder of an earlier run.

        Raises:
            ConfigurationError: it is not one, or its run.json is damaged.
        """
        file = path / "run.json"
        if not file.is_file():
            raise ConfigurationError(
                f"{path} is not the folder of a run: it has no run.json",
                "give the folder that curvedp train named; if it was killed before it "
                "wrote one, start it again",
            )
        try:
            stored = read_json(file)
            if stored["kind"] != KIND or stored["version"] != VERSION:
                raise ValueError(f"it is a {stored['kind']} of {stored['version']}")
            shape = stored.get("model_shape")
            return cls(
                path,
                RunConfig.from_json(stored["config"]),
                None if shape is None else ModelShape.from_json(shape),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problem = getattr(error, "problem", str(error))
            raise ConfigurationError(
                f"{file} is damaged or foreign: {problem}", "restore it from a copy"
            ) from error

    def keep_shape(self, shape: ModelShape) -> None:
        """Add what the model has to fit, so that predictions need no private data."""
        self.shape = shape
        self._write()

    def _write(self) -> None:
        content = {
            "kind": KIND,
            "version": VERSION,
            "curvedp": __version__,
            "config": self.config.to_json(),
            "model_shape": None if self.shape is None else self.shape.to_json(),
        }
        if not self.config.private:
            content["label"] = NOT_PRIVATE
        write_json(self.path / "run.json", content)

    def write_result(self, result: dict[str, Any]) -> None:
        """Store how the run ended."""
        write_json(self.result, jsonable(result))

    def read_result(self) -> dict[str, Any] | None:
        """The stored result, or None while there is none."""
        if not self.result.exists():
            return None
        try:
            stored = read_json(self.result)
            if stored["kind"] != "curvedp-result":
                raise ValueError(f"it is a {stored['kind']}")
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"{self.result} is damaged or foreign: {error}",
                "remove it and resume the run; its checkpoint is untouched",
            ) from error
        return dict(stored)

    def refuse_lost_ledger(self) -> None:
        """A run that has a past but no ledger cannot say what it has spent."""
        past = checkpoint_folders(self.checkpoints) or any(
            (self.path / "journal").glob("*.safetensors")
        )
        private = self.config.configured_recipe().private
        if private and past and not self.ledger.exists():
            raise LedgerError(
                f"{self.ledger} is missing, and {self.path} has checkpoints: nobody "
                "can tell what the run has spent",
                "restore the ledger from a copy, or start a new run",
            )

    def clear_leftovers(self) -> None:
        """Tidy up after a process that was killed; the caller holds the lock."""
        for name in _CONTENTS:
            if not name.endswith("ledger.jsonl"):  # its own lock is for that
                clear_leftovers(self.path, f"{name}.*")

    def discard_if_unspent(self) -> None:
        """Remove what a failed start has left, unless something was paid for.

        The caller holds the folder's lock. The ledger has one of its own, and what
        another process holds by it is not ours to remove.
        """
        with contextlib.suppress(CurvedpError):  # in use or unreadable: keep it
            if not self.ledger.exists():
                self._discard()
                return
            with Ledger.open(self.ledger) as ledger:
                if not ledger.count():
                    self._discard()

    def _discard(self) -> None:
        for name in _CONTENTS:
            entry = self.path / name
            if entry.is_dir():
                remove_folder(entry)
            else:
                with as_storage_error(entry, "remove"):
                    entry.unlink(missing_ok=True)


def refuse_existing(path: Path) -> None:
    """Never write into something that is there already.

    An empty folder is welcome, and one in which a run was killed before it had begun.
    """
    with as_storage_error(path, "look into"):
        taken = path.exists() and not (
            path.is_dir() and all(_is_leftover(p) for p in path.iterdir())
        )
    if taken:
        raise ConfigurationError(
            f"{path} exists already, and a run is never overwritten",
            f"choose another --run-dir, or go on with: curvedp resume {path}",
        )


def _is_leftover(path: Path) -> bool:
    return path.name == LOCK_NAME or path.match(".run.json.*.tmp")
