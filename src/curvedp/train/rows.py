"""What reaches model and loss in a loop: the loader's rows, in its order.

Padding is masked by place and a row's gradient is clipped as one example's, so a loop
that sorts a batch, mixes its rows or centres them gives others' gradients a part of an
example, past the bound. Nothing of that shows in what the model does. So every tensor
that the model or the loss is given is compared with what the loader gave.

A tensor passes if each of its columns (places of the flattened row) is, in all rows, a
column of the loader's tensors after a cast: so do copies, casts, layouts, slices and
chosen columns, however they were made, and nothing that moves or mixes rows. Small
tensors are compared whole, large ones at public places, the same for all rows. On a GPU
the answer is waited for when the sum is taken in, not before.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch import Tensor

from curvedp.errors import LoopError
from curvedp.layers.bits import any_of
from curvedp.layers.memory import version
from curvedp.train.columns import (
    column_hashes,
    columns_at,
    differ,
    equal_values,
    flat,
    places_of,
    sent,
    width,
)
from curvedp.train.outputs import Outputs, leaves

__all__ = ["GivenRows", "LoopRows"]

#: Ways that tensors are known to have come; a loop has a few for each shape of batch.
MOST_WAYS = 64


@dataclass(frozen=True, repr=False)
class _Given:
    """A tensor of the loader's batch, and what it held when it was handed out."""

    tensor: Tensor
    version: int
    kept: Tensor

    @classmethod
    def of(cls, x: Tensor) -> _Given:
        x = _plain(x)
        places = places_of(x)
        kept = columns_at(x, places)
        return cls(x, version(x), kept.clone() if places is None else kept)

    @property
    def is_written(self) -> bool:
        """Whether its version says so."""
        return version(self.tensor) != self.version

    def shows(self, x: Tensor) -> bool:
        """Whether ``x`` is a view of it that stays within each row."""
        own = self.tensor
        if x.untyped_storage().data_ptr() != own.untyped_storage().data_ptr():
            return False
        steps = zip(x.shape[1:], x.stride()[1:], strict=True)
        first = x.storage_offset() - own.storage_offset()
        last = first + sum((size - 1) * step for size, step in steps)
        return (
            own.is_contiguous()
            and (x.dtype, x.stride(0)) == (own.dtype, own.stride(0))
            and 0 <= first <= last < own.stride(0)
        )

    def differs(self) -> bool | Tensor:
        """Whether it was written to; writes through .data and numpy have no version."""
        now = columns_at(self.tensor, places_of(self.tensor))
        return self.is_written or differ(now, self.kept)


@dataclass(frozen=True)
class _Way:
    """Columns of the loader's tensor ``source`` that stand at ``to``.

    None for the public places, where they are the same in both.
    """

    source: int
    columns: Tensor | None = None
    to: Tensor | None = None


@dataclass(frozen=True, repr=False)
class _Argument:
    """A tensor that model or loss is given."""

    where: str
    name: str
    number: int
    tensor: Tensor

    @property
    def key(self) -> Hashable:
        x = self.tensor
        return self.where, self.name, self.number, x.shape, x.dtype


