"""The attach-time check: does each example's gradient belong to that example alone?

On a small synthetic batch, with slightly perturbed parameters (so that zero-initialised
layers hide nothing):

1. Each example is replaced in turn. No other example's output, loss or gradient may
   change: a layer, a buffer or a loss that couples examples is found and named.
2. The gradients that the rules give *per example* are compared with one-at-a-time
   autograd. A comparison of sums would miss a wrong attribution: a tensor ``[T, B, p]``
   read as ``[B, T, p]`` has the right sum, and lets one example contribute more than C.
   A weight that is also used outside its module shows up here, by name.
3. A parameter that nothing reaches (an unused layer), or whose gradient is always zero
   (a dead adapter) is named: under noise it would do nothing but drift.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from curvedp.errors import (
    ConfigurationError,
    CouplingError,
    CoverageError,
    CurvedpError,
)
from curvedp.layers.capture import Recording
from curvedp.layers.compare import close, first_coupled, same_rows, traced
from curvedp.layers.covered import Covered
from curvedp.layers.dead import refuse_dead
from curvedp.layers.direct import ExpandedServer, RuleServer, float_tensors
from curvedp.layers.functional import call_with
from curvedp.layers.rewrite import NO_TAPE, RewrittenServer, forwards
from curvedp.layers.synthetic import (
    Batch,
    Synthesiser,
    as_call,
    rolled,
    with_example_of,
)

__all__ = ["PerExampleLoss", "perturbed_parameters", "verify"]

#: ``loss(output, targets) -> [B]``: the loss of every example on its own.
PerExampleLoss = Callable[[Any, Any], Tensor]

#: Examples in the check; with more parameters than LARGE, two (memory grows with both).
EXAMPLES = 3
LARGE = 20_000_000


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


def verify(
    model: nn.Module,
    covered: Sequence[Covered],
    synthesise: Synthesiser,
    loss: PerExampleLoss | None,
    parameters: dict[str, Tensor],
    seed: int,
) -> None:
    """Run the check; see the module's docstring. Raises by name, or returns."""
    size = EXAMPLES if sum(p.numel() for p in parameters.values()) < LARGE else 2
    generator = torch.Generator().manual_seed(seed + 2)
    batch, other = synthesise(size, generator), synthesise(size, generator)
    check = _Check(model, covered, loss, parameters, size, seed)
    _check_forward(check, batch, other)
    grads = _check_attribution(check, batch)
    suspects = [name for name, g in grads.items() if not bool(g.any())]
    refuse_dead(suspects, lambda n: check.other_gradients(synthesise, seed + 4 + n))
    for j in range(size):
        mixed = check.gradients(with_example_of(batch, other, j))
        others = [i for i in range(size) if i != j]
        for name, g in grads.items():
            if not close(g[others], mixed[name][others]):
                raise CouplingError(
                    f"the gradient of {name!r} for one example changes when another "
                    "example of the batch changes",
                    "find what couples the examples in the backward pass of that "
                    "layer (a custom autograd function, a shared normaliser)",
                )


class _Check:
    """The model under test, run with the same random state every time."""

    def __init__(
        self,
        model: nn.Module,
        covered: Sequence[Covered],
        loss: PerExampleLoss | None,
        parameters: dict[str, Tensor],
        size: int,
        seed: int,
    ) -> None:
        self.model, self.covered, self.size = model, covered, size
        self.parameters = parameters
        self._loss, self._seed = loss, seed

    def outputs(self, batch: Batch, parameters: Mapping[str, Tensor]) -> Any:
        """Plain forward pass, as autograd sees it.

        Fused modules are rewritten here too, which draw dropout masks of their own;
        that both forwards compute the same has been seen before.
        """
        torch.manual_seed(self._seed)
        args, kwargs = as_call(batch.inputs)
        rewritten = {}
        for item in self.covered:
            if isinstance(item.server, RewrittenServer):
                module = self.model.get_submodule(item.site.name)
                rewritten[module] = item.server.bound(module, item.site, NO_TAPE)
        with forwards(rewritten):
            return call_with(self.model, parameters, args, kwargs)

    def plain(self, batch: Batch) -> Any:
        """The same with the weights of the check."""
        return self.outputs(batch, self.parameters)

    def losses(self, output: Any, batch: Batch) -> Tensor:
        """Per-example losses: the user's, or a random projection of the outputs."""
        if self._loss is not None:
            losses = self._loss(output, batch.targets)
            if not isinstance(losses, Tensor) or losses.shape != (self.size,):
                got = tuple(losses.shape) if isinstance(losses, Tensor) else losses
                raise ConfigurationError(
                    f"the loss returned {got!r} for a batch of {self.size} examples",
                    "return one loss per example, shape [batch] (reduction='none', "
                    "then a mean over the other dimensions)",
                )
            return losses
        generator = torch.Generator().manual_seed(self._seed + 3)
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
        torch.manual_seed(self._seed)
        recording = Recording(self.model, self.covered, self.size)
        try:
            output = recording.forward(*as_call(batch.inputs), self.parameters)
            losses = self.losses(output, batch)
        except CurvedpError:
            raise
        except (RuntimeError, ValueError, IndexError) as error:
            raise _unfollowable(self.covered) from error  # the plain pass went well
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

    def gradients(self, batch: Batch) -> dict[str, Tensor]:
        """Per-example gradients by the rules."""
        grads: dict[str, Tensor] = {}
        for io in self.record(batch)[0].layer_ios():
            grads.update(io.per_example())
        return grads

    def other_gradients(self, synthesise: Synthesiser, seed: int) -> dict[str, Tensor]:
        """Autograd's, for weights and inputs far from those of the check."""
        drawn = perturbed_parameters(self.model, seed, spread=1.0)
        leaves = {n: p.requires_grad_() for n, p in drawn.items()}
        generator = torch.Generator().manual_seed(seed)
        batch = synthesise(self.size, generator)
        losses = self.losses(self.outputs(batch, leaves), batch)
        signs = torch.randn(losses.shape, generator=generator).to(losses)
        found = torch.autograd.grad(
            (losses * signs).sum(), list(leaves.values()), allow_unused=True
        )
        return {
            n: torch.zeros_like(p) if g is None else g
            for (n, p), g in zip(leaves.items(), found, strict=True)
        }


