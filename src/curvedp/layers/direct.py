"""Parameters without a rule: expanded per example, or differentiated by ``vmap``.

*Expanded.* A parameter that a module adds to or multiplies with its activations (a
class token, a position embedding, a layer scale) is replaced during the forward pass
by B equal copies of itself, one an example. The gradient of the copies is the
per-example gradient, at no extra pass. Where the batch dimension has to go depends on
how the module uses the parameter; coverage tries the layouts and keeps one that it has
verified.

*vmap.* Any other module is run again on each example alone and differentiated with
``torch.func``; ``vmap`` does all examples at once. It is exact for any module whose
examples do not mix and it costs one more forward and backward pass of that module.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from curvedp.layers.copies import Copies, Meetings
from curvedp.layers.functional import call_with
from curvedp.layers.io import DirectIO, LayerIO
from curvedp.layers.rules import Call, Rule, Site
from curvedp.layers.spectral import spectral_norms_at_rest

__all__ = [
    "Expanded",
    "ExpandedServer",
    "RuleServer",
    "VmapServer",
    "float_tensors",
]


@dataclass(frozen=True)
class Expanded:
    """Where the batch dimension of an expanded parameter goes.

    Attributes:
        leading: the parameter's first dimension has size 1 and becomes the batch.
        ones: otherwise, dimensions of size 1 between the batch and the parameter's own.
    """

    leading: bool
    ones: int = 0

    def copies(self, parameter: Tensor, batch_size: int) -> Tensor:
        """B equal copies as one leaf of the graph."""
        return self.repeat(parameter.detach(), batch_size).requires_grad_()

    def repeat(self, x: Tensor, batch_size: int) -> Tensor:
        """B equal copies as a view."""
        if not self.leading:
            x = x.reshape(*([1] * (1 + self.ones)), *x.shape)
        return x.expand(batch_size, *x.shape[1:])

    def repeated(self, x: Any, batch_size: int) -> Any:
        """What a module was given, or gave, without a batch: a copy an example."""
        if isinstance(x, Copies):  # from a module before this one
            return x.hidden[:, 0] if self.leading else x.hidden
        return self.repeat(x, batch_size) if isinstance(x, Tensor) else x

    def hidden(self, x: Any, meetings: Meetings) -> Any:
        """The repeated output as the model expects it: in the shape it had before."""
        if not isinstance(x, Tensor):
            return x
        if len(x) == 1:  # the only example has the only copy
            return x if self.leading else x[0]
        return Copies.of(x.unsqueeze(1) if self.leading else x, meetings)

    @staticmethod
    def layouts(parameter: Tensor) -> list[Expanded]:
        """All layouts worth trying, the likeliest first."""
        lead = parameter.dim() > 0 and parameter.shape[0] == 1
        return ([Expanded(True)] if lead else []) + [
            Expanded(False, n) for n in range(4)
        ]


@dataclass(frozen=True)
class RuleServer:
    """Serves a site by the rule for its module type.

    Attributes:
        rule: the rule.
        shared: set where the module is called without a batch dimension and its output
            is broadcast over the examples (``position_embedding(torch.arange(T))``):
            how input and output are copied for each example.
        shared_dims: dimensions of such an input. One with more has its batch already,
            from a module before this one whose output was copied.
        meetings: set where the copies of the output are followed, because the model
            does more with it than broadcasting.
    """

    rule: Rule
    shared: Expanded | None = None
    shared_dims: int = 0
    meetings: Meetings | None = None

    def layer_io(
        self,
        site: Site,
        module: nn.Module,
        calls: Sequence[Call],
        values: Mapping[str, Tensor],
    ) -> LayerIO:
        """The rule's LayerIO of the recorded calls; weights are not needed."""
        return self.rule(site, module, calls)


@dataclass(frozen=True)
class ExpandedServer:
    """Serves parameters that a module uses directly; by own name, their layouts."""

    layouts: Mapping[str, Expanded]

    def layer_io(self, site: Site, leaves: Mapping[str, Tensor]) -> LayerIO:
        """Read the copies' gradients. ``leaves``: full name to copies."""
        grads = {}
        for own, full in site.parameters.items():
            leaf = leaves[full]
            g = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            layout = self.layouts[own]
            if not layout.leading:
                g = g.reshape(g.shape[0], *g.shape[1 + layout.ones :])
            else:
                g = g.unsqueeze(1)
            grads[full] = g
        return DirectIO(site.name, grads)


@dataclass(frozen=True)
class VmapServer:
    """Serves a whole module, children included, by per-example differentiation.

    Attributes:
        batched: which of the flattened arguments have a batch dimension.
    """

    batched: tuple[bool, ...]

    def layer_io(
        self,
        site: Site,
        module: nn.Module,
        calls: Sequence[Call],
        values: Mapping[str, Tensor],
    ) -> LayerIO:
        """Differentiate the recorded calls again, an example at a time.

        ``values``: by full name, the parameters that the forward pass used.
        """
        trainable = {own: values[full] for own, full in site.parameters.items()}
        total: dict[str, Tensor] = {}
        for call in calls:
            if all(d is None for d in call.d):
                continue
            grads = self._per_example(module, trainable, call)
            for own, full in site.parameters.items():
                g = grads[own]
                total[full] = g if full not in total else total[full] + g
        return DirectIO(site.name, total)

    def _per_example(
        self, module: nn.Module, trainable: dict[str, Tensor], call: Call
    ) -> dict[str, Tensor]:
        leaves, spec = tree_flatten((call.args, call.kwargs))
        dtype = next(iter(trainable.values())).dtype
        leaves = [_cast(leaf, dtype) for leaf in leaves]
        used = [i for i, d in enumerate(call.d) if d is not None]
        cotangents = tuple(_cast(call.d[i], dtype) for i in used)

        def one(example: list[Any], d: tuple[Tensor, ...]) -> dict[str, Tensor]:
            own = [
                leaf.unsqueeze(0) if batched else leaf
                for leaf, batched in zip(example, self.batched, strict=True)
            ]
            args, kwargs = tree_unflatten(own, spec)

            def run(parameters: dict[str, Tensor]) -> tuple[Tensor, ...]:
                output = call_with(module, parameters, args, kwargs)
                tensors = float_tensors(output)
                return tuple(tensors[i].squeeze(0) for i in used)

            pull = vjp(run, trainable)[1]
            return dict(pull(d)[0])

        dims = [0 if batched else None for batched in self.batched]
        mapped = vmap(one, in_dims=(dims, 0), randomness="different")
        with warnings.catch_warnings(), spectral_norms_at_rest(module):
            # torch warns of operators that it maps one example at a time; that is
            # slower and just as exact
            warnings.filterwarnings("ignore", message=".*batching rule.*")
            result: dict[str, Tensor] = mapped(leaves, cotangents)
        return result


def float_tensors(output: Any) -> list[Tensor]:
    """The floating-point tensors of any output structure, in a fixed order."""
    leaves, _ = tree_flatten(output)
    return [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        return leaf.to(dtype)
    return leaf