class LoopRows:
    """Makes the comparisons of a run, and remembers the way its tensors come.

    Args:
        rows: of a physical batch.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._ways: dict[Hashable, list[_Way]] = {}

    def given(self, batch: Any) -> GivenRows:
        """What the loader is about to hand out."""
        return GivenRows(batch, self._rows, self._ways)


class GivenRows:
    """A batch of the loader, to be compared with what comes back. Private.

    Attributes:
        outputs: what the model made of it.
    """

    def __init__(self, batch: Any, rows: int, ways: dict[Hashable, list[_Way]]) -> None:
        self._batch, self._rows, self._ways = batch, rows, ways
        found = list(leaves(batch))
        self._given = [
            _Given.of(x)
            for x in found
            if isinstance(x, Tensor) and x.shape[:1] == (rows,)
        ]
        self._numbers = [x for x in found if isinstance(x, int | float)]
        self._late: list[tuple[_Argument, list[Tensor]]] = []
        self.outputs = Outputs(rows)

    @torch.no_grad()
    def require(self, where: str, values: Mapping[str, Any]) -> None:
        """Refuse tensors and numbers that are not the loader's.

        Raises:
            LoopError: names what differs, never a value.
        """
        count = 0
        for name, value in values.items():
            for number, leaf in enumerate(leaves(value)):
                if isinstance(leaf, Tensor):
                    self._compare(_Argument(where, name, number, _plain(leaf)))
                    count += 1
                elif not isinstance(leaf, _HARMLESS) and not self._has(leaf):
                    said = f"is a {type(leaf).__name__} that the loader did not give"
                    self._refuse(where, name, said)
        if not count:
            self._refuse(where, ", ".join(values), "has none of the batch's tensors")

    def flags(self) -> list[Tensor]:
        """What a GPU has not compared yet; if one is set, ``confirm`` is due."""
        return [flag for _, own in self._late for flag in own]

    @torch.no_grad()
    def confirm(self) -> None:
        """Refuse what a GPU found to differ; to be called before anything is summed."""
        for argument, flags in self._late:
            if any_of(flags):
                self._find(argument)
        self._late.clear()

    def _has(self, value: Any) -> bool:
        return isinstance(value, int | float) and value in self._numbers

    def _compare(self, argument: _Argument) -> None:
        x = argument.tensor
        if x.layout is not torch.strided or x.shape[:1] != (self._rows,):
            said = "does not have the rows of the batch"
            self._refuse(argument.where, argument.name, said)
        whole = [given for given in self._given if given.shows(x)]
        if whole:
            flags = [whole[0].differs()]
        elif (ways := self._ways.get(argument.key)) is not None:
            flags = self._differences(x, ways)
        else:
            flags = [True]
        if any(flag is True for flag in flags):
            self._find(argument)
        elif waiting := [flag for flag in flags if isinstance(flag, Tensor)]:
            self._late.append((argument, waiting))

    def _find(self, argument: _Argument) -> None:
        """Find the way that a tensor came, or refuse it. The CPU waits for a GPU."""
        ways = self._search(argument.tensor)
        if ways is None:
            self._refuse(
                argument.where,
                argument.name,
                "has rows that were changed, mixed or moved on the way, so one example "
                "could move the gradients of others past the clip bound",
            )
        if len(self._ways) >= MOST_WAYS:
            self._ways.clear()
        self._ways[argument.key] = ways

    def _differences(self, x: Tensor, ways: list[_Way]) -> list[bool | Tensor]:
        """Whether the columns are others than the loader's, bit by bit."""
        flags: list[bool | Tensor] = []
        for way in ways:
            if way.source >= len(self._given):
                return [True]
            source = self._given[way.source]
            if way.columns is None:
                flags.append(source.is_written)
                expected, to = source.kept, places_of(x)
            else:
                flags.append(source.differs())
                expected, to = columns_at(source.tensor, way.columns), way.to
            own = columns_at(x, to)
            if flags[-1] is True or own.shape != expected.shape:
                return [True]
            flags.append(differ(own, sent(expected, x.device).to(x.dtype)))
        return flags

    def _search(self, x: Tensor) -> list[_Way] | None:
        """The way that a tensor came, or None."""
        places = places_of(x)
        own = columns_at(x, places)
        for i, given in enumerate(self._given):
            fits = not given.is_written and width(given.tensor) == width(x)
            if fits and equal_values(own, given.kept.to(x.device).to(x.dtype)):
                return [_Way(i)]
        sources = {i: g for i, g in enumerate(self._given) if not bool(g.differs())}
        if not sources or x.itemsize > 8:
            return None
        to = torch.arange(width(x)) if places is None else places
        return self._chosen_columns(x, to.to(x.device), sources)

    def _chosen_columns(
        self, x: Tensor, to: Tensor, sources: dict[int, _Given]
    ) -> list[_Way] | None:
        """Which of the loader's columns stand at places of a tensor, by hashes."""
        own = column_hashes(columns_at(x, to))
        theirs = torch.cat(
            [
                column_hashes(flat(g.tensor).to(x.device).to(x.dtype))
                for g in sources.values()
            ]
        )
        ordered, order = theirs.sort(stable=True)
        found = order[torch.searchsorted(ordered, own).clamp_max(len(theirs) - 1)]
        ends = [*accumulate(width(g.tensor) for g in sources.values())]
        spans = list(zip([0, *ends[:-1]], ends, strict=True))
        for start, end in spans:  # among equal columns rather the one at the same place
            same = (start + to).clamp_max(end - 1)
            found = torch.where(theirs[same] == own, same, found)
        ways = []
        for (i, given), (start, end) in zip(sources.items(), spans, strict=True):
            here = (found >= start) & (found < end)
            if bool(here.any()):
                columns = (found[here] - start).to(given.tensor.device)
                ways.append(_Way(i, columns, to[here]))
                expected = columns_at(given.tensor, columns).to(x.device).to(x.dtype)
                if not equal_values(columns_at(x, to[here]), expected):
                    return None
        return ways

    def _refuse(self, where: str, name: str, problem: str) -> NoReturn:
        raise LoopError(
            f"{where} was not given what private.loader gave: {name} {problem}",
            "let the loader do what the loop does to it: make_private(..., "
            f"prepare=lambda batch: {_line(self._batch, name)}), with the loop's own "
            "line in the place of change (x / 255, a one-hot vector, noise for each "
            "row); casts, layouts and slices within a row may stay in the loop, and "
            "what is the same for all rows belongs into the model",
        )


#: What carries no row and no number.
_HARMLESS = (bool, str, type(None), torch.dtype, torch.device)


def _line(batch: Any, name: str) -> str:
    """The body of a ``prepare=`` that changes what was refused."""
    pair = isinstance(batch, tuple | list) and len(batch) == 2
    inputs, whole = (batch[0], "batch[0]") if pair else (batch, "batch")
    if pair and name == "targets":
        return "(batch[0], change(batch[1]))"
    changed = f"change({whole})"
    if isinstance(inputs, Mapping) and name in inputs:
        changed = f"{{**{whole}, {name!r}: change({whole}[{name!r}])}}"
    return f"({changed}, batch[1])" if pair else changed


def _plain(x: Tensor) -> Tensor:
    """The same memory and version, without a graph and a subclass's ways."""
    x = x.detach()
    return x if type(x) is Tensor else x.as_subclass(Tensor)
