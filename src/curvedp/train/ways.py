"""The way that a tensor came from the loader's: which columns stand where.

Equal columns leave that open: padding, or two tensors that only later portions tell
apart. All of them are kept, with a number for what each held so far; another one may
take a place only if it held the same in all portions before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from curvedp.train.columns import column_hashes, columns_at, sent

__all__ = ["Known", "Table", "Way"]

#: Odd, so that what columns held before stays in their number.
_MIX = 6364136223846793005


@dataclass(frozen=True, repr=False)
class Way:
    """Columns of the loader's tensor ``source`` that stand at ``to``.

    None for the public places, where they are the same in both.
    """

    source: int
    columns: Tensor | None = None
    to: Tensor | None = None


@dataclass(frozen=True, repr=False)
class Table:
    """Columns that may stand at places of a tensor.

    Attributes:
        to: the places.
        sources: for each column of the table that of the loader's tensors.
        columns: and which of its columns it is.
        at: row of the table for each place.
        seen: a number for what each of them held so far.
    """

    to: Tensor
    sources: Tensor
    columns: Tensor
    at: Tensor
    seen: Tensor

    def ways(self) -> list[Way]:
        """What stands where, for each of the loader's tensors."""
        sources, columns = self.sources[self.at], self.columns[self.at]
        return [
            Way(i, columns[sources == i], self.to[sources == i])
            for i in sorted(set(sources.tolist()))
        ]

    @property
    def is_open(self) -> bool:
        """Whether some of its columns were equal."""
        return len(set(self.seen.tolist())) < len(self.seen)

    def after(self, given: Sequence[Tensor], dtype: torch.dtype) -> Table:
        """With another portion of the loader's tensors."""
        now = torch.zeros_like(self.seen)
        for i, tensor in enumerate(given):
            here = self.sources == i
            own = columns_at(tensor, self.columns[here].to(tensor.device)).to(dtype)
            now[here] = sent(column_hashes(own), now.device)
        return replace(self, seen=self.seen * _MIX + now)

    def fitted(self, x: Tensor, given: Sequence[Tensor]) -> Table | None:
        """With the columns that ``x`` has and that held the same until now, or None."""
        after = self.after(given, x.dtype)
        own = self.seen[self.at] * _MIX + column_hashes(columns_at(x, self.to))
        ordered, order = after.seen.sort(stable=True)
        at = order[torch.searchsorted(ordered, own).clamp_max(len(ordered) - 1)]
        at = torch.where(after.seen[self.at] == own, self.at, at)
        return replace(after, at=at) if bool((after.seen[at] == own).all()) else None


@dataclass(repr=False)
class Known:
    """How an argument came in the portions of these shapes so far.

    Attributes:
        kind: its shape and dtype.
        ways: what stands where.
        view: its place in the loader's memory, where it was a view: nothing is open.
        others: the loader's tensors that held the same as the one of the way.
        table: columns that held the same as others of them.
        before: ``others`` and ``table`` without the present portion.
    """

    kind: tuple[torch.Size, torch.dtype]
    ways: list[Way]
    view: object = None
    others: tuple[int, ...] = ()
    table: Table | None = None

    def __post_init__(self) -> None:
        self.before = self.others, self.table
