"""Canaries: examples whose presence an attacker tries to see.

A canary that is hard to overlook has a large gradient, which clipping cuts to length C
exactly, in a direction that the other examples do not use. Where the user names none,
they are noise of ten times the usual size with labels drawn at random: that works for
any model whose inputs are numbers, and only the labels are odd where they are tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset, TensorDataset, default_collate

from curvedp.errors import ConfigurationError, DataError, withheld
from curvedp.layers import Batch, synthesiser_like
from curvedp.sampling.physical import gathers, population
from curvedp.train.datasets import TrainingData, moved

__all__ = ["Canaries", "WithCanaries", "synthetic_canaries", "with_canaries"]

#: How much larger than usual inputs are.
SCALE = 10.0

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Canaries:
    """Examples and, under replacement, what stands in their place otherwise.

    Attributes:
        items: as the dataset gives its own, pairs (inputs, targets).
        replacements: one for each item, or None: a canary that is left out is then
            missing, which is what adding and removing mean.
    """

    items: Sequence[Any]
    replacements: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        if not len(self.items):
            raise ConfigurationError("there is no canary", "give at least one")
        if self.replacements is not None and len(self.replacements) != len(self.items):
            raise ConfigurationError(
                f"{len(self.items)} canaries and {len(self.replacements)} replacements",
                "give one for each",
            )

    def __len__(self) -> int:
        return len(self.items)

    def chosen(self, included: Sequence[bool]) -> list[Any]:
        """What is in the dataset when the coins have fallen."""
        pairs = zip(self.items, included, strict=True)
        if self.replacements is None:
            return [item for item, inside in pairs if inside]
        other = self.replacements
        return [item if inside else other[k] for k, (item, inside) in enumerate(pairs)]

    def batches(self, collate: Collate | None, device: torch.device) -> list[Batch]:
        """The canaries, and their replacements if there are any, as batches."""
        found = []
        for items in (self.items, self.replacements):
            if items is not None:
                pair = (collate or default_collate)(list(items))
                found.append(Batch(*moved(tuple(pair), device)))
        return found


def synthetic_canaries(
    source: TrainingData,
    model: nn.Module,
    count: int,
    generator: torch.Generator,
    *,
    replaced: bool = False,
) -> Canaries:
    """Canaries in the shapes and types of a dataset's own examples.

    Args:
        source: the data; its values are not used.
        model: says how many tokens and labels there are.
        count: how many.
        generator: draws them.
        replaced: draw replacements too.
    """
    if source.collate is not None:
        raise ConfigurationError(
            "canaries cannot be made up for a collate function of your own",
            "pass canaries=[...], examples as your dataset gives them",
        )
    device = next(model.parameters()).device
    template = source.template(device, with_targets=True)
    make = synthesiser_like(template, model)
    with withheld("the dataset"):
        like = source.dataset[0]

    def draw() -> list[Any]:
        batch = make(count, generator)
        inputs = tree_map(_enlarged, batch.inputs)
        rows = [moved((inputs, batch.targets), torch.device("cpu"))] * count
        return [_item(pair, k, like) for k, pair in enumerate(rows)]

    return Canaries(draw(), draw() if replaced else None)


def _enlarged(x: Any) -> Any:
    """Uniform in [0, 1] becomes uniform in [-SCALE, SCALE]; other types stay."""
    is_float = isinstance(x, Tensor) and x.is_floating_point()
    return (2 * x - 1) * SCALE if is_float else x


def _item(pair: Any, row: int, like: Any) -> Any:
    """One example of a batch, its leaves of the types that the dataset gives."""
    cut = tree_map(lambda x: x[row] if isinstance(x, Tensor) else x, pair)
    if not isinstance(like, tuple | list) or len(like) != 2:
        raise DataError("an example is not a pair (inputs, targets)")
    return tuple(
        tree_map(_typed, part, own) for part, own in zip(cut, like, strict=True)
    )


def _typed(x: Any, like: Any) -> Any:
    if not isinstance(x, Tensor) or isinstance(like, Tensor):
        return x
    if isinstance(like, np.ndarray | np.generic):
        return x.numpy().astype(like.dtype)
    return type(like)(x.item())


class WithCanaries(Dataset[Any]):
    """A dataset with some more examples at its end."""

    def __init__(self, dataset: Any, items: Sequence[Any]) -> None:
        self._dataset, self._items = dataset, items
        self._own = population(dataset)

    def __len__(self) -> int:
        return self._own + len(self._items)

    def __getitem__(self, index: int) -> Any:
        if index < self._own:
            return self._dataset[index]
        return self._items[index - self._own]


def with_canaries(dataset: Any, items: Sequence[Any]) -> Any:
    """The dataset with canaries at its end; tensors stay tensors, which is faster."""
    if not gathers(dataset):
        return WithCanaries(dataset, items)
    columns = [list(column) for column in zip(*items, strict=True)] if items else []
    if not columns:
        return TensorDataset(*dataset.tensors)
    more = [torch.stack([torch.as_tensor(x) for x in column]) for column in columns]
    joined = [
        torch.cat([own, new.to(own.device, own.dtype)])
        for own, new in zip(dataset.tensors, more, strict=True)
    ]
    return TensorDataset(*joined)
