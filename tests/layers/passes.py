"""How the tests run a net: physical portions, forced norm methods, float64 measures."""

from dataclasses import replace

import torch
from torch.utils._pytree import tree_map

from curvedp.clipping import clipped_sum
from curvedp.layers import Batch, Recording, as_call
from curvedp.layers.dense import DenseIO
from curvedp.layers.io import DirectIO
from curvedp.layers.joined import JoinedIO
from curvedp.layers.lookup import LookupIO
from curvedp.sampling.physical import pad_batch
from curvedp.whitening import IdentityWhitener

SEED = 7


def record(model, coverage, batch, size, loss, keep_inputs=False):
    """A recorded pass; the random state is the same every time."""
    torch.manual_seed(SEED)
    recording = Recording(model, coverage.covered, size, keep_inputs=keep_inputs)
    output = recording.forward(*as_call(batch.inputs))
    loss(output, batch.targets).sum().backward()
    return recording.layer_ios()


def forced(ios, method):
    """The same layers with the way to their norms forced, where there is a choice."""

    def force(io):
        if isinstance(io, JoinedIO):
            return replace(io, parts=[force(part) for part in io.parts])
        return replace(io, method=method) if isinstance(io, DenseIO) else io

    return [force(io) for io in ios] if method else ios


def portions(batch, total, physical):
    """Physical batches of one size, padded, with the mask of the real rows."""
    for start in range(0, total, physical):
        part = tree_map(
            lambda x, s=start: x[s : s + physical], (batch.inputs, batch.targets)
        )
        count = min(physical, total - start)
        yield Batch(*pad_batch(part, physical)), torch.arange(physical) < count


def add_up(model, ios, rule, present=None, step=0, scale=1.0):
    """The engine's clipped sum over one physical batch."""
    present = (
        torch.ones(ios[0].batch_size, dtype=torch.bool) if present is None else present
    )
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return clipped_sum(
        ios,
        rule,
        IdentityWhitener(),
        parameters=parameters,
        present=present,
        step=step,
        scale=scale,
    )


def flat(values, names=None):
    """All coordinates as one float64 vector, in a fixed order of names."""
    return torch.cat([values[n].double().flatten() for n in names or sorted(values)])


def in_float64(io):
    """The layer's per-example gradients, in float64 from the very same values."""
    if isinstance(io, DenseIO | LookupIO):
        calls = [
            (x.double() if x.is_floating_point() else x, d.double())
            for x, d in io.calls
        ]
        return replace(io, calls=calls).per_example()
    if isinstance(io, DirectIO):
        return {n: g.double() for n, g in io.grads.items()}
    if isinstance(io, JoinedIO):
        total = {}
        for part in io.parts:
            for name, g in in_float64(part).items():
                total[name] = total[name] + g if name in total else g
        return total
    return io.per_example()


def largest_contribution(ios, rule, present):
    """Norm of the longest weighted gradient, in float64, divided by the bound."""
    weights = rule.weights(torch.stack([io.sq_norms().double() for io in ios]))
    total = torch.zeros(ios[0].batch_size, dtype=torch.float64)
    for io, weight in zip(ios, weights, strict=True):
        for g in in_float64(io).values():
            rows = g.reshape(len(g), -1)
            total += (weight.unsqueeze(1) * rows).square().sum(1)
    return float(total.sqrt()[present].max()) / rule.bound
