"""What a loop does to the model's output before the loss sees it.

The model and the loss were tried for mixing rows, one after the other; what stands
between them was not. The graph says what that is: casts, functions of each element, new
shapes, and what is done along other dimensions than the first keep rows apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import FunctionType, MemberDescriptorType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from curvedp.errors import LoopError
from curvedp.layers.bits import Flag, any_of
from curvedp.layers.memory import version
from curvedp.train.columns import columns_at, differ, places_of

__all__ = ["HARMLESS", "Outputs", "leaves"]

#: What carries no row and no number.
HARMLESS = (bool, str, type(None), torch.dtype, torch.device)

#: What is not looked into: it was in the model's output, or it is refused.
_WHOLE = (Tensor, nn.Module, FunctionType, type, int, float, *HARMLESS)

#: Nodes of functions of each element alone, and of one tensor.
_ELEMENTWISE = {
    f"{name}Backward0"
    for name in ("ToCopy", "Clone", "Alias", "Sigmoid", "Tanh", "Exp", "Log", "Neg")
} | {"LogSigmoidBackward0", "SoftplusBackward0", "ReluBackward0"}
#: Those that keep all elements in their order: equal rows begin at equal places.
_SHAPES = {f"SqueezeBackward{k}" for k in range(3)} | {
    f"{name}Backward0" for name in ("Unsqueeze", "View", "UnsafeView", "ReshapeAlias")
}
#: Those over or along dimensions that they name: of rows, if the first is none of them.
_ALONG = {
    f"{name}Backward0"
    for name in ("LogSoftmax", "Softmax", "Slice", "Select", "Transpose", "Amax", "Max")
} | {"MeanBackward1", "SumBackward1", "SqueezeBackward1", "UnsqueezeBackward0"}


@dataclass(frozen=True, repr=False)
class _Made:
    """A tensor on its way to the loss, what it held, and its gradient's hooks."""

    tensor: Tensor
    version: int
    hooks: tuple[int, ...] | None
    kept: Tensor | None

    @classmethod
    def of(cls, x: Tensor, hooks: tuple[int, ...] | None) -> _Made:
        kept = _values(x)
        return cls(x, version(x), hooks, None if kept is None else kept.clone())

    def written(self) -> Flag:
        """Whether it was written to; writes through .data and numpy have no version."""
        now = _values(self.tensor)
        if version(self.tensor) != self.version:
            return True
        if now is None or self.kept is None:
            return now is not self.kept
        same = (now.shape, now.dtype) == (self.kept.shape, self.kept.dtype)
        return not same or differ(now, self.kept)


class Outputs:
    """The outputs of one pass, for comparison with what the loss is given. Private.

    Args:
        rows: of a physical batch.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._made: list[_Made] = []
        self._others: list[Any] = []
        self._lost: list[_Made] = []
        self._late: list[Tensor] = []

    def made(self, output: Any) -> None:
        """Note what the model made of the batch."""
        found = list(_all_leaves(output))
        tensors = {id(x): x for x in found if isinstance(x, Tensor)}
        self._made = [_Made.of(x, _hooks(x)) for x in tensors.values()]
        self._others = [x for x in found if not isinstance(x, Tensor)]
        self._lost, self._late = [], []

    def forget(self) -> None:
        """Let go of them, not of what a GPU has still to say."""
        self._made, self._others, self._lost = [], [], []

    def require(self, output: Any) -> None:
        """Refuse an output that was changed on its way to the loss."""
        self._note(made.written() for made in self._made)
        nodes = {made.tensor.grad_fn for made in self._made}
        known = {id(made.tensor): made for made in self._made}
        given: list[_Made] = []
        for x in _all_leaves(output):
            if not isinstance(x, Tensor):
                if not self._has(x):
                    _refuse_changed()
            elif id(x) in known:
                given.append(known[id(x)])
            else:
                if not _within(x, self._rows, nodes):
                    _refuse_changed()
                given.append(_Made.of(x, None))
        self._lost += [*self._made, *given]

    def close(self) -> None:
        """Refuse what was written, or listened to, since the loss got it."""
        if any(_hooks(one.tensor) != one.hooks for one in self._lost):
            raise LoopError(
                "a hook on the model's output was there in the backward pass: it may "
                "have mixed the gradients of rows, where nothing was tried for that",
                "take the hook away; what it does belongs into the model's forward or "
                "into loss=lambda output, targets: ..., which are tried",
            )
        self._note(one.written() for one in {id(o): o for o in self._lost}.values())

    def flags(self) -> list[Tensor]:
        """What a GPU has not compared yet; if one is set, ``confirm`` is due."""
        return self._late

    def confirm(self) -> None:
        """Refuse what a GPU found to be written."""
        if any_of(self._late):
            _refuse_changed()
        self._late = []

    def _note(self, flags: Iterable[Flag]) -> None:
        for flag in flags:
            if isinstance(flag, Tensor):
                self._late.append(flag)
            elif flag:
                _refuse_changed()

    def _has(self, value: Any) -> bool:
        if isinstance(value, int | float):
            numbers = [x for x in self._others if isinstance(x, int | float)]
            return value in numbers or isinstance(value, bool)
        return isinstance(value, HARMLESS) or any(value is x for x in self._others)


def _refuse_changed() -> NoReturn:
    raise LoopError(
        "private.loss was not given what private.model gave: the output "
        "was changed on the way, where nothing was tried for mixing rows",
        "do it in the model's forward, or in the loss that make_private is "
        "given: loss=lambda output, targets: ...; both are tried",
    )


def _hooks(x: Tensor) -> tuple[int, ...] | None:
    """Hooks on a tensor's gradient; none left is another thing than none at all."""
    hooks: Any = x._backward_hooks
    return None if hooks is None else tuple(hooks)


