"""Coverage: every trainable parameter has a verified way to its per-example gradients.

:func:`cover` walks the model, refuses what cannot be made private by name and with the
replacement to use, gives every remaining parameter a server (a rule, expanded copies,
or vmap), and then *checks* the result on synthetic inputs: see
:mod:`curvedp.layers.verify`. Nothing here touches private data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from curvedp.errors import CouplingError, CoverageError, CurvedpError
from curvedp.layers.anew import written_anew
from curvedp.layers.covered import Covered, tied_groups
from curvedp.layers.follow import followed
from curvedp.layers.footprint import activation_bytes
from curvedp.layers.held import Place
from curvedp.layers.recurrent import find_rewrite
from curvedp.layers.resolve import first_names, resolve, subtree_site
from curvedp.layers.rewrite import Rewrite
from curvedp.layers.rules import Rule, Site, find_rule
from curvedp.layers.state import State
from curvedp.layers.synthetic import Synthesiser
from curvedp.layers.verify import PerExampleLoss, perturbed_parameters, verify

__all__ = ["Coverage", "PerExampleLoss", "cover", "set_training_mode", "undisturbed"]


#: Wrappers that exchange gradients by hooks of their own. By name: most of them cannot
#: be imported where torch was built without them.
_OVER_DEVICES = {
    "DataParallel",
    "DistributedDataParallel",
    "FSDPModule",
    "FullyShardedDataParallel",
}


@dataclass(frozen=True)
class Coverage:
    """The verified sites of a model. Public: it holds names, no data.

    Attributes:
        covered: sites in the order of the model's modules.
        activation_bytes: what an example takes from the forward to the backward pass.
        written_anew: attributes that every forward pass writes, whatever was there.
    """

    covered: tuple[Covered, ...]
    activation_bytes: int = 0
    written_anew: frozenset[Place] = frozenset()

    @property
    def parameters(self) -> list[str]:
        """Full names of all parameters that are trained privately."""
        return [name for layer in self.layers for name in layer]

    @property
    def layers(self) -> list[list[str]]:
        """Parameters of every layer: of a site, or of sites that a tie connects."""
        return [
            list(dict.fromkeys(f for i in group for f in i.site.parameters.values()))
            for group in tied_groups(self.covered)
        ]

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
    with undisturbed(model) as state:
        anew = written_anew(model, synthesise, seed)
        parameters = perturbed_parameters(model, seed)
        covered = resolve(model, ruled, unruled, synthesise, parameters, seed)
        state.rewind()
        try:
            verify(model, covered, synthesise, loss, parameters, seed)
        except CurvedpError as refusal:
            other = followed(model, covered, synthesise, parameters, seed)
            if other is None:
                raise
            try:
                verify(model, other, synthesise, loss, parameters, seed)
            except CurvedpError:
                raise refusal from None
            covered = other
        held = activation_bytes(model, covered, synthesise, parameters, seed)
    return Coverage(tuple(covered), held, anew)


def set_training_mode(model: nn.Module, mode: bool = True) -> None:
    """``model.train(mode)``, as the model has it, but a frozen BatchNorm stays so.

    One in evaluation mode was accepted because it is in that mode.
    """
    norms = [
        module
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not module.training
    ]
    model.train(mode)
    for norm in norms:
        norm.training = False


@contextmanager
def undisturbed(model: nn.Module, *, train: bool = True) -> Iterator[State]:
    """Training mode for the checks; all that the model holds comes back after.

    Without ``train`` the model stays in the mode that it is in.
    """
    modes = {m: m.training for m in model.modules()}
    state = State(model)
    devices = {p.device for p in model.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices=list(devices)):
        try:
            if train:
                set_training_mode(model)
            state.open(weights=False)
            try:
                yield state
            finally:
                state.rewind()
        finally:
            if train and not modes[model]:
                model.train(False)
            for module, mode in modes.items():
                module.training = mode


def refuse_structure(model: nn.Module) -> None:
    """Refuse what is known not to work, before any pass."""
    if not any(p.requires_grad for p in model.parameters()):
        raise CoverageError(
            "the model has no trainable parameter",
            "set requires_grad=True on what you want to train",
        )
    for name, module in model.named_modules():
        _refuse_module(name or "(the model itself)", module)


def _refuse_module(name: str, module: nn.Module) -> None:
    kind = type(module).__name__
    wrappers = {c.__name__ for c in type(module).__mro__} & _OVER_DEVICES
    if wrappers:
        raise CoverageError(
            f"layer {name!r} is wrapped in {wrappers.pop()}, which spreads batches or "
            "weights over several devices, past what is clipped and noised here",
            "give the bare model (model.module) on one device; physical_batch_size "
            "bounds the memory that it takes",
        )
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        trainable = any(p.requires_grad for p in module.parameters())
        if module.training or trainable:
            raise CouplingError(
                f"layer {name!r} ({kind}) computes statistics over the batch, which "
                "mixes examples",
                f"replace it by {_replacement(module)}, or freeze its parameters and "
                "call .eval() on it to use the public statistics it came with",
            )
    if isinstance(module, nn.modules.instancenorm._InstanceNorm) and (
        module.track_running_stats
    ):
        raise CouplingError(
            f"layer {name!r} ({kind}) keeps running statistics of private data",
            "build it with track_running_stats=False",
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and (
        module.max_norm is not None or module.scale_grad_by_freq
    ):
        raise CouplingError(
            f"layer {name!r} ({kind}) uses max_norm or scale_grad_by_freq, which "
            "depend on the whole batch",
            "build it without them",
        )
    if isinstance(module, nn.MultiheadAttention) and module.dropout > 0:
        same = type(module).forward is nn.MultiheadAttention.forward
        if same and any(p.requires_grad for p in module.parameters()):
            raise CoverageError(
                f"layer {name!r} ({kind}) has dropout={module.dropout:g} inside its "
                "attention, where the masks cannot be drawn again for one example",
                f"set its dropout to 0 ({name}.dropout = 0.0; dropout layers outside "
                "of it may stay), or build the attention from nn.Linear layers",
            )


def _replacement(norm: nn.modules.batchnorm._BatchNorm) -> str:
    """The norm to use instead, with a number of groups that divides the channels."""
    channels = norm.num_features
    most = min(32, channels)
    groups = next(g for g in range(most, 0, -1) if channels % g == 0)
    number = f"min(32, {channels})" if groups == most else f"{groups}"
    grouped = f"nn.GroupNorm({number}, {channels})"
    if not isinstance(norm, nn.BatchNorm1d):
        return grouped
    # on [batch, channels] a group of one channel is constant
    return (
        f"nn.LayerNorm({channels}) if its inputs are [batch, {channels}], by "
        f"{grouped} if they have positions too"
    )


def _scan(model: nn.Module) -> Iterator[tuple[Site, Rule | Rewrite | None]]:
    """Sites with the rule that serves them, or None where none does.

    A module under several names is one site, under the first of them.
    """
    first = first_names(model)
    names = list(model.named_parameters(remove_duplicate=False))
    counts = Counter(p for _, p in names)
    done: set[nn.Module] = set()

    def visit(module: nn.Module, prefix: str) -> Iterator[Any]:
        if module in done:
            return
        done.add(module)
        if hasattr(module, "parametrizations"):
            done.update(module.modules())
            yield subtree_site(module, prefix, model), None
            return
        own = module.named_parameters(recurse=False, remove_duplicate=False)
        trained = {n: p for n, p in own if p.requires_grad}
        if trained:
            rule = find_rule(module) or find_rewrite(module)
            kind = type(module).__name__ if rule else ""
            if rule is None and any(counts[p] > 1 for p in trained.values()):
                kind = "vmap"  # copies of a tied parameter would reach other modules
            yield Site(prefix, {n: first[p] for n, p in trained.items()}, kind), rule
            if rule is not None:
                return
        for name, child in module.named_children():
            yield from visit(child, f"{prefix}.{name}" if prefix else name)

    yield from visit(model, "")
