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

Nor may a batch choose its columns: a loop that trims to the longest row of its portion
moves the gradients of all rows. A portion comes the way that the first one of its
shapes came, with the same arguments. Columns that were equal in all portions so far are
not told apart before they differ.
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
    equal_as,
    flat,
    places_in,
    places_of,
    sent,
    width,
)
from curvedp.train.outputs import HARMLESS, Outputs, leaves
from curvedp.train.ways import Known, Table, Way

__all__ = ["GivenRows", "LoopRows"]


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

    def shows(self, x: Tensor) -> Any:
        """Where ``x`` begins, if it is a view of it that stays within each row."""
        own = self.tensor
        if x.untyped_storage().data_ptr() != own.untyped_storage().data_ptr():
            return None
        steps = zip(x.shape[1:], x.stride()[1:], strict=True)
        first = x.storage_offset() - own.storage_offset()
        last = first + sum((size - 1) * step for size, step in steps)
        within = (
            own.is_contiguous()
            and (x.dtype, x.stride(0)) == (own.dtype, own.stride(0))
            and 0 <= first <= last < own.stride(0)
        )
        return first if within else None

    def differs(self) -> bool | Tensor:
        """Whether it was written to; writes through .data and numpy have no version."""
        now = columns_at(self.tensor, places_of(self.tensor))
        return self.is_written or differ(now, self.kept)


@dataclass(frozen=True, repr=False)
class _Argument:
    """A tensor that model or loss is given."""

    where: str
    name: str
    number: int
    tensor: Tensor

    @property
    def key(self) -> Hashable:
        return self.where, self.name, self.number

    @property
    def kind(self) -> tuple[torch.Size, torch.dtype]:
        return self.tensor.shape, self.tensor.dtype


