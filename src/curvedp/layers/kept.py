r"""Half the memory: what a pass keeps is kept in bfloat16, and computed in float32.

Between forward and backward pass, and until clipped sums are made, two kinds of tensors
wait: those that autograd saves, and the inputs ``a`` and output gradients ``d`` of the
layers. They are mostly the same. A :class:`Keeper` rounds them to bfloat16 once and
lets the float32 ones go:

- the inputs of a layer that a rule serves, and its output gradients;
- whatever autograd saves that lies in the same memory as an input or an output of a
  layer: a ReLU's result that is the next layer's input, queries, keys and values.

Autograd gets them back as float32 tensors (a ReLU, which looks at signs, as they are).
All else stays as it is: parameters, buffers
and the pass's own inputs, which others hold anyway; means, deviations and sums of
exponentials, from which an operation takes differences; inputs of modules without a
rule, which are run again.

*Why the bound holds.* Rounding is a function of one number, so what an example becomes
depends on that example alone. The rounded ``a`` and ``d`` are the tensors whose norms
are measured and whose sum is released: both are computed from the same numbers, in
float32 or better. What an example contributes after clipping is at most C, whatever
rounding made of its gradient. A number beyond bfloat16's largest becomes infinite, and
its example contributes nothing.

*One copy.* All views of one piece of memory share one rounded copy, which lives as long
as any of them. Memory that was freed cannot be mistaken for what is in its place now:
a weak reference to every storage that was seen keeps its identity from being used
again. A tensor that is written to has another copy from then on, and where it is a part
of its memory, one of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map

from curvedp.layers.memory import alive, is_plain, refuse_written, version, weakly

__all__ = ["Keeper"]

#: A view of less than this part of its memory is copied alone: the first token of
#: many, or a batch cut out of a whole dataset.
SMALLEST_PART = 0.25


class Keeper:
    """What one pass keeps, in bfloat16. Private, as all that it holds.

    Args:
        left: tensors whose memory stays as it is.
    """

    def __init__(self, left: Iterable[Tensor] = ()) -> None:
        self._memories: dict[int, _Memory] = {}
        self._unread: _Memory | None = None
        self.leave(left)

    def leave(self, tensors: Iterable[Tensor]) -> None:
        """Never round these, nor anything else that lies in their memory."""
        for x in tensors:
            if is_plain(x):
                self._memory(x).left = True

    def during_forward(self) -> AbstractContextManager[Any]:
        """Around the forward pass, whose saved tensors are kept here."""
        return saved_tensors_hooks(self._pack, _opened)

    def unread(self, x: Any) -> None:
        """What autograd saves of this, until told otherwise, is its shape; None ends.

        For an operation whose backward pass never looks at the values.
        """
        self._unread = self._memory(x) if _can_be_short(x) else None

    def takes(self, x: Any) -> bool:
        """Whether it would be rounded."""
        return _can_be_short(x) and not self._memory(x).left

    def inputs(self, values: Any) -> Any:
        """Arguments of a layer as they are kept: float32 tensors rounded."""
        return tree_map(self.short, values)

    def outputs(self, values: Iterable[Any]) -> None:
        """Round these when autograd saves them, or has saved them."""
        for x in values:
            if _can_be_short(x):
                self._shorten_saved(self._memory(x))

    def short(self, x: Any) -> Any:
        """The tensor in bfloat16, in memory that it shares with its like."""
        if not _can_be_short(x):
            return x
        memory = self._memory(x)
        if memory.left:
            return x
        short = _rounded(memory, x)
        self._shorten_saved(memory)
        return short

    def _memory(self, x: Tensor) -> _Memory:
        storage = x.untyped_storage()
        found = self._memories.get(storage._cdata)
        if found is None:
            found = self._memories[storage._cdata] = _Memory(weakly(x))
        return found

    def _shorten_saved(self, memory: _Memory) -> None:
        memory.wanted = True
        for reference in memory.saved:
            saved = reference()
            if saved is not None:
                saved.shorten(memory)
        memory.saved.clear()

    def _pack(self, x: Tensor) -> Any:
        if not _can_be_short(x):
            return x.detach() if type(x) is Tensor else x
        memory = self._memory(x)
        if memory is self._unread:
            return _Shape(x)
        if memory.left:
            return x.detach()
        saved = _Saved(x)
        if memory.wanted:
            saved.shorten(memory)
        else:  # it may turn out to be the input of a layer
            memory.saved.append(weakref.ref(saved))
        return saved


@dataclass
class _Memory:
    """A storage that tensors of the pass lie in.

    Attributes:
        reference: weak, and enough to keep another storage from its identity.
        left: it stays as it is.
        wanted: it is an input or an output of a layer.
        saved: what autograd saved before that was known.
        copies: rounded copies, weakly, by version and, for what is copied alone, its
            place.
    """

    reference: StorageWeakRef
    left: bool = False
    wanted: bool = False
    saved: list[weakref.ref[_Saved]] = field(default_factory=list)
    copies: dict[tuple[Any, ...], StorageWeakRef] = field(default_factory=dict)


class _Saved:
    """A tensor that autograd has saved; rounded, or the tensor itself."""

    __slots__ = ("__weakref__", "_kept", "_version")

    def __init__(self, x: Tensor) -> None:
        self._kept = x.detach()  # with its graph, an output would hold itself
        self._version: int | None = version(x)

    def shorten(self, memory: _Memory) -> None:
        """Keep a rounded copy in its place, unless it was written to meanwhile."""
        if not memory.left and self._version == version(self._kept):
            self._kept, self._version = _rounded(memory, self._kept), None

    def opened(self) -> Tensor:
        """As autograd needs it: in float32, but for an operation that takes any."""
        if self._version is None:
            return self._kept if _signs_suffice() else self._kept.to(torch.float32)
        refuse_written(self._kept, self._version)
        return self._kept


class _Shape:
    """Of a tensor whose values nobody will read."""

    def __init__(self, x: Tensor) -> None:
        self._shape, self._device = x.shape, x.device

    def opened(self) -> Tensor:
        """A tensor of the shape that takes the memory of one number."""
        return torch.zeros((), device=self._device).expand(self._shape)


def _signs_suffice() -> bool:
    """Whether the operation that asks lets a gradient pass where this is positive.

    It takes a bfloat16 tensor beside a float32 gradient, and one copy less is alive
    where most of them are.
    """
    node = getattr(torch._C, "_current_autograd_node", lambda: None)()
    return node is not None and node.name() == "ReluBackward0"


def _opened(saved: Any) -> Tensor:
    known = isinstance(saved, _Saved | _Shape)
    tensor: Tensor = saved.opened() if known else saved
    return tensor


def _rounded(memory: _Memory, x: Tensor) -> Tensor:
    """A view, like x, of the one bfloat16 copy of what x lies in."""
    x = x.detach()
    elements = x.untyped_storage().nbytes() // x.element_size()
    shape, stride, offset = tuple(x.shape), x.stride(), x.storage_offset()
    key: tuple[Any, ...] = (version(x),)
    # parts of an unsafe split have a version each: after a write it tells of one alone
    written = version(x) > 0 and x.numel() < elements
    if written or x.numel() < SMALLEST_PART * elements:
        key = (version(x), shape, stride, offset)
        source, offset = x.contiguous(), 0
        elements, stride = source.numel(), source.stride()
    else:
        source = x.as_strided((elements,), (1,), 0)
    known = memory.copies.get(key)
    storage = None if known is None else alive(known)
    if storage is None:
        copy = source.to(torch.bfloat16, memory_format=torch.contiguous_format)
        memory.copies[key] = weakly(copy)
    else:
        copy = torch.empty(0, dtype=torch.bfloat16, device=x.device)
        copy.set_(storage, 0, (elements,), (1,))
    return copy.as_strided(shape, stride, offset)


def _can_be_short(x: Any) -> bool:
    if not isinstance(x, Tensor) or x.dtype is not torch.float32:
        return False
    return type(x) is Tensor and is_plain(x) and not x.is_neg()
