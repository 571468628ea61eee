"""Parameters without a rule: expanded copies or vmap, whichever passes a trial.

Both are tried on the arguments that the model gives the module, with a random
projection of its outputs for a loss, and compared with one-at-a-time autograd.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvedp.layers.covered import Covered
from curvedp.layers.direct import Expanded, ExpandedServer, VmapServer, float_tensors
from curvedp.layers.functional import call_with
from curvedp.layers.rules import Call, Site
from curvedp.layers.tolerance import close

__all__ = ["Observed", "serve"]


@dataclass(frozen=True)
class Observed:
    """Arguments of a module's calls on a synthetic batch, and which are per example."""

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    batched: tuple[bool, ...]
    batch_size: int
    shared: Expanded | None
    shared_dims: int


def serve(
    module: nn.Module,
    site: Site,
    whole: Site,
    values: dict[str, Tensor],
    observed: Observed,
    seed: int,
) -> Covered | None:
    """Expanded copies if every parameter allows them, otherwise the whole subtree.

    Args:
        module: it is run on its own.
        site: the parameters that it holds itself.
        whole: all parameters inside of it.
        values: of those, by the module's own names.
        observed: what the model gives it.
        seed: of the projection.

    Returns None if neither passed; the module's own errors come through.
    """
    reference = _reference(module, values, observed, seed)
    if site.kind != "vmap":
        layouts = {}
        for own in site.parameters:
            layout = _find_layout(module, own, values, observed, reference, seed)
            if layout is None:
                break
            layouts[own] = layout
        else:
            kept = Site(site.name, site.parameters, "expanded")
            return Covered(kept, ExpandedServer(layouts))
    if _vmap_agrees(module, values, observed, reference):
        return Covered(whole, VmapServer(observed.batched))
    return None


def _find_layout(
    module: nn.Module,
    own: str,
    values: dict[str, Tensor],
    observed: Observed,
    reference: _Reference,
    seed: int,
) -> Expanded | None:
    expected = reference.grads[own]
    if expected is None:
        raise ValueError(f"its output does not depend on {own!r}")
    for layout in Expanded.layouts(values[own]):
        leaf = layout.copies(values[own], observed.batch_size)
        try:
            with warnings.catch_warnings():
                # torch's of a layout that does not fit (`.T` of three dimensions) are
                # about our trial, not about the user's model
                warnings.simplefilter("ignore")
                outputs = _run(module, {**values, own: leaf}, observed, seed)
            projected = _project(outputs, observed.batch_size, seed)
            if projected.shape != reference.losses.shape:
                continue
            (g,) = torch.autograd.grad(projected.sum(), leaf)
        except (RuntimeError, IndexError, ValueError, AssertionError):
            continue  # this layout does not broadcast as the module uses it
        g = g.reshape(observed.batch_size, *values[own].shape)
        same = close(g, expected, reference.scale)
        if same and close(projected, reference.losses):
            return layout
    return None


def _vmap_agrees(
    module: nn.Module,
    values: dict[str, Tensor],
    observed: Observed,
    reference: _Reference,
) -> bool:
    calls = [
        Call(args, kwargs, d)
        for (args, kwargs), d in zip(observed.calls, reference.d, strict=True)
    ]
    alone = Site("", {own: own for own in values}, "vmap")
    io = VmapServer(observed.batched).layer_io(alone, module, calls, values)
    grads = io.per_example()
    for own, expected in reference.grads.items():
        g = grads[own]
        expected = torch.zeros_like(g) if expected is None else expected
        if not close(g, expected, reference.scale):
            return False
    return True


@dataclass(frozen=True)
class _Reference:
    """Losses and per-example gradients by autograd.

    Attributes:
        losses: a random projection of the outputs, ``[B]``.
        grads: by own name; None where the outputs do not depend on the parameter.
        scale: norm of all of them together.
        d: for each call, the directions of the projection.
    """

    losses: Tensor
    grads: dict[str, Tensor | None]
    scale: float
    d: list[tuple[Tensor, ...]]


def _reference(
    module: nn.Module,
    values: dict[str, Tensor],
    observed: Observed,
    seed: int,
) -> _Reference:
    leaves = {n: p.detach().clone().requires_grad_() for n, p in values.items()}
    per_call = _run(module, leaves, observed, seed)
    losses = _project(per_call, observed.batch_size, seed)
    if not losses.requires_grad:
        unused = ", ".join(map(repr, values))
        raise ValueError(f"its output does not depend on {unused}")
    rows = [
        torch.autograd.grad(
            losses[i], list(leaves.values()), retain_graph=True, allow_unused=True
        )
        for i in range(observed.batch_size)
    ]
    grads: dict[str, Tensor | None] = {}
    for k, (n, p) in enumerate(leaves.items()):
        own = [torch.zeros_like(p) if r[k] is None else r[k] for r in rows]
        used = any(r[k] is not None for r in rows)
        grads[n] = torch.stack(own) if used else None
    lengths = [float(g.double().norm()) for g in grads.values() if g is not None]
    d = [tuple(_directions(outputs, seed)) for outputs in per_call]
    return _Reference(losses.detach(), grads, math.hypot(*lengths), d)


def _run(
    module: nn.Module, values: dict[str, Tensor], observed: Observed, seed: int
) -> list[list[Tensor]]:
    torch.manual_seed(seed)  # the same dropout masks in every run
    return [
        float_tensors(call_with(module, values, args, kwargs))
        for args, kwargs in observed.calls
    ]


def _directions(outputs: list[Tensor], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed + 1)
    return [
        torch.randn(t.shape, generator=generator).to(t.device, t.dtype) for t in outputs
    ]


def _project(per_call: list[list[Tensor]], batch_size: int, seed: int) -> Tensor:
    losses: Tensor | None = None
    for outputs in per_call:
        for t, r in zip(outputs, _directions(outputs, seed), strict=True):
            part = (t * r).reshape(batch_size, -1).sum(1)
            losses = part if losses is None else losses + part
    if losses is None:
        raise ValueError("it returns no tensor")
    return losses
