"""What counts as a number, for every check at the edge."""

from __future__ import annotations

import math

__all__ = ["is_number", "is_whole"]


def is_number(value: object) -> bool:
    """Whether it is a finite number; True and False are not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def is_whole(value: object, at_least: int = 0) -> bool:
    """Whether it is a whole number of at least ``at_least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def printable(text: str, kept: str = "\n") -> str:
    """A text without the codes by which it could command a terminal.

    Args:
        text: from a file, a path, an error.
        kept: further characters that stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text)
