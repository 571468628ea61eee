"""A server for every site, found by watching the model on synthetic inputs.

Every module is observed first: what arguments does the model give it, and which of them
have a batch dimension? With a rule, that says whether it is called once for all
examples. Without one, the cheap way (expanded copies) is tried on exactly these
arguments, then the general one (vmap over the whole subtree): see
:mod:`curvedp.layers.unruled`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from curvedp.errors import CoverageError
from curvedp.layers.capture import Recording
from curvedp.layers.covered import Covered
from curvedp.layers.direct import (
    Expanded,
    RuleServer,
    VmapServer,
    float_tensors,
)
from curvedp.layers.functional import call_with
from curvedp.layers.refuse import refuse_call
from curvedp.layers.rewrite import NO_TAPE, Rewrite, RewrittenServer, forwards
from curvedp.layers.rules import Rule, Site
from curvedp.layers.spectral import spectral_norms_at_rest
from curvedp.layers.synthetic import Synthesiser, as_call
from curvedp.layers.tolerance import close
from curvedp.layers.unruled import Observed, serve

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


def _observe(
    model: nn.Module,
    sites: list[Site],
    synthesise: Synthesiser,
    parameters: dict[str, Tensor],
    seed: int,
) -> dict[str, Observed]:
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
        observed[site.name] = Observed(
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


def _refuse_uncalled(site: Site, observed: Observed) -> None:
    if not observed.calls:
        raise CoverageError(
            f"layer {site.label!r} is never called in the forward pass, so "
            f"{_listed(site)} would only ever receive noise",
            "freeze it (requires_grad_(False)), remove it, or use it",
        )


def _served_elsewhere(
    site: Site, sites: list[Site], observed: dict[str, Observed]
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
    observed: Observed,
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
    observed: Observed,
    parameters: dict[str, Tensor],
    seed: int,
) -> Covered:
    _refuse_uncalled(site, observed)
    module = model.get_submodule(site.name)
    whole = subtree_site(module, site.name, model)
    values = {own: parameters[full] for own, full in whole.parameters.items()}
    reason = "no way to its per-example gradients passed the check"
    try:
        with spectral_norms_at_rest(module):
            found = serve(module, site, whole, values, observed, seed)
        if found is not None:
            return found
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
