"""The attach-time check: does each example's gradient belong to that example alone?

On a small synthetic batch, with slightly perturbed parameters (so that zero-initialised
layers hide nothing):

1. Each example is replaced in turn. No other example's output, loss or gradient may
   change: a layer, a buffer or a loss that couples examples is found and named.
2. The gradients that the rules give *per example* are compared with one-at-a-time
   autograd. A comparison of sums would miss a wrong attribution: a tensor ``[T, B, p]``
   read as ``[B, T, p]`` has the right sum, and lets one example contribute more than C.
   A weight that is also used outside its module shows up here, by name.
3. A parameter that nothing reaches (an unused layer), or whose gradient is exactly
   zero for all inputs (a dead adapter) is named: under noise it would only drift.

All of it runs on a copy of the model in float64 where that is possible, so that a part
of a gradient of any size that matters is told from rounding, also in a bfloat16 model:
:mod:`curvedp.layers.tolerance` says what could still pass, and what follows for the
guarantee. The model itself then makes one recorded pass. A model that cannot be copied
or run in float64, or is too large for it, is checked in its own dtype.

What begins with more rows, or in the run's precision alone, is found at the size of the
run: :mod:`curvedp.train.coupling`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from curvedp.errors import CouplingError, CoverageError
from curvedp.layers import tolerance
from curvedp.layers.compare import first_coupled, same_rows, traced
from curvedp.layers.covered import Covered
from curvedp.layers.dead import refuse_dead
from curvedp.layers.synthetic import Batch, Synthesiser, rolled, with_example_of
from curvedp.layers.tolerance import COUPLING, close
from curvedp.layers.trial import (
    PerExample,
    PerExampleLoss,
    Trial,
    judges,
    perturbed_parameters,
    unfollowable,
)

__all__ = ["PerExampleLoss", "perturbed_parameters", "verify"]

#: Examples in the check; with more parameters than LARGE, two (memory grows with both).
EXAMPLES = 3
LARGE = 20_000_000


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
    trial = Trial(model, covered, loss, parameters, size, seed)
    chosen = judges(trial, batch)
    for check in chosen:
        own, another = check.cast(batch), check.cast(other)
        _check_forward(check, own, another)
        grads, scale = _check_attribution(check, own)
        suspects = [name for name, g in grads.items() if not bool(g.any())]
        refuse_dead(suspects, partial(check.other_gradients, synthesise, seed + 4))
        strictness = COUPLING if check.sharp else 1.0
        same = partial(close, scale=scale, strictness=strictness)
        for j in range(size):
            mixed = check.gradients(with_example_of(own, another, j))
            others = [i for i in range(size) if i != j]
            for name, g in grads.items():
                if name not in mixed or not same(g[others], mixed[name][others]):
                    raise CouplingError(
                        f"the gradient of {name!r} for one example changes when "
                        "another example of the batch changes",
                        "find what couples the examples in the backward pass of that "
                        "layer (a custom autograd function, a shared normaliser)",
                    )
    if trial not in chosen:  # what holds in float64 has to run in the model's dtype
        trial.record(batch)[0].layer_ios()


def _check_forward(check: Trial, batch: Batch, other: Batch) -> None:
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


def _check_attribution(check: Trial, batch: Batch) -> tuple[PerExample, float]:
    """The rules' per-example gradients equal one-at-a-time autograd.

    Returns the gradients, and the norm of the whole model's gradient over the batch.
    """
    recording, recorded_losses = check.record(batch)
    _refuse_unreached(recording.unreached_sites())
    grads = PerExample(recording.layer_ios())
    leaves = {n: p.detach().requires_grad_() for n, p in check.parameters.items()}
    losses = check.losses(check.outputs(batch, leaves), batch)
    if not tolerance.close(recorded_losses, losses):
        raise unfollowable(check.covered)
    rows = [
        torch.autograd.grad(
            losses[i], list(leaves.values()), retain_graph=True, allow_unused=True
        )
        for i in range(check.size)
    ]
    _refuse_unreached(
        [name for k, name in enumerate(leaves) if all(row[k] is None for row in rows)]
    )
    lengths = [float(g.double().norm()) for row in rows for g in row if g is not None]
    scale = math.hypot(*lengths)
    close = partial(tolerance.close, scale=scale)
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
    return grads, scale


def _refuse_unreached(names: list[str]) -> None:
    if names:
        listed = ", ".join(map(repr, names))
        raise CoverageError(
            f"no gradient reaches {listed}: unused in the forward pass, or cut off "
            "from the loss; under noise these weights would only drift",
            "freeze them (requires_grad_(False)), remove them, or use them",
        )
