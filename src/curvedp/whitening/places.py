"""A map's numbers in memory that stays where it is.

A recorded step reads the map from where it lay when it was recorded. A refreshed map
mostly has other numbers in tensors of the same shapes: they are copied there, and
nothing has to be recorded again.
"""

from __future__ import annotations

import copy
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from curvedp.whitening.base import Whitener

__all__ = ["own_map", "refill"]

#: A digest of the numbers themselves: the only thing of a map that no step computes by.
_NAME = "frame"
#: What is compared by value.
_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, Enum)


def own_map(whitener: Whitener) -> Whitener:
    """The same map, in memory of its own; as it is, if not all of it is our own make.

    Tensors that are parts of one piece of memory have a piece each in the copy: those
    of the next map may have nothing in common.
    """
    found: dict[int, Tensor] = {}
    if not _collect_tensors(whitener, found):
        return whitener
    copies = {at: _own(x) for at, x in found.items() if not _written_twice(x)}
    return copy.deepcopy(whitener, copies)


def refill(own: Whitener, new: Whitener, device: torch.device) -> bool:
    """Give a map of one's own the numbers of another; False if it is of another make.

    Of another make is one whose shapes, dtypes or constants differ, that has tensors
    elsewhere than on the device, where a recorded step does not look again, or parts
    that are not of this package. What the own map has computed once and kept is
    computed for the new one too.
    """
    if own is new:
        return True
    pairs = _Pairs(device)
    if not pairs.collect(own, new):
        return False
    if pairs.into:
        torch._foreach_copy_(pairs.into, pairs.values)
    return True


class _Pairs:
    """Tensors of two maps that stand at the same places in them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._objects: dict[int, Any] = {}
        self._memories: dict[int, tuple[Tensor, Tensor]] = {}
        self.into: list[Tensor] = []
        self.values: list[Tensor] = []

    def collect(self, own: Any, new: Any) -> bool:
        """Whether the two are of one make, as far as it was looked."""
        if type(own) is not type(new):
            return False
        if isinstance(own, Tensor):
            return self._collect_tensor(own, new)
        if isinstance(own, dict):
            pairs = [(own[name], new.get(name)) for name in own]
            return list(own) == list(new) and all(self.collect(*p) for p in pairs)
        if isinstance(own, list | tuple):
            same = len(own) == len(new)
            return same and all(map(self.collect, own, new))
        if isinstance(own, _CONSTANTS):
            return bool(own == new)
        if not _is_ours(own):
            return False  # it cannot be known what it computes by
        if id(own) in self._objects:  # under another name, as it must be in both
            return self._objects[id(own)] is new
        self._objects[id(own)] = new
        names = [name for name in vars(own) if name != _NAME]
        # what the new one has not computed yet it computes here
        return all(self.collect(vars(own)[n], getattr(new, n)) for n in names)

    def _collect_tensor(self, own: Tensor, new: Tensor) -> bool:
        known = self._memories.setdefault(own.untyped_storage()._cdata, (own, new))
        if known[0] is not own or known[1] is not new:
            return False  # two values for one place
        self.into.append(own)
        self.values.append(new)
        return self._is_place(own) and _description(own) == _description(new)

    def _is_place(self, x: Tensor) -> bool:
        return x.device == self._device and not _written_twice(x)


def _collect_tensors(value: Any, found: dict[int, Tensor]) -> bool:
    """All tensors of a map, by identity; False if it has parts of an unknown kind."""
    if isinstance(value, Tensor):
        found[id(value)] = value
        return True
    if isinstance(value, dict):
        return all(_collect_tensors(inner, found) for inner in value.values())
    if isinstance(value, list | tuple):
        return all(_collect_tensors(inner, found) for inner in value)
    if isinstance(value, _CONSTANTS):
        return True
    return _is_ours(value) and _collect_tensors(vars(value), found)


def _own(x: Tensor) -> Tensor:
    copied = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return copied.copy_(x)


def _written_twice(x: Tensor) -> bool:
    """Whether entries may share memory: they do not if every stride spans the last."""
    spanned = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride < spanned:
            return True
        spanned += stride * (size - 1)
    return False


def _description(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.dtype, x.device


def _is_ours(value: Any) -> bool:
    return type(value).__module__.startswith(f"{__package__}.")
