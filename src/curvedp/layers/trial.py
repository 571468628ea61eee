"""The model under test: run plainly or recorded, with the same random state each time.

A trial runs in the model's own dtype, or on a copy in float64. There a wrong gradient
of any size stands clear of rounding, which in bfloat16 hides a tenth of it; autograd's
own sums over positions are that far off.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from curvedp.errors import (
    ConfigurationError,
    CouplingError,
    CoverageError,
    CurvedpError,
)
from curvedp.layers.capture import Recording
from curvedp.layers.covered import Covered
from curvedp.layers.direct import ExpandedServer, RuleServer, float_tensors
from curvedp.layers.functional import call_with
from curvedp.layers.generators import seed_torch
from curvedp.layers.io import LayerIO
from curvedp.layers.rewrite import NO_TAPE, RewrittenServer, forwards
from curvedp.layers.state import State
from curvedp.layers.synthetic import Batch, Synthesiser, as_call
from curvedp.layers.tolerance import close

__all__ = [
    "PerExample",
    "PerExampleLoss",
    "Trial",
    "judges",
    "perturbed_parameters",
    "unfollowable",
    "without_dropout",
]

#: ``loss(output, targets) -> [B]``: the loss of every example on its own.
PerExampleLoss = Callable[[Any, Any], Tensor]

#: Parameters, frozen ones included, of the largest model that is copied to float64.
#: The check then takes 32 bytes for each of them, as much as in float32 without a copy.
LARGEST_COPY = 150_000_000


@dataclass(frozen=True, eq=False)
class Trial:
    """What is run.

    Attributes:
        model: the user's, or a copy of it in another dtype.
        covered: its sites.
        loss: per-example loss; None for a random projection of the outputs.
        parameters: values of the trainable parameters.
        size: examples in a batch.
        seed: of dropout and of the projection.
        copied: whether the model is a copy in float64.
    """

    model: nn.Module
    covered: Sequence[Covered]
    loss: PerExampleLoss | None
    parameters: dict[str, Tensor]
    size: int
    seed: int

    copied: bool = False

    @cached_property
    def start(self) -> State:
        """What the model holds before the first pass; every pass begins with it."""
        state = State(self.model)
        state.open(weights=False)
        return state

    def cast(self, batch: Batch) -> Batch:
        """The batch in the dtype of a copy; the model itself takes it as it is."""
        return _doubled(batch) if self.copied else batch

    @property
    def sharp(self) -> bool:
        """Whether rounding is that of float64."""
        return all(p.dtype is torch.float64 for p in self.parameters.values())

    def _seeded(self) -> None:
        self.start.rewind()
        seed_torch(self.seed, next(iter(self.parameters.values())).device)

    def outputs(self, batch: Batch, parameters: Mapping[str, Tensor]) -> Any:
        """Plain forward pass, as autograd sees it.

        Fused modules are rewritten here too, which draw dropout masks of their own;
        that both forwards compute the same has been seen before.
        """
        self._seeded()
        args, kwargs = as_call(batch.inputs)
        rewritten = {}
        for item in self.covered:
            if isinstance(item.server, RewrittenServer):
                module = self.model.get_submodule(item.site.name)
                rewritten[module] = item.server.bound(module, item.site, NO_TAPE)
        with forwards(rewritten):
            return call_with(self.model, parameters, args, kwargs)

    def plain(self, batch: Batch) -> Any:
        """The same with the weights of the trial."""
        return self.outputs(batch, self.parameters)

    def losses(self, output: Any, batch: Batch) -> Tensor:
        """Per-example losses: the user's, or a random projection of the outputs."""
        if self.loss is not None:
            losses = self.loss(output, batch.targets)
            if not isinstance(losses, Tensor) or losses.shape != (self.size,):
                got = tuple(losses.shape) if isinstance(losses, Tensor) else losses
                raise ConfigurationError(
                    f"the loss returned {got!r} for a batch of {self.size} examples",
                    "return one loss per example, shape [batch] (reduction='none', "
                    "then a mean over the other dimensions)",
                )
            return losses
        generator = torch.Generator().manual_seed(self.seed + 3)
        total: Tensor | None = None
        for t in float_tensors(output):
            if t.dim() == 0 or t.shape[0] != self.size:
                raise CouplingError(
                    f"the model returned a tensor of shape {tuple(t.shape)} for a "
                    f"batch of {self.size}: its first dimension is not the batch",
                    "return outputs with examples at dimension 0, and no loss or mean "
                    "over the batch",
                )
            direction = torch.randn(t.shape, generator=generator).to(t.device, t.dtype)
            part = (t * direction).flatten(1).sum(1) if t.dim() > 1 else t * direction
            total = part if total is None else total + part
        if total is None:
            raise CoverageError("the model returned no floating-point tensor")
        return total

    def record(self, batch: Batch) -> tuple[Recording, Tensor]:
        """A recorded forward and backward pass, and its losses."""
        self._seeded()
        recording = Recording(self.model, self.covered, self.size)
        try:
            output = recording.forward(*as_call(batch.inputs), self.parameters)
            losses = self.losses(output, batch)
        except CurvedpError:
            raise
        except Exception as error:  # the plain pass went well
            raise unfollowable(self.covered) from error
        try:
            torch.autograd.backward(losses.sum())
        except RuntimeError as error:
            raise CoverageError(
                "the backward pass fails when the weights are watched: "
                + str(error).strip().splitlines()[0],
                "switch gradient checkpointing off, if the model uses it (a smaller "
                "physical batch saves as much memory)",
            ) from error
        return recording, losses.detach()

    def gradients(self, batch: Batch) -> PerExample:
        """Per-example gradients by the rules."""
        return PerExample(self.record(batch)[0].layer_ios())

    def other_gradients(
        self, synthesise: Synthesiser, seed: int, number: int
    ) -> dict[str, Tensor]:
        """Autograd's, for weights and inputs far from those of the trial."""
        drawn = perturbed_parameters(self.model, seed + number, spread=1.0)
        leaves = {n: p.requires_grad_() for n, p in drawn.items()}
        generator = torch.Generator().manual_seed(seed + number)
        batch = self.cast(synthesise(self.size, generator))
        losses = self.losses(self.outputs(batch, leaves), batch)
        signs = torch.randn(losses.shape, generator=generator).to(losses)
        found = torch.autograd.grad(
            (losses * signs).sum(), list(leaves.values()), allow_unused=True
        )
        return {
            n: torch.zeros_like(p) if g is None else g
            for (n, p), g in zip(leaves.items(), found, strict=True)
        }


