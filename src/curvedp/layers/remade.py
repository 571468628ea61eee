r"""Inputs that are computed again in the backward pass instead of kept for it.

In a residual net most of what waits for the backward pass comes in pairs: what a norm
layer was given, and what it and an activation have made of it, the input ``a`` of the
next convolution. The first is kept for the norm layer's own gradient. The second
follows from it by two passes over memory, and takes as much of it.

So it is let go after the forward pass, and made again from the first by the same two
operations when the backward pass comes to its layer: once for all who ask for it
there (the layer's per-example gradients, a ReLU, a second layer with that input),
and gone when the last of them has asked. Same operations, same numbers: nothing about
the norms or the sum is another.

Only inputs of layers that write their gradients down as the backward pass comes along
are made again. All others are needed until the clipped sum, when what they would be
made from is gone.

What made what is read from autograd's graph while the forward pass runs, and from the
hooks on norm layers. What does not have this form is kept as ever.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from curvedp.errors import LoopError
from curvedp.layers.memory import is_plain, refuse_written, version, weakly

__all__ = ["Remade", "Remaker"]

#: By the name of its node in the graph, an activation as it was applied.
_ACTIVATIONS: dict[str, Callable[[Any], Callable[[Tensor], Tensor]]] = {
    "ReluBackward0": lambda node: F.relu_,
    "TanhBackward0": lambda node: torch.tanh_,
    "SigmoidBackward0": lambda node: torch.sigmoid_,
    "SiluBackward0": lambda node: partial(F.silu, inplace=True),
    "GeluBackward0": lambda node: partial(F.gelu, approximate=node._saved_approximate),
}

#: Nodes of group and layer normalisation.
_NORMS = ("NativeGroupNormBackward0", "NativeLayerNormBackward0")


class Remaker:
    """What one pass does not keep. Private, as all that it holds."""

    def __init__(self) -> None:
        self._made: dict[Any, Callable[[], Tensor]] = {}
        self._memories: dict[int, _Memory] = {}

    def during_forward(self) -> AbstractContextManager[Any]:
        """Around the forward pass, whose saved tensors come here."""
        return saved_tensors_hooks(self._pack, _opened)

    def after_forward(self) -> None:
        """Nothing more will be asked about what made what."""
        self._made.clear()

    def normalised(self, module: nn.Module, x: Any, y: Any) -> None:
        """Note that a norm layer has made y of x; to be called inside its hook.

        For a module that a rule serves. That y is really the layer's own operation on
        x is read from the graph: a forward of one's own or another hook may have done
        something more.
        """
        if not isinstance(module, nn.GroupNorm | nn.LayerNorm) or not _is_whole(x):
            return
        if not isinstance(y, Tensor) or self._memory(x).remade is not None:
            return
        node: Any = y.grad_fn
        if node is None or node.name() != _NORMS[isinstance(module, nn.LayerNorm)]:
            return
        weights = module.weight, module.bias
        if _is_same(node._saved_input, x) and _is_same(node._saved_weight, weights[0]):
            # whoever writes to x is refused by the norm layer's own record of it
            self._made[node] = partial(_normalised, module, *weights, x.detach())

    def knows(self, args: tuple[Any, ...]) -> bool:
        """Whether a layer's input could be made again."""
        return bool(args) and _is_whole(args[0]) and self._way_to(args[0]) is not None

    def input(self, x: Tensor) -> Tensor | Remade:
        """How a layer's input, of which it knows, is made again; or the input."""
        memory, make = self._memory(x), self._way_to(x)
        if memory.stays or make is None:
            return x
        if memory.remade is None or not memory.remade.is_like(x):
            memory.remade = Remade(x, make)
            for reference in memory.saved:
                saved = reference()
                if saved is not None:
                    saved.let_go(memory.remade)
            memory.saved.clear()
        return memory.remade.awaited()

    def stays(self, tensors: Iterable[Tensor]) -> None:
        """Somebody keeps these: then there is nothing to gain by making them again."""
        for x in tensors:
            if is_plain(x):
                memory = self._memory(x)
                memory.stays = True
                if memory.remade is not None and memory.remade.is_like(x):
                    memory.remade.is_there(x)

    def _way_to(self, x: Tensor) -> Callable[[], Tensor] | None:
        node = x.grad_fn
        activation = None if node is None else _ACTIVATIONS.get(node.name())
        if node is not None and activation is not None:
            make = self._made.get(node.next_functions[0][0])
            return None if make is None else _then(make, activation(node))
        return self._made.get(node)

    def _memory(self, x: Tensor) -> _Memory:
        storage = x.untyped_storage()._cdata
        if storage not in self._memories:
            self._memories[storage] = _Memory(weakly(x))
        return self._memories[storage]

    def _pack(self, x: Tensor) -> Any:
        if not is_plain(x):
            return x
        saved, memory = _Saved(x), self._memory(x)
        if memory.remade is not None:
            saved.let_go(memory.remade)
        else:  # it may turn out to be the input of a layer
            memory.saved.append(weakref.ref(saved))
        return saved


