"""Columns of flattened rows: which of them two tensors are compared in, and how.

A column is one place of the row, in all rows. Small tensors are compared in all their
columns, large ones in a few that follow from their shape alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from curvedp.layers import bits
from curvedp.sampling import as_bits

__all__ = [
    "column_hashes",
    "columns_at",
    "differ",
    "equal_as",
    "flat",
    "places_in",
    "places_of",
    "sent",
    "width",
]

#: Elements of a tensor that is compared whole.
WHOLE = 2**17

#: Places of a row that are compared in a larger one, in runs that share a cache line.
PLACES, RUN = 128, 8

#: Elements that are hashed at a time.
CHUNK = 2**22


def width(x: Tensor) -> int:
    """Elements of a row."""
    return x.numel() // len(x)


def flat(x: Tensor) -> Tensor:
    """Rows as vectors."""
    return x.flatten(1) if x.dim() > 1 else x[:, None]


def columns_at(x: Tensor, places: Tensor | None) -> Tensor:
    """Columns of the flattened rows ``[B, k]``; all of them for None."""
    if places is None or x.dim() == 1:
        return flat(x)
    if x.is_contiguous():
        return flat(x).index_select(1, places)
    index: Any = (slice(None), *torch.unravel_index(places, x.shape[1:]))
    return x[index]


def places_of(x: Tensor) -> Tensor | None:
    """Where rows are compared; None for everywhere."""
    if x.numel() <= WHOLE or width(x) <= PLACES:
        return None
    return _spread(width(x), x.device)


@lru_cache(maxsize=256)
def _spread(width: int, device: torch.device) -> Tensor:
    """Runs of places from a width alone: at both ends, where texts are, and between.

    Multiples of the golden ratio meet no row or channel of an image twice.
    """
    last = width - RUN
    between = [int(last * (k * 0.6180339887498949 % 1)) for k in range(PLACES // RUN)]
    starts = sorted([last, *between[: PLACES // RUN - 1]])
    found = sorted({start + k for start in starts for k in range(RUN)})
    return torch.tensor(found, device=device)


def sent(x: Tensor, device: torch.device) -> Tensor:
    """On a device; to a GPU from pinned memory, for which the CPU need not wait."""
    if x.device == device:
        return x
    if device.type == "cuda" and x.device.type == "cpu":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def differ(x: Tensor, y: Tensor) -> bits.Flag:
    """Whether any bit differs."""
    return bits.differ(as_bits(x), as_bits(y))


def equal_as(dtype: torch.dtype, x: Tensor, y: Tensor) -> bool:
    """Whether values are equal after a cast; NaN is NaN, whatever its bits are."""
    x, y = x.to(dtype), sent(y, x.device).to(dtype)
    if x.shape != y.shape:
        return False
    return bool(((x == y) | (x.isnan() & y.isnan())).all())


def places_in(x: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Columns of a contiguous tensor that a view has from ``first`` on, and where."""
    places = places_of(x)
    to = torch.arange(width(x), device=x.device) if places is None else places
    columns = torch.full_like(to, first)
    if x.dim() > 1:
        index = torch.unravel_index(to, x.shape[1:])
        for at, step in zip(index, x.stride()[1:], strict=True):
            columns += at * step
    return columns, to


def column_hashes(x: Tensor) -> Tensor:
    """A number for each column ``[k]``, the same on each device for equal columns."""
    factors = _factors(len(x), x.device)
    total = torch.zeros(x.shape[1], dtype=torch.int64, device=x.device)
    step = max(1, CHUNK // max(1, x.shape[1]))
    for start in range(0, len(x), step):
        part = x[start : start + step]
        if part.is_floating_point():
            part = part.masked_fill(part.isnan(), torch.nan)
        total += (as_bits(part) * factors[start : start + step, None]).sum(0)
    return total


@lru_cache(maxsize=16)
def _factors(rows: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    return (2 * drawn + 1).to(device)
