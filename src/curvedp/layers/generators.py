"""Generators that a pass may draw from, and how to put them back.

Two passes are compared row by row, so they must draw alike. Besides torch's own these
are Python's and numpy's global generators, and those that modules hold, also in
containers and in plain objects of their own. What else a model holds is put back by
:class:`curvedp.layers.state.State`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["held_generators", "seed_torch"]

#: How deep generators are looked for in containers and objects.
DEEPEST = 4

_GENERATORS = (
    torch.Generator,
    random.Random,
    np.random.RandomState,
    np.random.Generator,
)

#: Not looked into: modules of a model are looked at one by one.
_CLOSED = (nn.Module, torch.Tensor, ModuleType, type)

#: What every module has; torch's own.
_TORCHS = frozenset(vars(nn.Module()))


def seed_torch(number: int, device: torch.device) -> None:
    """Seeds torch's global generators as far as work on a device draws from them.

    ``torch.manual_seed`` writes down where it was called from, for a GPU that is not
    used yet, and that takes longer than a pass of a small net.
    """
    if device.type == "cpu":
        torch.default_generator.manual_seed(number)
    else:
        torch.manual_seed(number)


def held_generators(holder: Any) -> Callable[[], None]:
    """Makes generators what they are now.

    Args:
        holder: a model, of which all modules are looked at, or a function.
    """
    seen: set[int] = set()
    back: list[Callable[[], Any]] = []
    python, numbers = random.getstate(), np.random.get_state()
    back += _generators(holder, seen, DEEPEST)
    for module in holder.modules() if isinstance(holder, nn.Module) else ():
        for name, value in vars(module).items():
            if name not in _TORCHS:
                back += _generators(value, seen, DEEPEST)

    def put_back() -> None:
        random.setstate(python)
        np.random.set_state(numbers)
        for one in back:
            one()

    return put_back


def _generators(value: Any, seen: set[int], depth: int) -> Iterator[Callable[[], Any]]:
    """How the generators in a value come back to their states of now."""
    if id(value) in seen or depth == 0 or isinstance(value, _CLOSED):
        return
    seen.add(id(value))
    if isinstance(value, torch.Generator):
        state = value.get_state()
        yield lambda: value.set_state(state)
    elif isinstance(value, random.Random):
        held = value.getstate()
        yield lambda: value.setstate(held)
    elif isinstance(value, np.random.RandomState):
        legacy = value.get_state()
        yield lambda: value.set_state(legacy)
    elif isinstance(value, np.random.Generator):
        bits, numbers = value.bit_generator, value.bit_generator.state
        yield lambda: setattr(bits, "state", numbers)
    elif isinstance(value, dict):
        for part in list(value.values()):
            yield from _generators(part, seen, depth - 1)
    elif isinstance(value, list | tuple | set):
        for part in list(value):
            yield from _generators(part, seen, depth - 1)
    elif callable(value):
        for part in _reached(value):
            yield from _generators(part, seen, depth - 1)
    elif hasattr(value, "__dict__"):
        yield from _generators(vars(value), seen, depth)


def _reached(function: Any) -> list[Any]:
    """What a callable holds, in cells and globals too; of these, generators alone."""
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    scope = getattr(function, "__globals__", {})
    cells = getattr(function, "__closure__", None) or ()
    return [
        getattr(function, "__dict__", None),
        getattr(function, "__self__", None),
        getattr(function, "args", None),
        getattr(function, "keywords", None),
        *[cell.cell_contents for cell in cells],
        *[scope[n] for n in names if isinstance(scope.get(n), _GENERATORS)],
    ]
