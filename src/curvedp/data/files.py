"""Reading files that may be broken or hostile, with bounded memory.

A header may claim any size, and a compressed file may unpack to a thousand times its
length. So a claim is compared with what the file can hold before anything is
allocated, and every failure is a :class:`DataError` that names the file.
"""

from __future__ import annotations

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
    "bare_suffix",
    "open_bytes",
    "read_exactly",
    "reading",
    "refuse_impossible_size",
    "text_lines",
]

MAX_DEFLATE_RATIO = 1032
"""Deflate codes at most 258 bytes in 2 bits, so no gzip or zip member does better."""

MAX_LINE_CHARACTERS = 1 << 24
"""A longer line is no table row; without a bound one line could fill the memory."""

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
            f"{path}: damaged or truncated compressed data ({error})",
            "get the file again",
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text", "save the table as UTF-8") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"{path}: cannot be read ({reason})") from error


def open_bytes(path: Path) -> BinaryIO:
    """Open ``path`` for reading, unpacked when its name ends in .gz or .xz."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if suffix == ".xz":
        return cast(BinaryIO, lzma.open(path, "rb"))
    return path.open("rb")


def refuse_impossible_size(path: Path, claimed_bytes: int) -> None:
    """Refuse a header's claim that the file on disk cannot hold.

    Raises:
        DataError: If ``claimed_bytes`` exceeds the file, or what it could unpack to.
    """
    ratio = MAX_DEFLATE_RATIO if path.suffix.lower() == ".gz" else 1
    if claimed_bytes > path.stat().st_size * ratio:
        raise DataError(
            f"{path}: the header claims {claimed_bytes} bytes, more than the file "
            "holds",
            "the file is truncated or not of this format; get it again",
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
                f"{path}: truncated, {len(content)} of {count} bytes are there",
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
        while line := text.readline(MAX_LINE_CHARACTERS):
            if len(line) == MAX_LINE_CHARACTERS and not line.endswith("\n"):
                raise DataError(
                    f"{path}: a line is longer than {MAX_LINE_CHARACTERS} characters",
                    "this is not a table with one record per line",
                )
            yield line
