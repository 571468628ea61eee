"""Checks at the edge, each naming the value and the way out."""

from __future__ import annotations

from typing import Any

import torch

from curvedp.errors import ConfigurationError
from curvedp.values import is_whole

__all__ = ["check_draw", "check_lengths", "whole_tuple"]


def whole_tuple(name: str, values: Any) -> tuple[int, ...]:
    """A sequence of whole numbers as a tuple, or an error that names it."""
    try:
        listed = tuple(values)
    except TypeError:
        listed = (None,)
    if not all(is_whole(value) for value in listed):
        raise ConfigurationError(
            f"{name} is {values!r}, not a sequence of whole numbers",
            "numpy arrays and tensors become one by .tolist()",
        )
    return listed


def check_draw(size: int, generator: torch.Generator) -> None:
    """Refuse a batch without examples, and generators that are not on the CPU."""
    if not is_whole(size, at_least=1):
        raise ConfigurationError(
            f"a probe was asked for {size!r} examples",
            "ask for a whole number from 1 on",
        )
    if not isinstance(generator, torch.Generator) or generator.device.type != "cpu":
        raise ConfigurationError(
            f"a probe draws from a torch.Generator on the CPU, not from {generator!r}",
            "make one by torch.Generator().manual_seed(seed); the same seed then gives "
            "the same probes whatever the model's device",
        )


def check_lengths(lengths: Any, at_least: int, what: str) -> tuple[int, int]:
    """A range ``(shortest, longest)``, both included, or an error that says why not."""
    found = whole_tuple("lengths", lengths)
    if len(found) != 2 or not at_least <= found[0] <= found[1]:
        raise ConfigurationError(
            f"lengths is {lengths!r}, not a range (shortest, longest) from {at_least} "
            f"on{what}",
            f"for instance lengths=({max(at_least, 8)}, {max(at_least, 8) * 16})",
        )
    return found[0], found[1]
