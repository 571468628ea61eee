"""Synthetic batches of the user's shapes, for checks that must not touch private data.

Shapes and dtypes come from a template; the values are random. What a template cannot
tell (token ids below the vocabulary, labels below the number of classes) is taken from
the model: the smallest embedding table, the width of the output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import (
    tree_flatten,
    tree_map,
    tree_map_with_path,
    tree_unflatten,
)

__all__ = [
    "Batch",
    "Synthesiser",
    "as_call",
    "is_mask",
    "rolled",
    "rows_of",
    "synthesiser_like",
    "synthetic_like",
    "with_example_of",
]


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of a batch, tensors with examples at dimension 0.

    Attributes:
        inputs: a tensor for ``model(x)``, a tuple for ``model(*xs)``, a mapping for
            ``model(**xs)``.
        targets: whatever the loss takes as its second argument; None without a loss.
    """

    inputs: Any
    targets: Any


#: Positional and keyword arguments of a model.
Call = tuple[tuple[Any, ...], dict[str, Any]]

#: Makes a batch of the given size; the generator is its only source of randomness.
Synthesiser = Callable[[int, torch.Generator], Batch]


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments, as the structure of the inputs says."""
    if isinstance(inputs, dict):
        return (), inputs
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    return (inputs,), {}


def synthesiser_like(template: Batch, model: nn.Module) -> Synthesiser:
    """Random batches with the shapes and dtypes of ``template`` (any batch size).

    Args:
        template: a batch whose values are ignored.
        model: tells the range of token ids; its output tells the range of labels.
    """
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    vocabulary = min(tables, default=2)

    def make(size: int, generator: torch.Generator) -> Batch:
        def draw_input(path: Any, x: Any) -> Any:
            return _like(x, size, generator, 2 if is_mask(path) else vocabulary)

        inputs = tree_map_with_path(draw_input, template.inputs)
        if template.targets is None:
            return Batch(inputs, None)
        classes = _output_width(model, inputs)

        def draw_target(_: Any, y: Any) -> Any:
            return _like(y, size, generator, classes)

        return Batch(inputs, tree_map_with_path(draw_target, template.targets))

    return make


def _like(x: Any, size: int, generator: torch.Generator, high: int) -> Any:
    if not isinstance(x, Tensor):
        return x
    shape = (size, *x.shape[1:])
    if x.is_floating_point():
        # in [0, 1]: valid as features, as regression targets and as probabilities
        drawn = torch.rand(shape, generator=generator).to(x.dtype)
    elif x.dtype == torch.bool:
        drawn = torch.ones(shape, dtype=torch.bool)
    else:
        drawn = torch.randint(0, max(high, 1), shape, generator=generator).to(x.dtype)
    return drawn.to(x.device)


def is_mask(path: Any) -> bool:
    """Returns True if an input's name says that it is a mask."""
    return any("mask" in str(getattr(key, "key", "")).lower() for key in path)


def _output_width(model: nn.Module, inputs: Any) -> int:
    """Number of classes that the model's output can name, by its narrowest reading."""
    modes = {m: m.training for m in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            args, kwargs = as_call(inputs)
            output = model(*args, **kwargs)
    finally:
        for module, mode in modes.items():  # a frozen BatchNorm stays as it is
            module.training = mode
    if isinstance(output, Tensor) and output.dim() >= 2:
        return min(output.shape[1], output.shape[-1])
    return 2


def with_example_of(batch: Batch, other: Batch, j: int) -> Batch:
    """The batch with example ``j`` of another one in the place of its own."""

    def swap(x: Any, y: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        x = x.clone()
        x[j] = y[j]
        return x

    return Batch(
        tree_map(swap, batch.inputs, other.inputs),
        tree_map(swap, batch.targets, other.targets),
    )


def rolled(batch: Batch) -> Batch:
    """Every example in the place of the next one."""

    def roll(x: Any) -> Any:
        return x.roll(1, 0) if isinstance(x, Tensor) else x

    return Batch(tree_map(roll, batch.inputs), tree_map(roll, batch.targets))


def rows_of(given: Call) -> int:
    """Rows of the first tensor that a model is given."""
    leaves = tree_flatten(given)[0]
    sizes = [len(x) for x in leaves if isinstance(x, Tensor) and x.dim()]
    return sizes[0] if sizes else 1


def synthetic_like(
    model: nn.Module, synthesise: Synthesiser, given: Call, rows: int
) -> Call | None:
    """Arguments of these shapes without anything of their values; None if unknown.

    What is no tensor is taken from the synthetic batch too: it may be made of data.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = as_call(synthesise(rows, generator).inputs)
    ours, spec = tree_flatten(drawn)
    theirs, other = tree_flatten(given)
    if spec != other:
        return None
    alike = [
        isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape[1:] == y.shape[1:]
        for x, y in zip(theirs, ours, strict=True)
        if isinstance(x, Tensor)
    ]
    if all(alike):
        return drawn
    template = [
        x if isinstance(x, Tensor) else y for x, y in zip(theirs, ours, strict=True)
    ]
    filled = tree_unflatten(template, spec)
    made: Call = synthesiser_like(Batch(filled, None), model)(rows, generator).inputs
    return made
