"""Settings of transforms, checked where they are made."""

from __future__ import annotations

import math

from curvedp.errors import ConfigurationError
from curvedp.values import is_number

__all__ = ["check_decay", "check_positive"]


def check_decay(name: str, value: float) -> None:
    """Refuse what is not a weight of the past: at least 0 and below 1."""
    if not (is_number(value) and 0 <= value < 1):
        raise ConfigurationError(
            f"{name} is {value!r}", "give a number from 0 up to but not including 1"
        )


def check_positive(name: str, value: float, most: float = math.inf) -> None:
    """Refuse what is not above 0, or above ``most``."""
    if not (is_number(value) and 0 < value <= most):
        limit = "" if math.isinf(most) else f" and up to {most:g}"
        raise ConfigurationError(
            f"{name} is {value!r}", f"give a number above 0{limit}"
        )