def perturbed_parameters(
    model: nn.Module, seed: int, spread: float = 0.1
) -> dict[str, Tensor]:
    """Trainable parameters with public noise on them, ``spread`` times their size."""
    generator = torch.Generator().manual_seed(seed)
    perturbed = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            noise = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
            std = spread * p.detach().float().square().mean().sqrt() + 0.01
            perturbed[name] = p.detach() + noise * std.to(p.dtype)
    return perturbed


class PerExample(Mapping[str, Tensor]):
    """Per-example gradients by parameter name, those of one layer at a time."""

    def __init__(self, ios: Sequence[LayerIO]) -> None:
        self._owners = {name: io for io in ios for name in io.names}
        self._last: tuple[LayerIO, dict[str, Tensor]] | None = None

    def __getitem__(self, name: str) -> Tensor:
        io = self._owners[name]
        if self._last is None or self._last[0] is not io:
            self._last = io, io.per_example()
        return self._last[1][name]

    def __contains__(self, name: object) -> bool:
        return name in self._owners

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)


def judges(trial: Trial, batch: Batch) -> list[Trial]:
    """The trials that have to pass: in float64 where that is possible.

    A copy that computes something else than the model (beyond rounding; dropout left
    out) says nothing about it, so the model itself is judged too then.
    """
    sharp = None if trial.sharp else _in_float64(trial)
    if sharp is None:
        return [trial]
    try:
        with without_dropout(trial.model), without_dropout(sharp.model):
            copied, own = _plain_losses(sharp, batch), _plain_losses(trial, batch)
    except Exception:  # of whatever kind: the copy is only a sharper eye
        return [trial]
    return [sharp] if close(own, copied) else [trial, sharp]


def _in_float64(trial: Trial) -> Trial | None:
    if sum(p.numel() for p in trial.model.parameters()) > LARGEST_COPY:
        return None
    try:
        model = copy.deepcopy(trial.model).double()
    except Exception:  # models may hold what cannot be copied
        return None
    parameters = {n: p.double() for n, p in trial.parameters.items()}
    return replace(trial, model=model, parameters=parameters, copied=True)


def _plain_losses(trial: Trial, batch: Batch) -> Tensor:
    batch = trial.cast(batch)
    with torch.no_grad():
        return trial.losses(trial.plain(batch), batch)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, without the fused layers that torch has for it."""
    modes = {m: m.training for m in model.modules()}
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # no hook is called inside of them
    model.eval()
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for module, mode in modes.items():
            module.training = mode


def _doubled(batch: Batch) -> Batch:
    def double(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    return Batch(tree_map(double, batch.inputs), tree_map(double, batch.targets))


def unfollowable(covered: Sequence[Covered]) -> CoverageError:
    """The error for a model that gives other losses when it is watched."""
    copied = [
        repr(full)
        for item in covered
        for full in item.site.parameters.values()
        if isinstance(item.server, ExpandedServer)
        or (isinstance(item.server, RuleServer) and item.server.shared is not None)
    ]
    return CoverageError(
        "the model computes something else when its weights are watched: it uses the "
        "shape of a parameter or of a layer's output that has no batch dimension in a "
        "way that cannot be followed, or outside of its module"
        + (f" (one of {', '.join(copied)})" if copied else ""),
        "give broadcast parameters a leading dimension of 1, and position ids the "
        "shape of the batch",
    )
