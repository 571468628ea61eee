"""What a loop does to the model's output before the loss sees it.

The model and the loss were tried for mixing rows, one after the other; what stands
between them was not. The graph says what that is: casts, functions of each element, new
shapes, and what is done along other dimensions than the first keep rows apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from curvedp.errors import LoopError
from curvedp.layers.memory import version

__all__ = ["Outputs", "leaves"]

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


class Outputs:
    """The outputs of one pass, for comparison with what the loss is given. Private.

    Args:
        rows: of a physical batch.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._made: list[tuple[Tensor, int]] = []

    def made(self, output: Any) -> None:
        """Note what the model made of the batch."""
        found = [x for x in leaves(output) if isinstance(x, Tensor)]
        self._made = [(x, version(x)) for x in found]

    def require(self, output: Any) -> None:
        """Refuse an output that was changed on its way to the loss."""
        nodes = {x.grad_fn for x, before in self._made if version(x) == before}
        known = {id(x) for x, before in self._made if version(x) == before}
        for x in leaves(output):
            if not isinstance(x, Tensor) or id(x) in known:
                continue
            if not _within(x, self._rows, nodes):
                raise LoopError(
                    "private.loss was not given what private.model gave: the output "
                    "was changed on the way, where nothing was tried for mixing rows",
                    "do it in the model's forward, or in the loss that make_private is "
                    "given: loss=lambda output, targets: ...; both are tried",
                )


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
