"""The lines of a ledger as text, each chained to the one before it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from curvedp.errors import ConfigurationError

__all__ = ["LONGEST_LINE", "chain_of", "dump_lines"]

#: Bytes. A file with a hole has a line that is longer than the memory.
LONGEST_LINE = 1 << 22


class Entry(Protocol):
    """What a line says: a header, a payment or a note."""

    def to_json(self) -> dict[str, Any]:
        """The line as JSON values."""


def chain_of(content: Mapping[str, Any], previous: str) -> str:
    """SHA-256 of the previous line's chain and this line's canonical JSON."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256((previous + text).encode()).hexdigest()


def dump_lines(
    entries: Iterable[Entry],
    previous: str = "",
    *,
    chained: bool = True,
) -> tuple[bytes, list[str]]:
    """The entries as lines of the file.

    Args:
        entries: what the lines say.
        previous: the chain of the line before them; empty before the header.
        chained: whether the lines carry their chain; those of version 1 do not.

    Returns:
        The lines, and the chain of each of them.
    """
    lines, chains = [], []
    try:
        for entry in entries:
            content = entry.to_json()
            previous = chain_of(content, previous)
            chains.append(previous)
            if chained:
                content["chain"] = previous
            lines.append(json.dumps(content, allow_nan=False) + "\n")
            if len(lines[-1]) > LONGEST_LINE:  # ASCII, so these are bytes
                raise ConfigurationError(
                    f"a line of the ledger is longer than {LONGEST_LINE} bytes, and "
                    "nobody could read it again",
                    "keep facts and notes short, and noise to fewer bands",
                )
    except ConfigurationError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"not a JSON value in the ledger: {error}",
            "facts and events are numbers, strings, lists and objects of these",
        ) from None
    return "".join(lines).encode(), chains