def _check_forward(check: _Check, batch: Batch, other: Batch) -> None:
    """No example's output or loss depends on another example."""
    with torch.no_grad():
        output, trace = traced(check.model, partial(check.plain, batch))
        losses = check.losses(output, batch)
        # by an example that the batch has already, too: a loss may count equal ones
        twins = rolled(batch)
        for j, source in product(range(check.size), (other, twins)):
            mixed = with_example_of(batch, source, j)
            changed, changed_trace = traced(check.model, partial(check.plain, mixed))
            rows = [i for i in range(check.size) if i != j]
            if not same_rows(output, changed, rows, check.size):
                name = first_coupled(trace, changed_trace, rows, check.size)
                raise CouplingError(
                    "the output for one example changes when another example of the "
                    f"batch changes (first seen at {name})",
                    "replace the layer that mixes examples (BatchNorm by GroupNorm, "
                    "batch statistics by per-example ones)",
                )
            if not close(losses[rows], check.losses(changed, mixed)[rows]):
                raise CouplingError(
                    "the loss of one example changes when another example of the batch "
                    "changes: the loss couples examples",
                    "return each example's own loss; do not divide by a count or a sum "
                    "over the batch (tokens, weights, positives)",
                )


def _check_attribution(check: _Check, batch: Batch) -> dict[str, Tensor]:
    """The rules' per-example gradients equal one-at-a-time autograd."""
    recording, recorded_losses = check.record(batch)
    _refuse_unreached(recording)
    grads: dict[str, Tensor] = {}
    for io in recording.layer_ios():
        grads.update(io.per_example())
    leaves = {n: p.clone().requires_grad_() for n, p in check.parameters.items()}
    losses = check.losses(check.outputs(batch, leaves), batch)
    if not close(recorded_losses, losses):
        raise _unfollowable(check.covered)
    rows = [
        torch.autograd.grad(
            losses[i], list(leaves.values()), retain_graph=True, allow_unused=True
        )
        for i in range(check.size)
    ]
    for k, (name, p) in enumerate(leaves.items()):
        exact = [torch.zeros_like(p) if r[k] is None else r[k] for r in rows]
        expected = torch.stack([g for g in exact if g is not None])
        if name not in grads:
            raise CoverageError(
                f"no rule covers the parameter {name!r}",
                "freeze it (requires_grad_(False)) or use it through a module",
            )
        if close(grads[name], expected):
            continue
        if close(grads[name].sum(0), expected.sum(0)):
            raise CouplingError(
                f"the gradient of {name!r} is right for the batch as a whole but "
                "attributed to the wrong examples: its layer does not see the batch at "
                "dimension 0",
                "give the layer inputs with examples first ([batch, time, features], "
                "not [time, batch, features])",
            )
        raise CoverageError(
            f"the per-example gradient of {name!r} differs from autograd's: the "
            "parameter is also used outside its module (as in F.linear(h, "
            f"layer.weight)), or its module draws random numbers of its own",
            "call a module that holds the weight: head = nn.Linear(p, r, bias=False); "
            "head.weight = layer.weight (tied weights are exact, and checkpoints keep "
            "fitting); or freeze the parameter",
        )
    return grads


def _unfollowable(covered: Sequence[Covered]) -> CoverageError:
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


def _refuse_unreached(recording: Recording) -> None:
    names = recording.unreached_sites()
    if names:
        listed = ", ".join(map(repr, names))
        raise CoverageError(
            f"no gradient reaches {listed}: unused in the forward pass, or cut off "
            "from the loss; under noise these weights would only drift",
            "freeze them (requires_grad_(False)), remove them, or use them",
        )
