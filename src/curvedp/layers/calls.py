"""Calls that a forward pass leaves open until the backward pass brings gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from curvedp.errors import LoopError
from curvedp.layers.copies import one_of
from curvedp.layers.io import LayerIO
from curvedp.layers.kept import Keeper
from curvedp.layers.memory import version
from curvedp.layers.refuse import refuse_checkpointing
from curvedp.layers.remade import Remade
from curvedp.layers.rewrite import NO_TAPE, Use
from curvedp.layers.rules import Call

__all__ = ["CallTape", "OpenCall"]


class CallTape:
    """Listens to a rewritten forward; ``calls`` is where its open calls go."""

    def __init__(
        self, calls: list[OpenCall], label: str, keeper: Keeper | None = None
    ) -> None:
        self._calls, self._label, self._keeper = calls, label, keeper
        self._uses: list[tuple[str, str | None, OpenCall]] = []

    def watch(self, output: Tensor) -> tuple[Tensor, Any]:
        refuse_checkpointing(self._label)
        if not torch.is_grad_enabled():
            return NO_TAPE.watch(output)
        call = OpenCall((), {}, keeper=self._keeper)
        return call.watch(output), call

    def use(self, weight: str, bias: str | None, x: Tensor, seen: Any) -> None:
        if seen is not None:
            args = (x,) if self._keeper is None else self._keeper.inputs((x,))
            call = OpenCall(args, {}, seen, keeper=self._keeper)
            self._calls.append(call)
            self._uses.append((weight, bias, call))

    def close(self) -> list[Use]:
        return [Use(w, b, c.close(self._label)) for w, b, c in self._uses if c.reached]


class OpenCall:
    """A call whose output gradients are still to come, or come to another one.

    Args:
        args: positional arguments of the layer, as they are kept, or how one of them
            is made again.
        kwargs: keyword arguments, likewise.
        same: the call that output gradients come to, if not this one.
        settle: called when a gradient has come, to see whether it can be used at once.
        keeper: rounds gradients that have to wait; None leaves them as they come.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        same: OpenCall | None = None,
        settle: Callable[[OpenCall], None] | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        self.io: LayerIO | None = None
        self._keeper = keeper
        self._settle = settle
        self.args = _detached_all(args)
        self.kwargs = _detached_all(kwargs)
        self._versions = [version(x) for x in self.tensors()]
        self._d: list[Tensor | None] = [] if same is None else same._d

    def tensors(self) -> list[Tensor]:
        """The inputs that it keeps."""
        if not self.kwargs and len(self.args) == 1 and isinstance(self.args[0], Tensor):
            return [self.args[0]]  # most layers; the general way is slower
        leaves, _ = tree_flatten((self.args, self.kwargs))
        return [x for x in leaves if isinstance(x, Tensor)]

    def watch(self, leaf: Any) -> Any:
        """Make an output tensor report its gradient."""
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        if not leaf.requires_grad:
            # Everything upstream is detached; the graph has to start here.
            anchor = torch.zeros((), device=leaf.device, requires_grad=True)
            fresh = leaf.clone() if leaf._is_view() else leaf
            leaf = _Root.apply(fresh, anchor)  # type: ignore[no-untyped-call]
        slot = len(self._d)
        self._d.append(None)

        def store(grad: Tensor) -> None:
            if self._d[slot] is not None or self.io is not None:
                raise LoopError(
                    "backward ran twice through one forward pass",
                    "call backward once for each batch of the loader",
                )
            self._d[slot] = grad.detach()
            self._remake()
            if self._settle is not None:
                self._settle(self)
            self.shorten()

        leaf.register_hook(store)
        return leaf

    def _remake(self) -> None:
        """Make the inputs again that were not kept."""
        if any(isinstance(x, Remade) for x in self.args):
            made = [x.opened() if isinstance(x, Remade) else x for x in self.args]
            self.args = tuple(made)
            self._versions = [version(x) for x in self.tensors()]

    def shorten(self) -> None:
        """Keep gradients rounded, if that is asked for and they are still here."""
        if self._keeper is not None:
            self._d[:] = [self._keeper.short(d) for d in self._d]

    @property
    def reached(self) -> bool:
        return self.io is not None or any(d is not None for d in self._d)

    def is_sound(self, batch_size: int) -> bool:
        """Whether its input begins with the batch and is what the layer used."""
        tensors = self.tensors()
        whole = bool(tensors) and tensors[0].shape[:1] == (batch_size,)
        return whole and self._unmodified()

    def _unmodified(self) -> bool:
        return [version(x) for x in self.tensors()] == self._versions

    def settle(self, io: LayerIO) -> None:
        """Let inputs and output gradients go; ``io`` says all that is needed."""
        self.io = io
        self.args, self.kwargs, self._versions = (), {}, []
        self._d = [None] * len(self._d)

    def close(self, label: str) -> Call:
        if not self._unmodified():
            raise LoopError(
                f"an input of layer {label!r} was modified in place after the layer "
                "used it, so its gradient can no longer be computed",
                "use the out-of-place form of the operation that follows",
            )
        lean = self._keeper is not None
        return Call(self.args, self.kwargs, tuple(self._d), lean)


class _Root(torch.autograd.Function):
    """Lets a graph begin at a tensor whose producers are all detached."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


def _detached_all(values: Any) -> Any:
    if not values:
        return values
    if len(values) == 1 and isinstance(values, tuple) and type(values[0]) is Tensor:
        return (values[0].detach(),)  # most layers; the general way is slower
    return tree_map(_detached, values)


def _detached(x: Any) -> Any:
    return one_of(x).detach() if isinstance(x, Tensor) else x
