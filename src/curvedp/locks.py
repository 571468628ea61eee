"""One writer at a time: locks that end with their process, however it ends."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from curvedp.errors import ConfigurationError
from curvedp.storage import as_storage_error, make_folder

try:
    import fcntl as _fcntl_module
except ImportError:  # not on Windows, where there is no lock
    fcntl: Any = None
else:
    fcntl = _fcntl_module

__all__ = ["LOCK_NAME", "in_turn", "sole_writer", "try_lock"]

#: There while a process writes into the folder; one that is killed leaves it behind,
#: and it then locks nothing.
LOCK_NAME = ".run.lock"

_UNLOCKABLE = {
    errno.ENOLCK,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EINVAL,
}


def try_lock(descriptor: int) -> bool:
    """Lock an open file for this process alone; False if another one has it.

    Some network file systems have no locks; there it is True.
    """
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNLOCKABLE:
            raise
    return True


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Be the only process that writes into a folder, which is made if need be.

    Folders that were made for it and are empty at the end are removed again.

    Raises:
        ConfigurationError: another process writes into it.
        StorageError: it cannot be made or written to.
    """
    made = [p for p in (folder, *folder.parents) if not p.exists()]
    file = folder / LOCK_NAME
    with as_storage_error(folder, "write to the folder"):
        descriptor = _take(file)
    try:
        yield
    finally:
        # In this order: whoever opened the file before it was removed finds that it
        # is not the folder's any more.
        try:
            for remove in (file.unlink, *(path.rmdir for path in made)):
                with contextlib.suppress(OSError):
                    remove()
        finally:
            os.close(descriptor)


def _take(file: Path) -> int:
    while True:
        make_folder(file.parent)
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            continue  # its last owner has just removed the folder
        try:
            if not try_lock(descriptor):
                raise ConfigurationError(
                    f"{file.parent} is in use by another run",
                    "wait until it ends, or choose another folder",
                )
            if _is_named(descriptor, file):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its last owner has just removed it: try again


def _is_named(descriptor: int, file: Path) -> bool:
    held = os.fstat(descriptor)
    try:
        named = os.stat(file)
    except FileNotFoundError:
        return False
    return (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino)


@contextmanager
def in_turn(file: Path) -> Iterator[None]:
    """Wait until no other process is in here with the same file.

    For work that is done once and found by the others: where there are no locks, or the
    file cannot be made, it is done several times.
    """
    descriptor = None
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                file.unlink()
            os.close(descriptor)
