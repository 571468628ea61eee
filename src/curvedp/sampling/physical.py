"""Fixed-size physical batches: padded, masked inside, accumulated to logical ones.

A Poisson draw has a random size, from empty to larger than memory. The loader cuts it
into physical batches of one fixed size and fills the last one up with zero examples:
shapes are static, an empty draw is an ordinary batch of padding, and a draw of any size
fits. Which rows are real travels beside the batch, not in it.

The user's collate function, workers and pinned memory do what they always do: fetching
goes through ``torch.utils.data.DataLoader``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    TensorDataset,
)

from curvedp.errors import DataError, withheld
from curvedp.sampling.cyclic import Sampler
from curvedp.sampling.people import People
from curvedp.sampling.prepare import (
    MOST_ROWS,
    Prepare,
    independent_rows,
    made_up,
    prepared,
)
from curvedp.sampling.rows import Collate, RowCollate
from curvedp.sampling.views import Views
from curvedp.sampling.watched import WatchedDataset, watched_options

__all__ = ["PhysicalBatch", "PhysicalLoader", "gathers"]

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, repr=False)
class PhysicalBatch:
    """A portion of a logical batch. Private.

    Attributes:
        data: what the collate function gave, padded to the physical size.
        present: ``[P]``, True for real examples.
        step: the logical step.
        completes: whether this is the last portion of its logical batch.
    """

    data: Any
    present: Tensor
    step: int
    completes: bool


class PhysicalLoader:
    """Draws logical batches and yields them in physical portions.

    Args:
        dataset: map-style, with a length.
        sampler: draws the examples of a step.
        physical_batch_size: P; every batch has this many rows.
        collate: the user's collate function, which is tried here if it was not before;
            None takes torch's default.
        options: further ``DataLoader`` arguments (workers, pinned memory, ...).
        people: who the examples belong to, if the person is the unit: the sampler then
            draws persons, and each has K rows in its physical batch.
        views: random views of each example, which have K rows in the same way.
        prepare: makes of each batch what the loop gets; the last thing that is done.

    Raises:
        ConfigurationError: ``prepare`` mixes rows.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: Sampler,
        physical_batch_size: int,
        *,
        collate: Collate | None = None,
        options: Mapping[str, Any] | None = None,
        people: People | None = None,
        views: Views | None = None,
        prepare: Prepare | None = None,
    ) -> None:
        self._views = views
        self._prepare = prepare
        self._dataset = dataset
        self._people = people
        self._size = population(dataset) if people is None else len(people)
        self._sampler = sampler
        self._slots = 1 if people is None else people.slots
        if views is not None:
            assert people is None  # refused where both are given
            self._slots = views.count
        self._units = max(1, physical_batch_size // self._slots)
        self._physical = self._units * self._slots
        self._options = dict(options or {})
        self._collate = RowCollate.of(dataset, collate)
        if people is not None:
            self._collate.refuse_lists()
        # A whole batch of a tensor dataset is one gather instead of P of them.
        self._gather = gathers(dataset) and self._collate.stacks and not self._options
        if self._gather:
            self._devices = {t.device for t in dataset.tensors}
        self._numbers = torch.arange(self._physical)
        self._empty = self._collate.template
        if prepare is not None:
            size = min(self._physical, MOST_ROWS)
            make = partial(made_up, self._empty, size)
            independent_rows(prepare, make, size, "prepare=")

    @property
    def physical_batch_size(self) -> int:
        """P, the rows of every batch."""
        return self._physical

    @property
    def slots(self) -> int:
        """Rows of one unit: K for persons and for views, otherwise 1."""
        return self._slots

    @property
    def shown(self) -> Views | None:
        """How views are made; None where examples are shown as they are."""
        return self._views

    @property
    def views(self) -> int:
        """Views of an example, whose mean gradient is clipped."""
        return 1 if self._views is None else self._views.count

    def template(self) -> Any:
        """A batch of one example, for its shapes; the values mean nothing."""
        return self._empty

    def steps(self, first: int, stop: int) -> Iterator[PhysicalBatch]:
        """Physical batches of the logical steps ``first, ..., stop - 1``."""
        facts: deque[tuple[int, int, Tensor | int, bool]] = deque()

        def portions() -> Iterator[Rows]:
            for step in range(first, stop):
                drawn = self._sampler.draw(step, self._size)
                cut = range(0, max(1, len(drawn)), self._units)
                for start in cut:
                    part = drawn[start : start + self._units]
                    rows, places = self._rows(part, step)
                    facts.append((step, start, places, start == cut[-1]))
                    yield rows

        for data in self._fetch(portions()):
            step, start, places, completes = facts.popleft()
            present = self._present(places)
            if self._views is not None:
                data = self._views.expand(data, step, start)
            data = self._placed(data, places)
            if self._prepare is not None:
                with withheld("prepare="):
                    data = prepared(self._prepare, data, self._physical)
            yield PhysicalBatch(data, present, step, completes)

    def _rows(self, units: Rows, step: int) -> tuple[Rows, Tensor | int]:
        """Examples of the drawn units, and the rows of the batch that they go to.

        Rows by number, or as many as are said, from the first on.
        """
        if self._people is None:
            return units, len(units) * self._slots
        rows = [self._people.rows(int(person), step) for person in units]
        places = [k * self._slots + np.arange(len(own)) for k, own in enumerate(rows)]
        nobody = [np.zeros(0, dtype=np.int64)]
        return np.concatenate(rows or nobody), torch.from_numpy(
            np.concatenate(places or nobody)
        )

    def _present(self, places: Tensor | int) -> Tensor:
        if isinstance(places, int):
            return self._numbers < places
        present = torch.zeros(self._physical, dtype=torch.bool)
        present[places] = True
        return present

    def _placed(self, data: Any, places: Tensor | int) -> Any:
        """Move the fetched rows, which stand first, to their places."""
        if isinstance(places, int) or len(places) == self._physical:
            return data
        count = len(places)
        order = torch.full((self._physical,), count)  # row `count` is padding: zeros
        order[places] = torch.arange(count)
        return tree_map(lambda x: x[order] if isinstance(x, Tensor) else x, data)

    def _fetch(self, portions: Iterator[Rows]) -> Iterator[Any]:
        if self._gather:
            for part in portions:
                tensors = self._dataset.tensors
                rows = {device: _index(part, device) for device in self._devices}
                yield [_gathered(t, rows[t.device], self._fetched) for t in tensors]
        else:
            loader: DataLoader[Any] = DataLoader(
                WatchedDataset(self._dataset, singly=self._people is not None),
                batch_sampler=_Portions(portions),
                collate_fn=_PaddedCollate(self._collate, self._empty, self._fetched),
                **watched_options(self._options),
            )
            with withheld("the DataLoader"):
                fetched = iter(loader)
            end = object()
            try:
                while True:
                    with withheld("the DataLoader"):
                        data = next(fetched, end)
                    if data is end:
                        return
                    yield data
            finally:
                del fetched  # its workers end now, and not when a traceback is dropped

    @property
    def _fetched(self) -> int:
        """Rows before views are made of them."""
        return self._physical if self._views is None else self._units


def _index(rows: Rows, device: torch.device) -> Tensor:
    """Row numbers on a device.

    They are copied from pinned memory. From any other the CPU would wait until the GPU
    has done all that was asked of it before.
    """
    index = torch.from_numpy(rows)
    if device.type == "cuda":
        index = index.pin_memory()
    return index.to(device, non_blocking=True)


def _gathered(x: Tensor, rows: Tensor, size: int) -> Tensor:
    """Rows of x by number, and zeros until there are ``size``."""
    found = x.new_empty(size, *x.shape[1:])
    torch.index_select(x.detach(), 0, rows, out=found[: len(rows)])
    found[len(rows) :].zero_()
    return found


class _Portions:
    """A batch sampler out of an iterator; DataLoader asks for an iterable."""

    def __init__(self, portions: Iterator[Rows]) -> None:
        self._portions = portions

    def __iter__(self) -> Iterator[list[int]]:
        return (rows.tolist() for rows in self._portions)


@dataclass(frozen=True)
class _PaddedCollate:
    """The user's collate function, then padding; a class, so that it pickles."""

    collate: RowCollate
    empty: Any
    size: int

    def __call__(self, examples: list[Any]) -> Any:
        with withheld("collate_fn"):
            batch = self.collate(examples) if examples else self.empty
        return pad_batch(batch if examples else _no_rows(batch), self.size)


def pad_batch(batch: Any, size: int) -> Any:
    """Append zero examples until every tensor has ``size`` rows."""

    def pad(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.shape[0] == size:
            return x
        return torch.cat([x, x.new_zeros(size - x.shape[0], *x.shape[1:])])

    return tree_map(pad, batch)


def gathers(dataset: Any) -> bool:
    """Whether ``dataset[i]`` is row i of each of its tensors, and nothing besides.

    A subclass with a way of its own to give examples is asked for them that way.
    """
    kinds = type(dataset).__mro__
    owner = next((kind for kind in kinds if "__getitem__" in vars(kind)), object)
    plain = owner is TensorDataset or vars(owner).get("gathers_rows", False)
    return plain and not hasattr(dataset, "__getitems__")


def population(dataset: Any) -> int:
    """Number of examples, or an error that says what kind of dataset is needed."""
    with withheld("len(dataset)"):
        try:
            size = len(dataset)
        except TypeError:
            size = None
    indexed = hasattr(dataset, "__getitem__")
    # a stream's base class has a __getitem__ that is not implemented
    if size is None or not indexed or isinstance(dataset, IterableDataset):
        raise DataError(
            f"{type(dataset).__name__} is a stream, or has no length or no indexing; "
            "Poisson sampling draws each example on its own",
            "give a map-style dataset with __len__ and __getitem__ (store a stream to "
            "disk first)",
        )
    if size == 0:
        raise DataError("the dataset is empty", "give at least one example")
    return int(size)


def _no_rows(batch: Any) -> Any:
    return tree_map(lambda x: x[:0] if isinstance(x, Tensor) else x, batch)
