"""Fused modules: during the forward pass, another forward that says the same in parts.

A recurrent layer multiplies with its weights inside one opaque operator, where their
outputs cannot be watched. A :class:`Rewrite` computes the same from linear maps, tells
a :class:`Tape` which input each weight met, and every weight becomes a linear layer:
``g_i = sum_t d_t a_t^T``. The module's own ``forward`` is back as soon as the forward
pass has ended, however it ended; parameters and their names are the module's own.

Coverage compares both forwards on synthetic inputs before it relies on one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from curvedp.layers.io import LayerIO
from curvedp.layers.joined import joined
from curvedp.layers.linear import LinearGeometry
from curvedp.layers.rules import Call, Site, dense

__all__ = ["NO_TAPE", "Rewrite", "RewrittenServer", "Tape", "Use", "forwards"]


class Tape(Protocol):
    """Where a rewritten forward says which inputs met which weights."""

    def watch(self, output: Tensor) -> tuple[Tensor, Any]:
        """The output to go on with, and a token for its gradient ``d``."""

    def use(self, weight: str, bias: str | None, x: Tensor, seen: Any) -> None:
        """``x [B, ..., p]`` met the weight and gave the output that was ``seen``.

        Args:
            weight: the parameter's own name, of shape ``[r, p]``.
            bias: own name of a bias ``[r]`` that the output contains, or None.
            x: the input.
            seen: the token from ``watch``; its output has shape ``[B, ..., r]``.
        """


class _NoTape:
    """Nobody listens: the rewritten forward as plain arithmetic."""

    def watch(self, output: Tensor) -> tuple[Tensor, Any]:
        return output, None

    def use(self, weight: str, bias: str | None, x: Tensor, seen: Any) -> None:
        pass


NO_TAPE: Tape = _NoTape()


@dataclass(frozen=True)
class Rewrite:
    """Another forward for a module type.

    Attributes:
        forward: ``(module, tape, label, *args, **kwargs) -> output``; the label names
            the module in refusals.
    """

    forward: Callable[..., Any]


@dataclass(frozen=True, repr=False)
class Use:
    """A weight's inputs and output gradients in one recorded pass. Private."""

    weight: str
    bias: str | None
    call: Call


@dataclass(frozen=True)
class RewrittenServer:
    """Serves a module through its rewritten forward."""

    rewrite: Rewrite

    def bound(self, module: nn.Module, site: Site, tape: Tape) -> Callable[..., Any]:
        """The forward to put in the place of the module's own."""
        return partial(self.rewrite.forward, module, tape, site.label)

    def layer_io(self, site: Site, module: nn.Module, uses: Sequence[Use]) -> LayerIO:
        """A dense part for each weight, the uses of one weight joined."""
        calls: dict[tuple[str, str | None], list[Call]] = {}
        for use in uses:
            calls.setdefault((use.weight, use.bias), []).append(use.call)
        parts = []
        for (weight, bias), own in calls.items():
            full = {"weight": site.parameters.get(weight)}
            full["bias"] = site.parameters.get(bias) if bias else None
            trained = {kind: name for kind, name in full.items() if name is not None}
            if trained:
                shape = module.get_parameter(weight).shape
                part = Site(site.name, trained, site.kind)
                parts.append(dense(part, LinearGeometry(shape), own))
        return joined(site.name, parts)


@contextmanager
def forwards(replacements: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Other forwards for some modules, for the length of a forward pass."""
    before = {m: m.__dict__.get("forward") for m in replacements}
    try:
        for module, forward in replacements.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, own in before.items():
            module.__dict__.pop("forward", None)
            if own is not None:
                module.__dict__["forward"] = own
