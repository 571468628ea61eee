"""Files that are either whole or not there.

Everything is written beside its place, forced to disk, and then renamed, so that a
crash or a full disk leaves what was there before. Errors of the operating system
become a :class:`StorageError` that names the file and the way out.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from curvedp.errors import StorageError

__all__ = [
    "as_storage_error",
    "read_json",
    "sync_folder",
    "write_atomically",
    "write_folder_atomically",
    "write_json",
]


@contextmanager
def as_storage_error(path: Path, doing: str = "write") -> Iterator[None]:
    """Turn an OSError into a message for the user."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        advice = {
            errno.ENOSPC: "free some space on that disk",
            errno.EDQUOT: "your disk quota is used up; free some space",
            errno.EROFS: "choose a folder on a disk that can be written to",
            errno.EACCES: "choose a folder that you may write to",
            errno.EPERM: "choose a folder that you may write to",
            errno.ENOTDIR: "a part of that path is a file; choose another folder",
            errno.EISDIR: "that path is a folder; choose another name",
        }.get(error.errno or 0, "check the folder and try again")
        reason = error.strerror or str(error)
        raise StorageError(
            f"cannot {doing} {path}: {reason}",
            f"{advice}; what was there before is untouched",
        ) from error


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary file, then put it in place of ``path``."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with as_storage_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(temporary)
            _sync_file(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)


def write_folder_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary folder, then rename it to ``path``.

    A folder that is there already is replaced.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with as_storage_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            write(temporary)
            for file in temporary.iterdir():
                _sync_file(file)
            sync_folder(temporary)
            if path.exists():
                shutil.rmtree(path)
            os.replace(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, whole or not at all."""
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    write_atomically(path, lambda p: _write_text(p, text))


def read_json(path: Path) -> Any:
    """Read a JSON file; ``ValueError`` if it is not one."""
    with as_storage_error(path, "read"):
        return json.loads(path.read_text(encoding="utf-8"))


def sync_folder(folder: Path) -> None:
    """Force a folder's entries to disk, so that a rename survives a crash."""
    if os.name != "posix":
        return  # other systems cannot open folders; they order renames themselves
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