class Remade:
    """A tensor that is not there until somebody asks for it."""

    def __init__(self, like: Tensor, make: Callable[[], Tensor]) -> None:
        self._form = _form(like)
        self._make: Callable[[], Tensor] | None = make
        self._found: Tensor | None = None
        self._awaited = 0

    def is_like(self, x: Tensor) -> bool:
        """Whether it is this one, and nobody has written to it."""
        return _form(x) == self._form

    def is_there(self, x: Tensor) -> None:
        """It need not be made after all."""
        self._found = x.detach()

    def awaited(self) -> Remade:
        """Itself, for one more who will ask once."""
        self._awaited += 1
        return self

    def opened(self) -> Tensor:
        """The tensor; for the last one who asks, out of memory after that."""
        if self._found is None:
            if self._make is None:  # more have asked than said that they would
                raise LoopError(
                    "a tensor that was saved for the backward pass is asked for again "
                    "after that pass",
                    "call backward once for each batch of the loader",
                )
            with torch.no_grad():
                self._found = self._make()
        found = self._found
        self._awaited -= 1
        if self._awaited == 0:
            self._make = self._found = None
        return found


@dataclass
class _Memory:
    """A storage that tensors of the pass lie in.

    Attributes:
        reference: weak, and enough to keep another storage from its identity.
        saved: what autograd saved of it.
        remade: its whole content, if that is made again.
        stays: somebody else keeps it.
    """

    reference: StorageWeakRef
    saved: list[weakref.ref[_Saved]] = field(default_factory=list)
    remade: Remade | None = None
    stays: bool = False


class _Saved:
    """A tensor that autograd has saved, or how to make it again."""

    __slots__ = ("__weakref__", "_kept", "_version")

    def __init__(self, x: Tensor) -> None:
        self._kept: Tensor | Remade = x.detach()  # an output would hold itself
        self._version = version(x)

    def let_go(self, remade: Remade) -> None:
        """Keep no tensor, if it is the one that is made again."""
        if isinstance(self._kept, Tensor) and remade.is_like(self._kept):
            self._kept = remade.awaited()

    def opened(self) -> Tensor:
        """As autograd needs it."""
        if isinstance(self._kept, Remade):
            return self._kept.opened()
        refuse_written(self._kept, self._version)
        return self._kept


def _opened(saved: Any) -> Tensor:
    tensor: Tensor = saved.opened() if isinstance(saved, _Saved) else saved
    return tensor


def _form(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.stride(), x.storage_offset(), x.dtype, version(x)


def _is_whole(x: Any) -> bool:
    """Whether it is a plain tensor of numbers, all of its memory."""
    if not is_plain(x) or not x.is_floating_point() or x.is_neg():
        return False
    return bool(x.numel() * x.element_size() == x.untyped_storage().nbytes())


def _is_same(x: Tensor | None, y: Tensor | None) -> bool:
    """Whether both are one tensor, or both none."""
    if x is None or y is None:
        return x is y
    return x.data_ptr() == y.data_ptr() and x.shape == y.shape


def _then(
    make: Callable[[], Tensor], activation: Callable[[Tensor], Tensor]
) -> Callable[[], Tensor]:
    """One after the other; the second may work in place: nobody else has its input."""
    return lambda: activation(make())


def _normalised(
    module: nn.GroupNorm | nn.LayerNorm,
    weight: Tensor | None,
    bias: Tensor | None,
    x: Tensor,
) -> Tensor:
    """With the weights of the forward pass, which need not be the module's own."""
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(x, module.normalized_shape, weight, bias, module.eps)
    return F.group_norm(x, module.num_groups, weight, bias, module.eps)
