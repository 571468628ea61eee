"""Types of settings, checked before their values: whoever mistypes one is told which.

Settings come from Python, TOML files and the command line, so nothing can be taken for
granted about them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from curvedp.errors import ConfigurationError

__all__ = ["check_choice", "check_least", "check_types"]

_WORDS = {
    "int": "a whole number",
    "float": "a finite number",
    "str": "text",
    "bool": "true or false",
}


def check_types(values: Mapping[str, Any], types: Mapping[str, str]) -> None:
    """Refuse a value of the wrong type by its name.

    Args:
        values: settings by name.
        types: "int", "float" (a whole number will do), "str" or "bool", by name.

    Raises:
        ConfigurationError: the first value that does not fit.
    """
    for name, value in values.items():
        if name in types and not _fits(value, types[name]):
            raise ConfigurationError(
                f"{name} is {value!r}", f"give {_WORDS[types[name]]}"
            )


def _fits(value: Any, wanted: str) -> bool:
    if wanted in ("str", "bool"):
        return isinstance(value, str if wanted == "str" else bool)
    if isinstance(value, bool):  # Python counts True as 1
        return False
    if wanted == "int":
        return isinstance(value, int)
    return isinstance(value, int | float) and math.isfinite(value)


def check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    """Refuse a word that is not one of those known."""
    if value not in known:
        raise ConfigurationError(
            f"unknown {name} {value!r}", f"choose one of: {', '.join(known)}"
        )


def check_least(name: str, value: float, least: float) -> None:
    """Refuse a number below the least that makes sense."""
    if value < least:
        raise ConfigurationError(
            f"{name} is {value!r}", f"give {least:g} or a larger number"
        )
