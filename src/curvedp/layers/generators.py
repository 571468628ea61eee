"""Generators that a pass may draw from: how to put them back, or to begin with others.

Two passes are compared row by row, so they must draw alike. Besides torch's own these
are Python's and numpy's global generators, and those that modules hold, also in
containers and in plain objects of their own. What else a model holds is put back by
:class:`curvedp.layers.state.State`.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["Generators", "seed_torch"]

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


@dataclass(frozen=True, repr=False)
class _Handle:
    """Of a generator: reads its state, sets it, and begins with a number."""

    state: Callable[[], Any]
    put_back: Callable[[Any], Any]
    seed: Callable[[int], Any]


class Generators:
    """Those that a model or a function draws from, and their states of now.

    Args:
        holder: a model, of which all modules are looked at, or a function.
        device: that work is done on; torch's own generators are not put back.
    """

    def __init__(self, holder: Any, device: torch.device) -> None:
        seen: set[int] = set()
        found = [
            _Handle(random.getstate, random.setstate, random.seed),
            _Handle(np.random.get_state, np.random.set_state, np.random.seed),
            *_generators(holder, seen, DEEPEST),
        ]
        for module in holder.modules() if isinstance(holder, nn.Module) else ():
            for name, value in vars(module).items():
                if name not in _TORCHS:
                    found += _generators(value, seen, DEEPEST)
        self._device = device
        self._states = [(one, one.state()) for one in found]
        self._begun = b""

    def put_back(self) -> None:
        """Makes them what they were."""
        for one, state in self._states:
            one.put_back(state)

    def seed(self, number: int) -> None:
        """Begins all of them with a number, and torch's own as well."""
        seed_torch(number, self._device)
        for one, _ in self._states:
            one.seed(number)
        self._begun = self._now()

    def drawn(self) -> bool:
        """Returns True if any was drawn from since they were begun."""
        return self._now() != self._begun

    def _now(self) -> bytes:
        found = [one.state() for one, _ in self._states]
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        elif self._device.type == "mps":
            states.append(torch.mps.get_rng_state())
        return pickle.dumps((found, [state.numpy() for state in states]))


def _seed_numbers(generator: np.random.Generator, number: int) -> None:
    bits = generator.bit_generator
    bits.state = type(bits)(number).state


def _generators(value: Any, seen: set[int], depth: int) -> Iterator[_Handle]:
    """The generators in a value."""
    if id(value) in seen or depth == 0 or isinstance(value, _CLOSED):
        return
    seen.add(id(value))
    if isinstance(value, torch.Generator):
        yield _Handle(
            lambda: value.get_state().numpy(),
            lambda state: value.set_state(torch.from_numpy(state)),
            value.manual_seed,
        )
    elif isinstance(value, random.Random):
        yield _Handle(value.getstate, value.setstate, value.seed)
    elif isinstance(value, np.random.RandomState):
        yield _Handle(value.get_state, value.set_state, value.seed)
    elif isinstance(value, np.random.Generator):
        bits = value.bit_generator
        yield _Handle(
            lambda: bits.state,
            lambda state: setattr(bits, "state", state),
            partial(_seed_numbers, value),
        )
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
