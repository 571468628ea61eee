"""Reading files that may be broken or hostile, with bounded memory.

A header may claim any size, and a compressed file may unpack to a thousand times its
length. So a claim is compared with what the file can hold before anything is
allocated, what unpacks to far more than data does is refused, and every failure is a
:class:`DataError` that names the file.
"""

from __future__ import annotations

import errno
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from curvedp.errors import DataError

__all__ = [
    "MAX_DEFLATE_RATIO",
    "MAX_LINE_CHARACTERS",
    "MAX_UNPACKING",
    "bare_suffix",
    "brief",
    "open_bytes",
    "read_exactly",
    "reading",
    "refuse_bomb",
    "refuse_endless",
    "refuse_impossible_size",
    "text_lines",
]

MAX_DEFLATE_RATIO = 1032
"""Deflate codes at most 258 bytes in 2 bits, so no gzip or zip member does better."""

MAX_LINE_CHARACTERS = 1 << 24
"""A longer line is no table row; without a bound one line could fill the memory."""

MAX_UNPACKING = 256
"""Data packs to a tenth, sparse data to a hundredth; what unpacks to more than this
multiple of its file, and to more than :data:`HARMLESS_BYTES`, is taken for a bomb."""

HARMLESS_BYTES = 1 << 26
"""Unpacked sizes up to this are nobody's worry, however well they were packed."""

_CHUNK_BYTES = 1 << 20
_COMPRESSED = (".gz", ".xz")


def bare_suffix(path: Path) -> str:
    """The suffix below a compression suffix: ``.csv`` for ``table.csv.gz``."""
    name = Path(path.stem) if path.suffix.lower() in _COMPRESSED else path
    return name.suffix.lower()


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn every failure of reading and unpacking ``path`` into a DataError."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as error:
        raise DataError(
            f"{path}: damaged or truncated compressed data",
            "get the file again",
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text", "save the table as UTF-8") from error
    except MemoryError as error:
        raise DataError(
            f"{path}: does not fit into the memory", "use a smaller file"
        ) from error
    except OSError as error:
        reason = error.strerror or type(error).__name__  # others quote what they read
        raise DataError(
            f"{path}: cannot be read ({reason})", "check the file and its permissions"
        ) from error


def brief(error: object, length: int = 200) -> str:
    """The first line of a message, cut: some quote the whole file."""
    first = (str(error).strip().splitlines() or [""])[0]
    return first if len(first) <= length else f"{first[:length]}..."


def open_bytes(path: Path) -> BinaryIO:
    """Open ``path`` for reading, unpacked when its name ends in .gz or .xz."""
    refuse_endless(path)
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if suffix == ".xz":
        return cast(BinaryIO, lzma.open(path, "rb"))
    return path.open("rb")


def refuse_endless(path: Path) -> None:
    """Refuse a pipe or a device, which may never end; ``OSError`` as for a bad file."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file")


def refuse_impossible_size(path: Path, claimed_bytes: int) -> None:
    """Refuse a header's claim that the file on disk cannot hold.

    Raises:
        DataError: If ``claimed_bytes`` exceeds the file, or what it could unpack to.
    """
    ratio = MAX_DEFLATE_RATIO if path.suffix.lower() == ".gz" else 1
    if claimed_bytes > path.stat().st_size * ratio:
        raise DataError(
            f"{path}: the header claims more than the file holds",
            "the file is truncated or not of this format; get it again",
        )
    refuse_bomb(path, claimed_bytes, "unpack it first, if you trust it")


def refuse_bomb(path: Path, unpacked_bytes: int, way_out: str) -> None:
    """Refuse what unpacks to far more than data does.

    Raises:
        DataError: If it is more than :data:`MAX_UNPACKING` times the file and more than
            :data:`HARMLESS_BYTES`.
    """
    packed = path.stat().st_size
    if unpacked_bytes > max(HARMLESS_BYTES, MAX_UNPACKING * packed):
        raise DataError(
            f"{path}: unpacks to over {MAX_UNPACKING} times its size",
            way_out,
        )


def read_exactly(stream: BinaryIO, count: int, path: Path) -> bytearray:
    """Read ``count`` bytes in chunks, so that memory follows what is there.

    Raises:
        DataError: If the stream ends early.
    """
    content = bytearray()
    while len(content) < count:
        chunk = stream.read(min(_CHUNK_BYTES, count - len(content)))
        if not chunk:
            raise DataError(
                f"{path}: truncated, it ends before its header says",
                "get the file again",
            )
        content += chunk
    return content


def text_lines(path: Path) -> Iterator[str]:
    """The lines of a text file, unpacked if need be, none longer than the bound.

    Raises:
        DataError: If a line is too long or the file cannot be read as UTF-8.
    """
    with (
        reading(path),
        open_bytes(path) as raw,
        # utf-8-sig drops the byte-order mark that spreadsheets write, which would
        # otherwise become part of the first column's name.
        io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as text,
    ):
        unpacked = 0
        while line := text.readline(MAX_LINE_CHARACTERS):
            unpacked += len(line)
            if unpacked > HARMLESS_BYTES:
                refuse_bomb(path, unpacked, "unpack it first, if you trust it")
            if "\0" in line:
                raise DataError(
                    f"{path}: there is a zero byte in the text",
                    "this is no table, or in another encoding; save it as UTF-8 text",
                )
            if len(line) == MAX_LINE_CHARACTERS and not line.endswith("\n"):
                raise DataError(
                    f"{path}: a line is longer than {MAX_LINE_CHARACTERS} characters",
                    "this is not a table with one record per line",
                )
            yield line
