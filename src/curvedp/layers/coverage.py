"""Coverage: every trainable parameter has a verified way to its per-example gradients.

:func:`cover` walks the model, refuses what cannot be made private by name and with the
replacement to use, gives every remaining parameter a server (a rule, expanded copies,
or vmap), and then *checks* the result on synthetic inputs: see
:mod:`curvedp.layers.verify`. Nothing here touches private data.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from curvedp.errors import CouplingError, CoverageError
from curvedp.layers.direct import Covered
from curvedp.layers.resolve import resolve, subtree_site
from curvedp.layers.rules import Rule, Site, find_rule
from curvedp.layers.synthetic import Synthesiser
from curvedp.layers.verify import PerExampleLoss, perturbed_parameters, verify

__all__ = ["Coverage", "PerExampleLoss", "cover"]


@dataclass(frozen=True)
class Coverage:
    """The verified sites of a model. Public: it holds names, no data.

    Attributes:
        covered: sites in the order of the model's modules.
    """

    covered: tuple[Covered, ...]

    @property
    def parameters(self) -> list[str]:
        """Full names of all parameters that are trained privately."""
        return [f for item in self.covered for f in item.site.parameters.values()]

    def explain(self) -> str:
        """A line per site: name, what serves it, its parameters."""
        rows = [
            (i.site.label, i.site.kind, ", ".join(i.site.parameters))
            for i in self.covered
        ]
        widths = [max(len(r[k]) for r in rows) for k in range(2)]
        return "\n".join(f"{n:<{widths[0]}}  {k:<{widths[1]}}  {p}" for n, k, p in rows)


def cover(
    model: nn.Module,
    synthesise: Synthesiser,
    loss: PerExampleLoss | None = None,
    *,
    seed: int = 0,
) -> Coverage:
    """Find a server for every trainable parameter and verify all of them.

    Args:
        model: any module; it is left as it was.
        synthesise: makes synthetic batches of the model's shapes.
        loss: per-example loss; without it the model alone is checked, and the loss of
            the user's loop is taken on trust.
        seed: of the synthetic draws.

    Raises:
        CoverageError: a parameter without a server, by name.
        CouplingError: a layer, buffer or loss that mixes examples.
    """
    refuse_structure(model)
    scanned = list(_scan(model))
    ruled = [(site, rule) for site, rule in scanned if rule is not None]
    unruled = [site for site, rule in scanned if rule is None]
    with _undisturbed(model):
        parameters = perturbed_parameters(model, seed)
        covered = resolve(model, ruled, unruled, synthesise, parameters, seed)
        verify(model, covered, synthesise, loss, parameters, seed)
    return Coverage(tuple(covered))


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Training mode for the checks; mode, buffers and random state come back after."""
    modes = {m: m.training for m in model.modules()}
    buffers = [(m, dict(m._buffers)) for m in modes]
    contents = [(b, b.clone()) for b in model.buffers()]
    devices = {p.device for p in model.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices=list(devices)):
        try:
            for module in modes:
                # a frozen BatchNorm was accepted because it is in evaluation mode
                if not isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.training = True
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode
            for module, own in buffers:  # one may have been replaced, or added
                module._buffers.clear()
                module._buffers.update(own)
            with torch.no_grad():
                for buffer, content in contents:
                    buffer.copy_(content)


def refuse_structure(model: nn.Module) -> None:
    """Refuse what is known not to work, before any pass."""
    owners: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if p.requires_grad:
            owners.setdefault(id(p), []).append(name)
    if not owners:
        raise CoverageError(
            "the model has no trainable parameter",
            "set requires_grad=True on what you want to train",
        )
    for names in owners.values():
        if len(names) > 1:
            raise CoverageError(
                f"one parameter is shared by {' and '.join(map(repr, names))}: the "
                "contributions of both uses would have to be clipped together",
                "give each use its own parameter (untie the weights), or freeze it",
            )
    for name, module in model.named_modules():
        _refuse_module(name or "(the model itself)", module)


def _refuse_module(name: str, module: nn.Module) -> None:
    kind = type(module).__name__
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        trainable = any(p.requires_grad for p in module.parameters())
        if module.training or trainable:
            raise CouplingError(
                f"layer {name!r} ({kind}) computes statistics over the batch, which "
                "mixes examples",
                f"replace it by nn.GroupNorm(min(32, {module.num_features}), "
                f"{module.num_features}), or freeze its parameters and call .eval() "
                "on it to use the public statistics it came with",
            )
    if isinstance(module, nn.modules.instancenorm._InstanceNorm) and (
        module.track_running_stats
    ):
        raise CouplingError(
            f"layer {name!r} ({kind}) keeps running statistics of private data",
            "build it with track_running_stats=False",
        )
    if isinstance(module, nn.Embedding) and (
        module.max_norm is not None or module.scale_grad_by_freq
    ):
        raise CouplingError(
            f"layer {name!r} ({kind}) uses max_norm or scale_grad_by_freq, which "
            "depend on the whole batch",
            "build it without them",
        )


def _scan(module: nn.Module, prefix: str = "") -> Iterator[tuple[Site, Rule | None]]:
    """Sites with the rule that serves them, or None where none does."""
    own = {n: p for n, p in module.named_parameters(recurse=False) if p.requires_grad}
    children = list(module.named_children())
    if own or hasattr(module, "parametrizations"):
        rule = find_rule(module)
        kind = type(module).__name__
        if hasattr(module, "parametrizations"):
            yield subtree_site(module, prefix), None
            return
        names = {n: _join(prefix, n) for n in own}
        yield Site(prefix, names, kind if rule else ""), rule
        if rule is not None:
            return
    for name, child in children:
        yield from _scan(child, _join(prefix, name))


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
