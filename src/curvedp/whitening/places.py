"""A map's numbers in memory that stays where it is.

A recorded step reads the map from where it lay when it was recorded. A refreshed map
mostly has other numbers in tensors of the same shapes: they are copied there, and
nothing has to be recorded again.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from curvedp.whitening.base import Whitener

__all__ = ["own_map", "refill"]

#: A digest of the numbers themselves: the only thing of a map that no step computes by.
_NAME = "frame"
#: What is compared by value; everything else must be the very same.
_CONSTANTS = (bool, int, float, str, type(None), torch.dtype)


def own_map(whitener: Whitener) -> Whitener:
    """The same map, in memory of its own; one that is not of this package as it is."""
    return copy.deepcopy(whitener) if _is_ours(whitener) else whitener


def refill(own: Whitener, new: Whitener, device: torch.device) -> bool:
    """Give a map of one's own the numbers of another; False if it is of another make.

    Of another make is one whose shapes, dtypes or constants differ, or that has tensors
    elsewhere than on the device, where a recorded step does not look again. What the
    own map has computed once and kept is computed for the new one too.
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
        self._seen: set[int] = set()
        self.into: list[Tensor] = []
        self.values: list[Tensor] = []

    def collect(self, own: Any, new: Any) -> bool:
        """Whether the two are of one make, as far as it was looked."""
        if type(own) is not type(new):
            return False
        if isinstance(own, Tensor):
            self.into.append(own)
            self.values.append(new)
            return self._is_place(own) and _description(own) == _description(new)
        if isinstance(own, dict):
            pairs = [(own[name], new.get(name)) for name in own]
            return list(own) == list(new) and all(self.collect(*p) for p in pairs)
        if isinstance(own, list | tuple):
            same = len(own) == len(new)
            return same and all(map(self.collect, own, new))
        if isinstance(own, _CONSTANTS):
            return bool(own == new)
        if not _is_ours(own):
            return own is new
        if id(own) in self._seen:  # under another name
            return True
        self._seen.add(id(own))
        names = [name for name in vars(own) if name != _NAME]
        # what the new one has not computed yet it computes here
        return all(self.collect(vars(own)[n], getattr(new, n)) for n in names)

    def _is_place(self, x: Tensor) -> bool:
        written_twice = any(
            n > 1 and s == 0 for n, s in zip(x.shape, x.stride(), strict=True)
        )
        return x.device == self._device and not written_twice


def _description(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.dtype, x.device


def _is_ours(value: Any) -> bool:
    return type(value).__module__.startswith(f"{__package__}.")