def _values(x: Tensor) -> Tensor | None:
    """What is compared of an output: all of a small one, places of a large one."""
    if x.layout is not torch.strided or x.is_nested or x.numel() == 0:
        return None
    x = x.detach()
    return x if x.dim() == 0 else columns_at(x, places_of(x))


def _within(x: Tensor, rows: int, nodes: Collection[Any]) -> bool:
    """Whether rows of ``x`` are functions of the same rows of a node's output alone."""
    node: Any = x.grad_fn
    names, along = set(), True
    while node is not None and node not in nodes:
        names.add(name := type(node).__name__)
        along &= name in _ELEMENTWISE or (name in _ALONG and _keeps_first(node))
        node = node.next_functions[0][0] if node.next_functions else None
    if node is None or x.shape[:1] != (rows,):
        return False
    return along or names <= _ELEMENTWISE | _SHAPES


def _keeps_first(node: Any) -> bool:
    """Whether none of a node's dimensions is the first, however it is counted."""
    if "Softmax" in type(node).__name__ and node._saved_result.dim() < 2:
        return False
    said = [getattr(node, f"_saved_{n}", ()) for n in ("dim", "dim0", "dim1")]
    dims = [d for s in said for d in (s if isinstance(s, tuple | list) else (s,))]
    # where the last dimension is the first as well, no batch is left of it
    return bool(dims) and all(0 < d < 2**63 or d in (-1, 2**64 - 1) for d in dims)


def _all_leaves(value: Any, seen: tuple[int, ...] = ()) -> Iterator[Any]:
    """What is in containers, dataclasses and objects of other classes."""
    for leaf in leaves(value):
        held = {} if isinstance(leaf, _WHOLE) else _attributes(leaf)
        if not held:
            yield leaf
        elif id(leaf) not in seen:
            yield from _all_leaves(held, (*seen, id(leaf)))


def _attributes(value: Any) -> dict[str, Any]:
    slots = {
        name: getattr(value, name)
        for kind in type(value).__mro__
        for name, held in vars(kind).items()
        if isinstance(held, MemberDescriptorType) and hasattr(value, name)
    }
    return slots | getattr(value, "__dict__", {})


def leaves(value: Any) -> Iterator[Any]:
    """What is in containers and dataclasses."""
    if isinstance(value, Mapping):
        value = value.values()
    elif is_dataclass(value) and not isinstance(value, type):
        named = {field.name: getattr(value, field.name) for field in fields(value)}
        value = (named | getattr(value, "__dict__", {})).values()
    elif not isinstance(value, tuple | list):
        yield value
        return
    for item in value:
        yield from leaves(item)
