"""Do two batches have the same rows, up to padding and to what was drawn?

A collate function may draw random numbers: from the global generators, or from one of
its own. Batches are compared bit for bit under the same random state, under many of
them: a function may mix rows now and then. If it left the generators alike each time,
it drew the same numbers for both batches, and a difference is not the draws'. Else (how
often it draws depends on the examples; or the generator is its own) the entries count
that are the same in many draws of each batch; and where none is, nothing can be said.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

__all__ = [
    "Change",
    "Runs",
    "Side",
    "aligned",
    "changed",
    "is_rows",
    "lost",
    "seeded",
    "tensors_of",
]

#: For each dimension, whether the shorter stands at the end of the longer.
Side = tuple[bool, ...]

#: How often a function that draws is asked, to see what it does not draw.
DRAWS = (8, 32)
#: Random states under which it is asked whether two batches are the same.
SEEDS = 24


class Change(NamedTuple):
    """Where a row is another one; or all of it is drawn, and nobody can say."""

    place: str
    drawn: bool = False


class Runs:
    """Batches of the same records under several random states, row by row."""

    def __init__(self, batch: Callable[[], Any], count: int) -> None:
        self._batch, self._count = batch, count
        self._made: list[dict[str, list[Any]]] = []
        self._left: list[Hashable] = []

    def __getitem__(self, seed: int) -> dict[str, list[Any]]:
        while len(self._made) <= seed:
            with seeded(len(self._made)):
                batch = self._batch()
                self._left.append(_generators())
            self._made.append(_by_row(batch, self._count))
        return self._made[seed]

    def left(self, seed: int) -> Hashable:
        """The state in which it left the generators."""
        self[seed]
        return self._left[seed]

    @cached_property
    def repeats(self) -> bool:
        """Whether the same random state gives the same batch."""
        with seeded(0):
            again = _by_row(self._batch(), self._count)
        return not any(
            _apart([self[0][place][i]], [again[place][i] if place in again else None])
            for place, i in product(self[0], range(self._count))
        )

    def row(self, place: str, i: int, draws: range) -> list[Any]:
        """What it is under each random state; None where it is not there."""
        rows = (self[seed].get(place) for seed in draws)
        return [None if found is None else found[i] for found in rows]


def changed(before: Runs, after: Runs, rows: Collection[int]) -> Change | None:
    """Where one of the rows is another one, or None; up to padding."""
    place, alike = None, True
    for seed in range(SEEDS):
        place = place or _first(before, after, rows, range(seed, seed + 1))
        left = before.left(seed), after.left(seed)
        alike = alike and left[0] == left[1]
        with seeded(seed):
            drawn = left != (_generators(),) * 2
        if place and not alike:
            break
        if not drawn:  # neither of them draws from these
            break
    if place is None:
        return None
    if alike and before.repeats and after.repeats:
        return Change(place)
    for draws in DRAWS:
        place = _first(before, after, rows, range(draws))
        if place is None:
            break
    if place is not None:
        return Change(place)
    for place, i in product(before[0], rows):
        if _all_drawn(before.row(place, i, range(DRAWS[0]))):
            return Change(place, drawn=True)
    return None


def lost(before: Runs, after: Runs, row: int) -> str | None:
    """Where one example alone has what its row among others has not, or None.

    How many numbers are drawn differs then, so only what is not drawn is compared.
    """
    place = None
    for draws in (1, *DRAWS):
        place = _first(before, after, [0], range(draws), shift=row)
        if place is None:
            return None
    return place


def _first(
    before: Runs,
    after: Runs,
    rows: Collection[int],
    draws: range,
    shift: int | None = None,
) -> str | None:
    """Where a row differs in what is the same in these draws."""
    differ = (
        place
        for place, i in product(before[draws[0]], rows)
        if _apart(
            before.row(place, i, draws),
            after.row(place, i + (shift or 0), draws),
            grows=shift is not None,
        )
    )
    return next(differ, None)


def _all_drawn(row: list[Any]) -> bool:
    """Whether it is of numbers of which no two draws share one: noise, and no mask."""
    if not all(isinstance(x, Tensor) and x.is_floating_point() for x in row):
        return False
    return not any(
        x.numel() == 0 or (x.shape == y.shape and bool(_same(x, y).any()))
        for x, y in pairwise(row)
    )


def _generators() -> Hashable:
    """The state of each generator that a function may draw from."""
    _, keys, *rest = np.random.get_state(legacy=True)
    drawn = bytes(torch.get_rng_state().tolist())
    return random.getstate(), np.asarray(keys).tobytes(), *rest, drawn


def _apart(one: list[Any], other: list[Any], *, grows: bool = False) -> bool:
    """Whether two rows differ in what is the same in all their draws."""
    if not all(isinstance(x, Tensor) for x in [*one, *other]):
        settled = all(_equal(x, y) for own in (one, other) for x, y in pairwise(own))
        # what is no tensor and not a row of its own may tell of the batch's lengths
        return settled and not grows and not _equal(one[0], other[0])
    if len({x.shape for x in one}) > 1 or len({x.shape for x in other}) > 1:
        return False  # even its length is drawn
    x, y = torch.stack(one), torch.stack(other)
    if grows and any(n > m for n, m in zip(x.shape, y.shape, strict=False)):
        return True
    return all(
        bool((_unsettled(a, b)).any()) for _, (a, b) in _sides(x, y)
    )  # and so if there is none


def _unsettled(a: Tensor, b: Tensor) -> Tensor:
    """Entries that are the same in all draws of a, and in all of b, and differ."""
    fixed = _same(a, a[:1]).all(0) & _same(b, b[:1]).all(0)
    return fixed & ~_same(a[0], b[0])


def _same(x: Tensor, y: Tensor) -> Tensor:
    return (x == y) | (x.isnan() & y.isnan())


def _sides(x: Tensor, y: Tensor) -> Iterator[tuple[Side, tuple[Tensor, Tensor]]]:
    """Both cut to the shape that they share, from each side."""
    if x.dim() != y.dim():
        return
    pairs = zip(x.shape, y.shape, strict=True)
    for side in product(*((False, True) if n != m else (False,) for n, m in pairs)):
        yield side, (aligned(x, y, side), aligned(y, x, side))


def aligned(x: Tensor, like: Tensor, side: Side) -> Tensor:
    """The part of x that has at most the shape of ``like``, on that side."""
    for d, at_end in enumerate(side):
        n = min(x.shape[d], like.shape[d])
        x = x.narrow(d, x.shape[d] - n if at_end else 0, n)
    return x


def _by_row(batch: Any, count: int) -> dict[str, list[Any]]:
    """Rows by place: of tensors, of lists of something else; or the same for all."""
    found = {}
    for path, x in tree_flatten_with_path(batch, is_leaf=partial(is_rows, count))[0]:
        rows = isinstance(x, Tensor) or is_rows(count, x)
        found[keystr(path)] = list(x) if rows else [x] * count
    return found


def is_rows(count: int, x: Any) -> bool:
    """Whether it is a list with an entry for each example that is no tensor."""
    listed = isinstance(x, list) and len(x) == count
    return listed and not any(isinstance(y, Tensor | dict | tuple | list) for y in x)


def tensors_of(batch: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch, by their place in it."""
    for path, x in tree_flatten_with_path(batch)[0]:
        if isinstance(x, Tensor):
            yield keystr(path), x


def _equal(x: Any, y: Any) -> bool:
    try:
        return bool(x == y) or x is y
    except Exception:  # whatever cannot be compared says nothing
        return True


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The same random state each time; the caller's comes back."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
