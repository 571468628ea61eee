"""Functions of a whole batch that the loader runs, tried for keeping rows apart.

What a loop does to a batch between loader and model (scaling, one-hot vectors, labels
of padding) may mix rows, and then one example moves the gradients of others. A loop
cannot be tried on made-up batches; a function can. So the loader runs it: ``prepare=``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from curvedp.errors import ConfigurationError, DataError
from curvedp.sampling.alike import seeded

__all__ = ["Prepare", "as_bits", "independent_rows", "made_up", "prepared"]

#: From a batch to a batch of as many rows.
Prepare = Callable[[Any], Any]

#: Rows that a function is tried with at most.
MOST_ROWS = 4096

#: Random states that it is tried from, for what it mixes in some batches only, and rows
#: that it is given then. What is mixed once in 20 batches is missed once in 26 times.
STATES, FEW_ROWS = 64, 8

#: By their size in bytes.
_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_APART = (
    "make each row from the same row alone, with constants that were declared before "
    "training; draw random numbers from torch's own generator"
)


def prepared(function: Prepare, batch: Any, rows: int) -> Any:
    """What the function makes of a batch.

    Raises:
        DataError: there are not as many rows.
    """
    with torch.no_grad():
        made = function(batch)
    leaves = [x for x in tree_flatten(made)[0] if isinstance(x, Tensor)]
    if not leaves or any(x.shape[:1] != (rows,) for x in leaves):
        raise DataError(
            f"prepare= made of a batch of {rows} rows: "
            + (", ".join(str(tuple(x.shape)) for x in leaves) or "no tensor"),
            "return tensors (or tuples and dictionaries of them) with one row for each "
            "row of the batch, in its order",
        )
    return made


def independent_rows(
    function: Prepare, make: Callable[[torch.Generator], Any], size: int, name: str
) -> None:
    """Refuse a function of a batch in which a row depends on another row.

    The rows are changed in sets, those whose number has a bit set and those whose
    number has not: any two rows differ in a bit, so each is once changed while the
    other stays. What stays must give the same bits.

    Args:
        function: from rows to rows.
        make: draws ``size`` made-up rows.
        size: number of rows; where nothing depends on it, the physical batch size.
        name: of the function, for the error.

    Raises:
        ConfigurationError: a row depends on another one, or on what was seen before.
    """
    first, second = (make(torch.Generator().manual_seed(seed)) for seed in (0, 1))
    own = _result(function, first, size)
    if not _same(own, _result(function, first, size), slice(None)):
        raise ConfigurationError(
            f"{name} gives the same batch another result the second time, from the "
            "same random state: it remembers batches, or draws of its own",
            _APART,
        )
    few = _first_rows((first, second), size, FEW_ROWS)
    number = min(size, FEW_ROWS)
    try:
        _result(function, few[0], number)
    except Exception:  # it is for batches of one size
        few, number = (first, second), size
    everywhere = [(first, second, size, 0, has) for has in _halves(size)]
    halves = _halves(number)
    sometimes = [
        (*few, number, state, halves[state % len(halves)])
        for state in range(STATES)
        if halves
    ]
    for before, other, count, state, changed in everywhere + sometimes:
        ours = own if state == 0 and count == size else None
        ours = ours or _result(function, before, count, state)
        mixed = _result(function, _mixed(before, other, changed), count, state)
        if not _same(ours, mixed, ~changed):
            raise ConfigurationError(
                f"{name} mixes rows: on made-up rows, what it makes of one changes "
                "with the others, so one example would move the gradients of "
                "others",
                _APART,
            )


def _halves(size: int) -> list[Tensor]:
    """For each bit of a row's number, the rows in which it is 1, and the others."""
    numbers = torch.arange(size)
    has = [(numbers >> bit & 1).bool() for bit in range((size - 1).bit_length())]
    return [rows for one in has for rows in (one, ~one)]


def _first_rows(batches: Any, size: int, few: int) -> Any:
    def take(x: Any) -> Any:
        return x[:few] if isinstance(x, Tensor) and len(x) == size else x

    return tree_map(take, batches)


def made_up(template: Any, size: int, generator: torch.Generator) -> Any:
    """Rows of a template's shapes: floats in [0, 1], whole numbers 0 and 1.

    Those are valid as pixels, as probabilities, as token ids and as labels.
    """

    def draw(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        shape = (size, *x.shape[1:])
        if x.is_floating_point() or x.is_complex():
            drawn = torch.rand(shape, generator=generator)
        else:
            drawn = torch.randint(0, 2, shape, generator=generator)
        return drawn.to(x.device, x.dtype)

    return tree_map(draw, template)


def as_bits(x: Tensor) -> Tensor:
    """The same memory read as whole numbers, so that equal bits are equal (NaN too)."""
    if x.itemsize > 8:
        x = torch.view_as_real(x)
    return x.view(_WHOLE_NUMBERS[x.itemsize])


def _result(function: Prepare, batch: Any, size: int, state: int = 0) -> list[Any]:
    copied = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, batch)
    with torch.random.fork_rng(), seeded(state):
        torch.manual_seed(state)
        return tree_flatten(prepared(function, copied, size))[0]


def _mixed(first: Any, second: Any, changed: Tensor) -> Any:
    def take(x: Any, y: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        x = x.clone()
        x[changed.to(x.device)] = y[changed.to(x.device)]
        return x

    return tree_map(take, first, second)


def _same(ours: list[Any], theirs: list[Any], rows: Any) -> bool:
    return len(ours) == len(theirs) and all(
        _same_leaf(x, y, rows) for x, y in zip(ours, theirs, strict=True)
    )


def _same_leaf(x: Any, y: Any, rows: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        alike = (x.shape, x.dtype) == (y.shape, y.dtype)
        return alike and torch.equal(as_bits(x[rows]), as_bits(y[rows]))
    plain = isinstance(x, int | float | str)
    return type(x) is type(y) and (not plain or repr(x) == repr(y))
