"""One forward and one backward pass that leave every layer's inputs and gradients.

Weights enter the forward pass detached, so autograd computes the gradients of layer
*outputs* and never a weight gradient: those would be summed over the batch, which is
of no use here, and cost a third of the step. Hooks stand on the modules during the
forward pass only and are always removed; nothing is hung on modules or tensors.

    recording = Recording(model, covered, batch_size)
    output = recording.forward((x,), {})
    per_example_losses(output).sum().backward()
    ios = recording.layer_ios()
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from curvedp.errors import CouplingError
from curvedp.layers.calls import CallTape, OpenCall
from curvedp.layers.copies import Copies
from curvedp.layers.covered import Covered, tied_groups
from curvedp.layers.dense import DenseIO
from curvedp.layers.direct import ExpandedServer, RuleServer, VmapServer
from curvedp.layers.functional import call_with
from curvedp.layers.io import DirectIO, LayerIO, UnreachedIO
from curvedp.layers.joined import joined
from curvedp.layers.kept import Keeper
from curvedp.layers.lean import lean_forward
from curvedp.layers.precision import exact
from curvedp.layers.refuse import refuse_checkpointing
from curvedp.layers.remade import Remaker
from curvedp.layers.rewrite import RewrittenServer, forwards
from curvedp.layers.rules import Call

__all__ = ["Recording"]

#: Modules of one product: autocast computes it in bfloat16, of rounded inputs.
_PRODUCTS = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
)


class Recording:
    """A single pass. Private from ``forward`` on; drop it after ``layer_ios``.

    Args:
        model: the user's model; it is not changed.
        covered: its sites, from :func:`curvedp.layers.coverage.cover`.
        batch_size: B, the physical batch size, which every layer must see first.
        keep_inputs: keep every layer's inputs and output gradients, or those of some
            sites by name. Otherwise those of a layer whose per-example gradients are
            smaller go as soon as the backward pass brings them, and the gradients stay.
        keeper: keeps what has to wait in bfloat16; a new one for every pass.
        remaker: lets go what is cheap to compute again, likewise; not beside a keeper.
    """

    def __init__(
        self,
        model: nn.Module,
        covered: Sequence[Covered],
        batch_size: int,
        *,
        keep_inputs: bool | Collection[str] = False,
        keeper: Keeper | None = None,
        remaker: Remaker | None = None,
    ) -> None:
        self._model = model
        self._keep_inputs = keep_inputs
        self._keeper = keeper
        self._remaker = remaker if keeper is None else None
        self._covered = covered
        self._groups = tied_groups(covered)
        self._tied = {i.site.name for g in self._groups for i in g if len(g) > 1}
        self._batch_size = batch_size
        self._calls: dict[str, list[OpenCall]] = {}
        self._tapes: dict[str, CallTape] = {}
        self._leaves: dict[str, Tensor] = {}
        self._values: dict[str, Tensor] = {}
        self._device = torch.device("cpu")

    def forward(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parameters: Mapping[str, Tensor] | None = None,
    ) -> Any:
        """Run ``model(*args, **kwargs)``; ``parameters`` replace its own values."""
        values: dict[str, Tensor] = dict(self._model.named_parameters())
        values.update(parameters or {})
        self._device = next(iter(values.values())).device
        swapped = self._values
        handles = []
        rewritten: dict[nn.Module, Callable[..., Any]] = {}
        try:
            for item in self._covered:
                site = item.site
                for full in site.parameters.values():
                    swapped[full] = values[full].detach()
                if isinstance(item.server, ExpandedServer):
                    for own, full in site.parameters.items():
                        layout = item.server.layouts[own]
                        leaf = layout.copies(values[full], self._batch_size)
                        swapped[full] = self._leaves[full] = leaf
                    continue
                module = self._model.get_submodule(site.name)
                if isinstance(item.server, RewrittenServer):
                    calls = self._calls.setdefault(site.name, [])
                    tape = self._tapes[site.name] = CallTape(
                        calls, site.label, self._keeper
                    )
                    rewritten[module] = item.server.bound(module, site, tape)
                else:
                    lean = self._keeper if isinstance(item.server, RuleServer) else None
                    rewritten |= {} if lean is None else lean_forward(module, lean)
                    hook = self._hook(item)
                    handles.append(module.register_forward_hook(hook, with_kwargs=True))
            for full, value in (parameters or {}).items():
                swapped.setdefault(full, value)
            with forwards(rewritten), self._keeping(values, args, kwargs):
                output = call_with(self._model, swapped, args, kwargs)
        finally:
            for handle in handles:
                handle.remove()
            if self._remaker is not None:
                self._remaker.after_forward()
        _refuse_copies(output)
        return output

    def _keeping(self, values: Mapping[str, Tensor], *given: Any) -> Any:
        """Around the forward pass: what it saves goes to the keeper or remaker."""
        if self._remaker is not None:
            return self._remaker.during_forward()
        if self._keeper is None:
            return nullcontext()
        self._keeper.leave([*values.values(), *self._model.buffers()])
        self._keeper.leave(tree_flatten(given)[0])
        return self._keeper.during_forward()

    def _keeps(self, site: str) -> bool:
        kept = self._keep_inputs
        return kept if isinstance(kept, bool) else site in kept

    def _hook(self, item: Covered) -> Callable[..., Any]:
        calls = self._calls.setdefault(item.site.name, [])
        server = item.server
        shared = server.shared if isinstance(server, RuleServer) else None
        shared_dims = server.shared_dims if isinstance(server, RuleServer) else 0
        meetings = server.meetings if isinstance(server, RuleServer) else None
        alone = isinstance(server, RuleServer) and item.site.name not in self._tied
        settles = alone and not self._keeps(item.site.name)
        keeper, remaker = self._keeper, self._remaker
        # weakly: a cycle would keep a batch's activations until the next collection
        settle = partial(_settle, weakref.ref(self), item) if settles else None

        def record(
            module: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            output: Any,
        ) -> Any:
            refuse_checkpointing(item.site.label)
            if not torch.is_grad_enabled():
                return output  # no gradient can come back from here
            repeated = shared is not None and _dims(args, kwargs) == shared_dims
            if repeated:
                assert shared is not None
                args, kwargs, output = tree_map(
                    lambda x: shared.repeated(x, self._batch_size),
                    (args, kwargs, output),
                )
            if type(module) in _PRODUCTS:
                args, kwargs = _as_computed(args, kwargs, output)
            if keeper is not None and isinstance(server, RuleServer):
                args, kwargs = keeper.inputs(args), keeper.inputs(kwargs)
            kept, goes = args, settle is not None and not repeated
            if remaker is not None and goes and remaker.knows(args):
                goes = self._writes_down(item, args, output)
                kept = (remaker.input(args[0]), *args[1:]) if goes else args
            call = OpenCall(kept, kwargs, settle=settle, keeper=keeper)
            calls.append(call)
            leaves, spec = tree_flatten(output)
            leaves = [call.watch(leaf) for leaf in leaves]
            if remaker is not None:
                remaker.stays(call.tensors())
                if isinstance(server, RuleServer) and args and not repeated:
                    remaker.normalised(module, args[0], leaves[0])
            if keeper is not None:
                keeper.outputs(leaves)
            if repeated and meetings is not None:
                assert shared is not None
                leaves = [shared.hidden(leaf, meetings) for leaf in leaves]
            return tree_unflatten(leaves, spec)

        return record

    def _writes_down(self, item: Covered, args: tuple[Any, ...], output: Any) -> bool:
        """Whether a layer of this output lets its input go when gradients come."""
        module = self._model.get_submodule(item.site.name)
        trains = "weight" in item.site.parameters and type(module) in _PRODUCTS
        if not trains or not isinstance(output, Tensor):
            return False
        # an output gradient has the shape of the output
        io = self._of_calls(item, [Call(args[:1], {}, (output.detach(),))])
        return isinstance(io, DenseIO) and io.settles

    def settle(self, item: Covered, call: OpenCall) -> None:
        """Write gradients down as they arrive, where that frees memory."""
        if not call.is_sound(self._batch_size):
            return  # refused later, outside of the backward pass
        with exact(self._device):
            io = self._of_calls(item, [call.close(item.site.label)])
            if self._keeper is not None and not isinstance(io, DirectIO):
                call.shorten()  # what is written down is made of what would be kept
                io = self._of_calls(item, [call.close(item.site.label)])
            io = io.settled()
        if isinstance(io, DirectIO):
            call.settle(io)

    @property
    def reached(self) -> bool:
        """Whether a backward pass has come through."""
        watched = any(c.reached for calls in self._calls.values() for c in calls)
        return watched or any(leaf.grad is not None for leaf in self._leaves.values())

    def unreached_sites(self) -> list[str]:
        """Sites with a parameter that nothing connects to the loss, in any site."""
        used: set[str] = set()
        unused = []
        for item in self._covered:
            full = item.site.parameters.values()
            if isinstance(item.server, ExpandedServer):
                reached = any(self._leaves[f].grad is not None for f in full)
            else:
                reached = any(c.reached for c in self._calls[item.site.name])
            if reached:
                used.update(full)
            else:
                unused.append(item.site)
        return [s.label for s in unused if not used.issuperset(s.parameters.values())]

    def arguments(self) -> dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]]:
        """Arguments of every call by site; for coverage, which runs synthetic data."""
        return {
            name: [(c.args, c.kwargs) for c in calls]
            for name, calls in self._calls.items()
        }

    def inputs(self) -> list[Tensor]:
        """All tensors that it keeps for the backward pass."""
        return [x for calls in self._calls.values() for c in calls for x in c.tensors()]

    def layer_ios(self) -> list[LayerIO]:
        """What the backward pass brought: a LayerIO for every layer, in order.

        A layer is a site, or all sites that a tied parameter connects.
        """
        with exact(self._device):
            return [self._joined(group) for group in self._groups]

    def _joined(self, group: list[Covered]) -> LayerIO:
        ios = [self._layer_io(item) for item in group]
        if len(ios) > 1:  # cross terms are cheaper from inputs than from gradients
            return joined(group[0].site.name, ios)
        return ios[0] if self._keeps(ios[0].name) else ios[0].settled()

    def _layer_io(self, item: Covered) -> LayerIO:
        site, server = item.site, item.server
        if isinstance(server, ExpandedServer):
            return server.layer_io(site, self._leaves)
        if isinstance(server, RewrittenServer):
            module = self._model.get_submodule(site.name)
            uses = self._tapes[site.name].close()
            for use in uses:
                self._check_batch(site.label, use.call.x)
            if uses:
                return server.layer_io(site, module, uses)
            return UnreachedIO(site.name, self._batch_size, self._device)
        reached = [c for c in self._calls[site.name] if c.reached]
        parts = [c.io for c in reached if c.io is not None]
        calls = [c.close(site.label) for c in reached if c.io is None]
        if isinstance(server, RuleServer):
            for call in calls:
                self._check_batch(site.label, call.x)
        if calls:
            parts.append(self._of_calls(item, calls))
        if not parts:
            return UnreachedIO(site.name, self._batch_size, self._device)
        return parts[0] if len(parts) == 1 else joined(site.name, parts)

    def _of_calls(self, item: Covered, calls: Sequence[Call]) -> LayerIO:
        assert isinstance(item.server, RuleServer | VmapServer)
        module = self._model.get_submodule(item.site.name)
        return item.server.layer_io(item.site, module, calls, self._values)

    def _check_batch(self, label: str, x: Tensor) -> None:
        if x.dim() == 0 or x.shape[0] != self._batch_size:
            raise CouplingError(
                f"layer {label!r} was given an input of shape {tuple(x.shape)}, whose "
                f"first dimension is not the batch of {self._batch_size}",
                "examples must stand at dimension 0 in every layer with parameters "
                "(batch_first=True; move other dimensions inside the module)",
            )


def _as_computed(
    args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs as autocast rounded them for the product; they take half the memory."""
    if not isinstance(output, Tensor) or output.dtype != torch.bfloat16:
        return args, kwargs

    def rounded(x: Any) -> Any:
        cast = isinstance(x, Tensor) and x.dtype == torch.float32
        return x.detach().to(output.dtype) if cast else x

    found: tuple[Any, ...] = tuple(map(rounded, args))
    return found, {name: rounded(x) for name, x in kwargs.items()}


def _settle(recording: weakref.ref[Recording], item: Covered, call: OpenCall) -> None:
    owner = recording()
    if owner is not None:
        owner.settle(item, call)


def _refuse_copies(output: Any) -> None:
    if any(isinstance(x, Copies) for x in tree_flatten(output)[0]):
        raise CouplingError(
            "the model returned a value that all examples share and that depends on "
            "its weights",
            "return outputs with examples at dimension 0",
        )


def _dims(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Dimensions of the first tensor argument."""
    leaves, _ = tree_flatten((args, kwargs))
    return next((x.dim() for x in leaves if isinstance(x, Tensor)), 0)
