"""What the checks share: refusals, exact sums, data that leaves nothing but noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.utils.data import TensorDataset

from curvedp.errors import CurvedpError
from curvedp.testing import reference
from curvedp.train.losses import cross_entropy

from .cases import attach, parameters


def refused(
    error: type[CurvedpError], words: str, action: Callable[[], object]
) -> None:
    """The action is refused with these words, or the check has failed."""
    try:
        action()
    except error as refusal:
        assert words in str(refusal), f"refused for another reason: {refusal}"
    except Exception as other:
        raise AssertionError(f"another error: {other}") from other
    else:
        raise AssertionError("not refused")


@contextmanager
def working() -> Iterator[None]:
    """A crash inside is a failed check, as a wrong result is."""
    try:
        yield
    except AssertionError:
        raise
    except Exception as crash:
        raise AssertionError(f"{type(crash).__name__}: {crash}") from crash


def unusable(n):
    """Examples that contribute nothing, so that only their number is left to leak."""
    return TensorDataset(torch.full((n, 4), float("nan")), torch.zeros(n).long())


def pairs(inputs):
    return TensorDataset(inputs, torch.zeros(len(inputs)).long())


def clipped_sum(dataset, model=None, **options):
    """The clipped sum of the whole dataset, which fits one physical batch."""
    private = attach(
        dataset, model, rate=1.0, steps=1, physical_batch_size=len(dataset), **options
    )
    engine = private._engine
    for x, y in private.loader:
        private.loss(private.model(x), y).backward()
        engine.accumulate()
        break
    return engine._open.pending


def clipped_vector(dataset, model=None, **options):
    values = clipped_sum(dataset, model, **options).values.values()
    return torch.cat([v.flatten() for v in values])


def assert_exact(model, inputs, *, clip_norm=0.5, **options):
    """Training this model clips the gradients that autograd has, one at a time."""
    targets = torch.arange(len(inputs)) % 3
    with working():
        given = clipped_sum(
            TensorDataset(inputs, targets), model, clip_norm=clip_norm, **options
        ).values
    grads = reference.per_example_gradients(model, cross_entropy, inputs, targets)
    lengths = sum(g.flatten(1).square().sum(1) for g in grads.values()).sqrt()
    assert (lengths > clip_norm).any(), "nothing is clipped: the norms are not tested"
    expected = reference.clipped_sum(grads, "flat", clip_norm)
    assert given.keys() == expected.keys(), "other parameters were clipped"
    for name, value in expected.items():
        torch.testing.assert_close(given[name].double(), value, rtol=1e-4, atol=1e-5)


def one_step(private):
    """What the first step adds to the parameters."""
    before = parameters(private.model)
    for x, y in private.loader:
        private.loss(private.model(x), y).backward()
        private.optimizer.step()
        if private.step:
            break
    return parameters(private.model) - before
