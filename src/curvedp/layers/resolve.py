"""Servers for parameters without a rule, found by trying on synthetic inputs.

A module that holds parameters of its own and has no rule is observed first: what
arguments does the model give it, and which of them have a batch dimension? Then the
cheap way (expanded copies) is tried on exactly these arguments and compared with
one-at-a-time autograd, then the general one (vmap over the whole subtree).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from curvedp.errors import CoverageError
from curvedp.layers.capture import Recording
from curvedp.layers.compare import close
from curvedp.layers.covered import Covered
from curvedp.layers.direct import (
    Expanded,
    ExpandedServer,
    RuleServer,
    VmapServer,
    float_tensors,
)
from curvedp.layers.functional import call_with
from curvedp.layers.refuse import refuse_call
from curvedp.layers.rewrite import NO_TAPE, Rewrite, RewrittenServer, forwards
from curvedp.layers.rules import Call, Rule, Site
from curvedp.layers.synthetic import Synthesiser, as_call

__all__ = ["first_names", "resolve", "subtree_site"]


def subtree_site(module: nn.Module, prefix: str, model: nn.Module) -> Site:
    """A site for a module taken as a whole, with every trainable parameter inside."""
    first = first_names(model)
    names = {n: first[p] for n, p in module.named_parameters() if p.requires_grad}
    return Site(prefix, names, "vmap")


def first_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Every parameter's name: of those that a tied one has, the first."""
    return {p: name for name, p in model.named_parameters()}


def resolve(
    model: nn.Module,
    ruled: list[tuple[Site, Rule | Rewrite]],
    unruled: list[Site],
    synthesise: Synthesiser,
    parameters: dict[str, Tensor],
    seed: int,
) -> list[Covered]:
    """Give every site its server; sites inside a vmapped one fall to it."""
    sites = [site for site, _ in ruled] + unruled
    observed = _observe(model, sites, synthesise, parameters, seed)
    for site in sites:
        for args, kwargs in observed[site.name].calls:
            refuse_call(site.label, model.get_submodule(site.name), args, kwargs)
    covered: list[Covered] = []
    for site in unruled:
        if not any(_inside(site.name, c.site) for c in covered if _is_whole(c)):
            found = _serve(model, site, observed[site.name], parameters, seed)
            covered.append(found)
    wholes = [c.site for c in covered if _is_whole(c)]
    for site, rule in ruled:
        if not any(_inside(site.name, whole) for whole in wholes):
            seen = observed[site.name]
            if not seen.calls and _served_elsewhere(site, sites, observed):
                continue  # tied to a layer that is called
            _refuse_uncalled(site, seen)
            if isinstance(rule, Rewrite):
                _check_rewrite(model, site, rule, seen, parameters)
                covered.append(Covered(site, RewrittenServer(rule)))
                continue
            server = RuleServer(rule, seen.shared, seen.shared_dims)
            covered.append(Covered(site, server))
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    return sorted(covered, key=lambda c: order[c.site.name])


def _is_whole(item: Covered) -> bool:
    return isinstance(item.server, VmapServer)


def _inside(name: str, site: Site) -> bool:
    return not site.name or name == site.name or name.startswith(site.name + ".")


@dataclass(frozen=True)
class _Observed:
    """Arguments of a module's calls on a synthetic batch, and which are per example."""

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    batched: tuple[bool, ...]
    batch_size: int
    shared: Expanded | None
    shared_dims: int


def _observe(
    model: nn.Module,
    sites: list[Site],
    synthesise: Synthesiser,
    parameters: dict[str, Tensor],
    seed: int,
) -> dict[str, _Observed]:
    """Run two batches of different size and see what each module is given."""
    watch = [Covered(site, VmapServer(())) for site in sites]
    runs = []
    for size in (3, 2):
        generator = torch.Generator().manual_seed(seed)
        recording = Recording(model, watch, size)
        batch = synthesise(size, generator)
        recording.forward(*as_call(batch.inputs), parameters)
        runs.append(recording.arguments())
    observed = {}
    for site in sites:
        large, small = runs[0][site.name], runs[1][site.name]
        pairs = []
        if large:
            leaves = [tree_flatten(call)[0] for call in (large[0], small[0])]
            pairs = list(zip(*leaves, strict=True))
        observed[site.name] = _Observed(
            calls=large,
            batched=tuple(_first_size(x, y) == (3, 2) for x, y in pairs),
            batch_size=3,
            shared=_shared_layout(pairs),
            shared_dims=next((x.dim() for x, _ in pairs if isinstance(x, Tensor)), 0),
        )
    return observed


def _first_size(x: Any, y: Any) -> tuple[int, ...]:
    return (*x.shape[:1], *y.shape[:1]) if isinstance(x, Tensor) else ()


def _shared_layout(pairs: list[tuple[Any, Any]]) -> Expanded | None:
    """How a module's arguments are shared by all examples, if they are."""
    tensors = [(x, y) for x, y in pairs if isinstance(x, Tensor)]
    if not tensors or any(x.shape != y.shape for x, y in tensors):
        return None
    return Expanded(leading=all(x.dim() > 0 and len(x) == 1 for x, _ in tensors))


