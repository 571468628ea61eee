"""Batches in which half of the rows have other contents, by the bits of their numbers.

Any two rows differ in some bit of their numbers. So if for each bit the rows in which
it is 0 are replaced, and then those in which it is 1, each row stays while each other
one changes: ``2 ceil(log2 B)`` batches find what 2 by 2 would take ``B^2``.

What replaces them is by turns of many kinds, and all alike: limits on how many rows may
be of one kind are reached by that, and rows that stay meet their like. Zeros are among
it, which padding is.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_map_with_path

from curvedp.layers.synthetic import Batch, Synthesiser, as_call, is_mask

__all__ = [
    "KINDS",
    "PLAIN",
    "bits",
    "replaced",
    "taken_on_cpu",
    "varied",
    "without_finite",
]

#: What floating-point inputs of each kind of row are multiplied with. Only as they were
#: made where a model may not take any number.
KINDS = (1.0, -1.0, 4.0, 0.25)
PLAIN = (1.0,)
PADDING = 0.0


def bits(size: int) -> int:
    """How many bits tell the rows of a batch apart."""
    return math.ceil(math.log2(size))


def replaced(
    batch: Batch, synthesise: Synthesiser, kinds: Sequence[float]
) -> Iterator[tuple[Tensor, Batch]]:
    """The rows that have other contents, ``[B]``, and the batch with these."""
    size = _size(batch)
    numbers, drawn = torch.arange(size), synthesise(size, _generator(1))
    for k in range(2 * bits(size)):
        bit, one = divmod(k, 2)
        rows = (numbers >> bit) & 1 == one
        kind = (*kinds, PADDING)[bit % (len(kinds) + 1)]
        if (bit + one) % 2:
            other = varied(drawn, (*kinds, PADDING), k)
        elif kind == kinds[0]:  # twins of a row that stays
            other = _alike(batch, (~rows).nonzero().flatten(), k)
        else:
            other = varied(_alike(drawn, numbers, k), (kind,), k)
        yield rows, _where(rows, other, batch)


def without_finite(batch: Batch) -> Iterator[tuple[Tensor, Batch]]:
    """Every second row NaN; then the others infinite, and as large as numbers are.

    Nothing where neither inputs nor targets are floating-point numbers.
    """
    numbers = torch.arange(_size(batch))

    def other(path: Any, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point() or is_mask(path):
            return x
        kinds = (math.inf, -math.inf, torch.finfo(x.dtype).max)
        large = torch.tensor(kinds, dtype=x.dtype)[numbers // 2 % len(kinds)]
        values = torch.where(numbers % 2 == 0, math.nan, large)
        return _for_rows(values, x).expand_as(x)

    leaves = tree_flatten((batch.inputs, batch.targets))[0]
    if not any(isinstance(x, Tensor) and x.is_floating_point() for x in leaves):
        return
    strange = Batch(
        tree_map_with_path(other, batch.inputs),
        tree_map_with_path(other, batch.targets),
    )
    for parity in (0, 1):
        rows = numbers % 2 == parity
        yield rows, _where(rows, strange, batch)


def taken_on_cpu(
    model: nn.Module, loss: Callable[[Any, Any], Tensor] | None, batch: Batch
) -> bool:
    """Returns True if a copy of the model on the CPU takes the first rows."""

    def brought(x: Any) -> Any:
        return x[:2].cpu() if isinstance(x, Tensor) else x

    try:
        args, kwargs = as_call(tree_map(brought, batch.inputs))
        with torch.no_grad():
            output = copy.deepcopy(model).cpu()(*args, **kwargs)
            if loss is not None:
                loss(output, tree_map(brought, batch.targets))
    except Exception:  # whatever it is, it would end a GPU's work
        return False
    return True


def varied(batch: Batch, kinds: Sequence[float], seed: int = 0) -> Batch:
    """Each example's floating-point inputs times one of some factors.

    A factor of zero makes an example what padding is: all of its inputs and targets are
    zero, whatever their type.
    """
    size = _size(batch)
    chosen = torch.randint(0, len(kinds), (size,), generator=_generator(seed))
    factor = torch.tensor(kinds)[chosen]

    def scaled(path: Any, x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point() and not is_mask(path):
            x = x * _for_rows(factor, x).to(x.dtype)
        return emptied(x)

    def emptied(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return torch.where(_for_rows(factor != 0, x), x, torch.zeros_like(x))

    return Batch(
        tree_map_with_path(scaled, batch.inputs), tree_map(emptied, batch.targets)
    )


def _alike(batch: Batch, among: Tensor, seed: int) -> Batch:
    """One of some examples in the place of all."""
    one = int(among[torch.randint(0, len(among), (), generator=_generator(seed))])

    def repeat(x: Any) -> Any:
        return x[one].expand_as(x) if isinstance(x, Tensor) else x

    return Batch(tree_map(repeat, batch.inputs), tree_map(repeat, batch.targets))


def _where(rows: Tensor, batch: Batch, other: Batch) -> Batch:
    """The examples of a batch in these rows, and of the other one elsewhere."""

    def choose(x: Any, y: Any) -> Any:
        return torch.where(_for_rows(rows, x), x, y) if isinstance(x, Tensor) else x

    return Batch(
        tree_map(choose, batch.inputs, other.inputs),
        tree_map(choose, batch.targets, other.targets),
    )


def _size(batch: Batch) -> int:
    leaves = tree_flatten(batch.inputs)[0]
    return next(len(x) for x in leaves if isinstance(x, Tensor))


def _for_rows(values: Tensor, x: Tensor) -> Tensor:
    return values.to(x.device).reshape(-1, *([1] * (x.dim() - 1)))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
