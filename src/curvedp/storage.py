"""Files that are either whole or not there.

Everything is written beside its place, forced to disk, and then renamed, so that a
crash or a full disk leaves what was there before. Errors of the operating system
become a :class:`StorageError` that names the file and the way out.

What a killed process leaves behind has a name with a dot in front: nobody reads it, and
whoever owns the folder clears it away (:func:`clear_leftovers`).
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO

from curvedp.errors import StorageError

__all__ = [
    "LONGEST_JSON",
    "as_storage_error",
    "cache_folder",
    "clear_leftovers",
    "json_text",
    "make_folder",
    "parse_json",
    "read_json",
    "read_regular",
    "remove_folder",
    "soon_removed",
    "sync_folder",
    "write_atomically",
    "write_folder_atomically",
    "write_json",
]

#: Bytes; those that are written here have some thousands. A file with holes in it can
#: be far longer than the disk, and would fill the memory.
LONGEST_JSON = 1 << 28


_ASIDE = ".replaced"
_lasting = ContextVar("lasting", default=True)  # of this thread: others may need it


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
    with as_storage_error(path):
        if path.is_dir() and not path.is_symlink():  # also "." and "/", without a name
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        make_folder(path.parent)
        try:
            _clear_after_the_dead(path)
            write(temporary)
            _sync_file(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)


def write_folder_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary folder, then rename it to ``path``.

    A folder that is there already is replaced: it is put aside, and removed when the
    new one is in its place. After a crash between these renames
    :func:`clear_leftovers` brings it back.
    """
    aside = _aside(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with as_storage_error(path):
        make_folder(path.parent)
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            write(temporary)
            for file in temporary.iterdir():
                _sync_file(file)
            sync_folder(temporary)
            if path.exists():
                shutil.rmtree(aside, ignore_errors=True)
                os.replace(path, aside)
            try:
                os.replace(temporary, path)
            except BaseException:
                if aside.exists():
                    os.replace(aside, path)
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        sync_folder(path.parent)
        shutil.rmtree(aside, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Remove a folder at once for whoever looks: renamed first, then emptied."""
    gone = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with as_storage_error(path, "remove"):
        shutil.rmtree(gone, ignore_errors=True)
        os.replace(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


def clear_leftovers(folder: Path, pattern: str = "*") -> None:
    """Tidy up after a process that was killed while it wrote into ``folder``.

    Only for whoever owns the folder, such as the holder of a run's lock: what another
    process is writing would be taken away from it.
    """
    if not folder.is_dir():
        return
    with as_storage_error(folder, "tidy"):
        for aside in folder.glob(f".{pattern}{_ASIDE}"):
            path = aside.with_name(aside.name.removeprefix(".").removesuffix(_ASIDE))
            if path.exists():
                shutil.rmtree(aside, ignore_errors=True)
            else:  # killed between the two renames
                os.replace(aside, path)
                sync_folder(folder)
        # safetensors writes beside its target too, under a name of its own
        foreign = folder.glob(".tmp??????") if pattern == "*" else ()
        for left in (*folder.glob(f".{pattern}.tmp"), *foreign):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


def cache_folder(name: str) -> Path:
    """``$XDG_CACHE_HOME/curvedp/NAME``; by default in ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "curvedp" / name


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, and force their names to disk."""
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):
        sync_folder(made.parent)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, whole or not at all."""
    text = json_text(value)
    write_atomically(path, lambda p: _write_text(p, text))


def json_text(value: Any) -> str:
    """A JSON document for people too."""
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def read_json(path: Path) -> Any:
    """Read a JSON file; ``ValueError`` if it is not one."""
    with as_storage_error(path, "read"):
        return parse_json(read_regular(path, most=LONGEST_JSON).decode("utf-8"))


def read_regular(
    path: Path, most: int | None = None, longest_line: int | None = None
) -> bytes:
    """All of a file; ``OSError`` for a pipe or a device, which may never end.

    Args:
        path: the file.
        most: bytes; ``OSError`` for a longer one.
        longest_line: bytes between two ends of lines; ``OSError`` for more.
    """
    # not to wait for somebody who writes into the pipe
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            if longest_line is not None:
                _refuse_long_lines(file, longest_line)
            content = file.read() if most is None else file.read(most + 1)
    finally:
        os.close(descriptor)
    if most is not None and len(content) > most:
        raise OSError(errno.EFBIG, f"longer than {most} bytes")
    return content


def _refuse_long_lines(file: BinaryIO, most: int) -> None:
    """Refuse what has no ends of lines, such as a hole, before it is kept."""
    since = 0
    while part := file.read(most):
        first, last = part.find(b"\n"), part.rfind(b"\n")
        if since + (first if first >= 0 else len(part)) > most:
            raise OSError(errno.EFBIG, f"a line of it is longer than {most} bytes")
        since = since + len(part) if last < 0 else len(part) - last - 1
    file.seek(0)


def parse_json(text: str | bytes, *, constants: bool = False) -> Any:
    """Read JSON as the standard has it, which leaves nothing to be understood two ways.

    Args:
        text: of one value.
        constants: whether NaN and Infinity are let through.

    Raises:
        ValueError: it is not JSON, names a key twice, or is nested too deeply.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            raise ValueError("an object names a key twice")
        return table

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is no JSON number")

    options: dict[str, Any] = {} if constants else {"parse_constant": refuse}
    try:
        return json.loads(text, object_pairs_hook=unique, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@contextmanager
def soon_removed() -> Iterator[None]:
    """Files made in here are removed again, and need not survive a crash.

    A full disk or a quota shows when a file is written or closed.
    """
    before = _lasting.set(False)
    try:
        yield
    finally:
        _lasting.reset(before)


def sync_folder(folder: Path) -> None:
    """Force a folder's entries to disk, so that a rename survives a crash."""
    if os.name != "posix" or not _lasting.get():
        return  # other systems cannot open folders; they order renames themselves
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}{_ASIDE}")


def _clear_after_the_dead(path: Path) -> None:
    """Remove what processes that are gone left of ``path``; others are let alone."""
    if os.name != "posix":
        return  # elsewhere os.kill does not ask, it kills
    for left in path.parent.glob(f".{path.name}.*.tmp"):
        owner = left.name.removesuffix(".tmp").rsplit(".", 1)[-1]
        if owner.isdecimal() and not _lives(int(owner)):
            left.unlink(missing_ok=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it is somebody else's
        return True
    return True


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _sync_file(path: Path) -> None:
    if not _lasting.get():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