class LoopRows:
    """Makes the comparisons of a run, and remembers the way its tensors come.

    Args:
        rows: of a physical batch.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._ways: dict[Hashable, Any] = {}

    def given(self, batch: Any) -> GivenRows:
        """What the loader is about to hand out."""
        return GivenRows(batch, self._rows, self._ways)


class GivenRows:
    """A batch of the loader, to be compared with what comes back. Private.

    Attributes:
        outputs: what the model made of it.
    """

    def __init__(self, batch: Any, rows: int, ways: dict[Hashable, Any]) -> None:
        self._batch, self._rows, self._ways = batch, rows, ways
        found = list(leaves(batch))
        self._given = [
            _Given.of(x)
            for x in found
            if isinstance(x, Tensor) and x.shape[:1] == (rows,)
        ]
        self._shapes = tuple((g.tensor.shape, g.tensor.dtype) for g in self._given)
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
        said: dict[tuple[str, str, int], Any] = {}
        for name, value in values.items():
            for number, leaf in enumerate(leaves(value)):
                if isinstance(leaf, Tensor):
                    self._compare(_Argument(where, name, number, _plain(leaf)))
                    count += 1
                elif isinstance(leaf, HARMLESS):
                    said[where, name, number] = leaf
                elif not self._has(leaf):
                    kind = type(leaf).__name__
                    said_of = f"is a {kind} that the loader did not give"
                    self._refuse(where, name, said_of)
        if not count:
            self._refuse(where, ", ".join(values), "has none of the batch's tensors")
        self._same_call(where, values, said)

    def _same_call(
        self,
        where: str,
        values: Mapping[str, Any],
        said: dict[tuple[str, str, int], Any],
    ) -> None:
        """Refuse arguments, flags and texts that are others than in the first call."""
        names = {n: len(list(leaves(value))) for n, value in values.items()}
        first = self._ways.setdefault((self._shapes, where), names)
        if first != names:
            changed = sorted(n for n, _ in first.items() ^ names.items())
            self._refuse_choice(where, ", ".join(dict.fromkeys(changed)))
        for key, value in said.items():
            before = self._ways.setdefault(key, value)
            if type(value) is not type(before) or value != before:
                self._refuse_choice(where, str(key[1]))

    def flags(self) -> list[Tensor]:
        """What a GPU has not compared yet; if one is set, ``confirm`` is due."""
        own = [flag for _, flags in self._late for flag in flags]
        return own + self.outputs.flags()

    @torch.no_grad()
    def confirm(self) -> None:
        """Refuse what a GPU found to differ; to be called before anything is summed."""
        for argument, flags in self._late:
            if any_of(flags):
                self._find(argument)
        self._late.clear()
        self.outputs.confirm()

    def _has(self, value: Any) -> bool:
        return isinstance(value, int | float) and value in self._numbers

    def _compare(self, argument: _Argument) -> None:
        x = argument.tensor
        if x.layout is not torch.strided or x.shape[:1] != (self._rows,):
            said = "does not have the rows of the batch"
            self._refuse(argument.where, argument.name, said)
        known: Known | None = self._ways.get((self._shapes, argument.key))
        if known is not None and known.kind != argument.kind:
            self._refuse_choice(argument.where, argument.name)
        view = self._view(x)
        if view is not None and (known is None or known.view == view):
            flags: list[bool | Tensor] = [self._given[view[0]].differs()]
            if known is None and flags[0] is not True:
                way = Way(view[0], *places_in(x, view[1]))
                found = Known(argument.kind, [way], view)
                self._ways[self._shapes, argument.key] = found
        elif known is not None:
            flags = self._differences(x, known.ways)
        else:
            flags = [True]
        if any(flag is True for flag in flags):
            self._find(argument)
            return
        if waiting := [flag for flag in flags if isinstance(flag, Tensor)]:
            self._late.append((argument, waiting))
        if known is not None:
            self._go_on(known)

    def _view(self, x: Tensor) -> tuple[int, int, Hashable] | None:
        """Which of the loader's tensors it is a view of, from where, and how."""
        for i, given in enumerate(self._given):
            if (first := given.shows(x)) is not None:
                return i, first, x.stride()
        return None

    def _go_on(self, known: Known) -> None:
        """Tell apart what this portion tells apart, should the known way be right."""
        known.before = known.others, known.table
        if known.others:
            own = self._given[known.ways[0].source].kept
            known.others = tuple(
                i for i in known.others if equal_as(known.kind[1], own, self._kept(i))
            )
        if known.table is not None:
            known.table = known.table.after(self._tensors(), known.kind[1])

    def _kept(self, source: int) -> Tensor:
        return self._given[source].kept

    def _tensors(self) -> list[Tensor]:
        return [given.tensor for given in self._given]

    def _find(self, argument: _Argument) -> None:
        """Find the way that a tensor came, or refuse it. The CPU waits for a GPU."""
        key = (self._shapes, argument.key)
        known: Known | None = self._ways.get(key)
        ways = self._search(argument)
        if ways is None:
            self._refuse(
                argument.where,
                argument.name,
                "has rows that were changed, mixed or moved on the way, so one example "
                "could move the gradients of others past the clip bound",
            )
        found = ways if known is None else self._other_way(argument, known)
        if found is None:
            self._refuse_choice(argument.where, argument.name)
        self._ways[key] = found

    def _other_way(self, argument: _Argument, known: Known) -> Known | None:
        """Another way that all portions so far came as well, or None."""
        x, (others, table) = argument.tensor, known.before
        if known.view is not None:
            return None
        own = columns_at(x, places_of(x))
        fits = [i for i in others if equal_as(x.dtype, own, self._kept(i))]
        if fits:
            return Known(known.kind, [Way(fits[0])], others=tuple(fits[1:]))
        table = None if table is None else table.fitted(x, self._tensors())
        return None if table is None else self._of_table(x, table)

    def _of_table(self, x: Tensor, table: Table) -> Known | None:
        ways = table.ways()
        if any(flag is not False and bool(flag) for flag in self._unequal(x, ways)):
            return None
        kind = (x.shape, x.dtype)
        return Known(kind, ways, table=table if table.is_open else None)

    def _unequal(self, x: Tensor, ways: list[Way]) -> list[bool]:
        return [
            not equal_as(x.dtype, columns_at(x, w.to), columns_at(g.tensor, at))
            for w in ways
            for g in [self._given[w.source]]
            for at in [None if w.columns is None else w.columns.to(g.tensor.device)]
        ]

    def _differences(self, x: Tensor, ways: list[Way]) -> list[bool | Tensor]:
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

    def _search(self, argument: _Argument) -> Known | None:
        """The way that a tensor came, or None."""
        x = argument.tensor
        places = places_of(x)
        own = columns_at(x, places)
        fits = [
            i
            for i, given in enumerate(self._given)
            if 1 < width(x) == width(given.tensor)
            and not given.is_written
            and equal_as(x.dtype, own, given.kept)
        ]
        if fits:
            return Known(argument.kind, [Way(fits[0])], others=tuple(fits[1:]))
        sources = {i: g for i, g in enumerate(self._given) if not bool(g.differs())}
        if not sources or x.itemsize > 8:
            return None
        to = torch.arange(width(x)) if places is None else places
        return self._chosen_columns(x, to.to(x.device), sources)

    def _chosen_columns(
        self, x: Tensor, to: Tensor, sources: dict[int, _Given]
    ) -> Known | None:
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
        if not bool((theirs[found] == own).all()):
            return None
        kept = torch.isin(theirs, own)
        numbers = [
            torch.full((e - s,), i) for i, (s, e) in zip(sources, spans, strict=True)
        ]
        columns = [torch.arange(e - s) for s, e in spans]
        table = Table(
            to,
            torch.cat(numbers).to(x.device)[kept],
            torch.cat(columns).to(x.device)[kept],
            (kept.cumsum(0) - 1)[found],
            theirs[kept],
        )
        return self._of_table(x, table)

    def _refuse_choice(self, where: str, name: str) -> NoReturn:
        raise LoopError(
            f"{where} was not given what private.loader gave: {name} came another way "
            "than in the first portion with tensors of these shapes (other columns, "
            "another shape or dtype, another flag or text): where a batch chooses, one "
            "example could move the gradients of all",
            "do the same to every portion; trim in collate_fn, which is tried, or in "
            "the model's forward with a mask, and keep flags constant",
        )

    def _refuse(self, where: str, name: str, problem: str) -> NoReturn:
        raise LoopError(
            f"{where} was not given what private.loader gave: {name} {problem}",
            "let the loader do what the loop does to it: make_private(..., "
            f"prepare=lambda batch: {_line(self._batch, name)}), with the loop's own "
            "line in the place of change (x / 255, a one-hot vector, noise for each "
            "row); casts, layouts and slices within a row may stay in the loop, and "
            "what is the same for all rows belongs into the model",
        )


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