def _refuse_uncalled(site: Site, observed: _Observed) -> None:
    if not observed.calls:
        raise CoverageError(
            f"layer {site.label!r} is never called in the forward pass, so "
            f"{_listed(site)} would only ever receive noise",
            "freeze it (requires_grad_(False)), remove it, or use it",
        )


def _served_elsewhere(
    site: Site, sites: list[Site], observed: dict[str, _Observed]
) -> bool:
    """Whether all parameters belong to other sites too, which are called."""
    names: set[str] = set()
    for other in sites:
        if other is not site and observed[other.name].calls:
            names.update(other.parameters.values())
    return names.issuperset(site.parameters.values())


def _check_rewrite(
    model: nn.Module,
    site: Site,
    rewrite: Rewrite,
    observed: _Observed,
    parameters: dict[str, Tensor],
) -> None:
    """The rewritten forward gives what the module's own gives, without dropout."""
    module = model.get_submodule(site.name)
    values = {own: parameters[full] for own, full in site.parameters.items()}
    forward = RewrittenServer(rewrite).bound(module, site, NO_TAPE)
    training = module.training
    module.training = False
    try:
        with torch.no_grad():
            for args, kwargs in observed.calls:
                own = call_with(module, values, args, kwargs)
                with forwards({module: forward}):
                    other = call_with(module, values, args, kwargs)
                pairs = zip(float_tensors(own), float_tensors(other), strict=True)
                if not all(close(x, y) for x, y in pairs):
                    raise CoverageError(
                        f"layer {site.label!r} ({type(module).__name__}) does not "
                        "compute what its type does",
                        "remove what changes its output (a hook, an attribute set "
                        "after it was built), or write it with nn.Linear",
                    )
    finally:
        module.training = training


def _serve(
    model: nn.Module,
    site: Site,
    observed: _Observed,
    parameters: dict[str, Tensor],
    seed: int,
) -> Covered:
    """Expanded copies if every parameter allows them, otherwise the whole subtree."""
    _refuse_uncalled(site, observed)
    module = model.get_submodule(site.name)
    whole = subtree_site(module, site.name, model)
    values = {own: parameters[full] for own, full in whole.parameters.items()}
    reason = "no way to its per-example gradients passed the check"
    try:
        if site.kind != "vmap":
            layouts = {}
            for own in site.parameters:
                layout = _find_layout(module, own, values, observed, seed)
                if layout is None:
                    break
                layouts[own] = layout
            else:
                kept = Site(site.name, site.parameters, "expanded")
                return Covered(kept, ExpandedServer(layouts))
        if _vmap_agrees(module, whole, values, observed, seed):
            return Covered(whole, VmapServer(observed.batched))
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
    raise CoverageError(
        f"no rule covers layer {site.label!r} ({type(module).__name__}) with "
        f"{_listed(whole)}: {reason}",
        "freeze these parameters, or write the layer with nn.Linear, nn.Conv*, "
        "nn.Embedding and norm layers; examples must stand at dimension 0",
    )


def _listed(site: Site) -> str:
    return ", ".join(repr(full) for full in site.parameters.values())


def _find_layout(
    module: nn.Module,
    own: str,
    values: dict[str, Tensor],
    observed: _Observed,
    seed: int,
) -> Expanded | None:
    reference = _reference(module, [own], values, observed, seed)
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
        if close(projected, reference.losses) and close(g, reference.grads[own]):
            return layout
    return None


def _vmap_agrees(
    module: nn.Module,
    site: Site,
    values: dict[str, Tensor],
    observed: _Observed,
    seed: int,
) -> bool:
    reference = _reference(module, list(values), values, observed, seed)
    calls = [
        Call(args, kwargs, d)
        for (args, kwargs), d in zip(observed.calls, reference.d, strict=True)
    ]
    alone = Site("", {own: own for own in values}, "vmap")
    io = VmapServer(observed.batched).layer_io(alone, module, calls, values)
    grads = io.per_example()
    return all(close(grads[own], reference.grads[own]) for own in values)


@dataclass(frozen=True)
class _Reference:
    losses: Tensor
    grads: dict[str, Tensor]
    d: list[tuple[Tensor, ...]]


def _reference(
    module: nn.Module,
    names: list[str],
    values: dict[str, Tensor],
    observed: _Observed,
    seed: int,
) -> _Reference:
    """Per-example gradients of a random projection of the module's outputs."""
    leaves = {n: values[n].detach().clone().requires_grad_() for n in names}
    per_call = _run(module, {**values, **leaves}, observed, seed)
    losses = _project(per_call, observed.batch_size, seed)
    if not losses.requires_grad:
        unused = ", ".join(map(repr, names))
        raise ValueError(f"its output does not depend on {unused}")
    rows = [
        torch.autograd.grad(
            losses[i], list(leaves.values()), retain_graph=True, allow_unused=True
        )
        for i in range(observed.batch_size)
    ]
    grads = {
        n: torch.stack([torch.zeros_like(p) if r[k] is None else r[k] for r in rows])
        for k, (n, p) in enumerate(leaves.items())
    }
    d = [tuple(_directions(outputs, seed)) for outputs in per_call]
    return _Reference(losses.detach(), grads, d)


def _run(
    module: nn.Module, values: dict[str, Tensor], observed: _Observed, seed: int
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
