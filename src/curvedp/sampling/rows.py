"""A collate function, tried: a row for each example, and no other's.

Row i of a batch is clipped as example i, and where persons are the unit it is put among
the rows of whoever example i belongs to. A collate function that sorts, filters, splits
or mixes examples breaks that, and nothing in the batch shows it. So it is tried when
it is attached, on records of which none is private (:mod:`curvedp.sampling.records`):

- in batches of 2, 3 and more, half of the records are replaced, by each bit of their
  number and both ways. No other row may change, so a row depends on its record alone;
- a row has all that its record alone gives: it may be padded, not cut;
- with records of different lengths, to find out what is padded: see :class:`Beside`.

A function that draws (masks, noise) is compared under the same random states, and on
what it does not draw where it does not draw as often then.

At every portion of a run the rows are as many as the examples, in tensors that were
there in the trial, and differ in no length in which they did not differ there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, combinations, product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map
from torch.utils.data import default_collate

from curvedp.errors import ConfigurationError, DataError, withheld
from curvedp.sampling.alike import (
    Change,
    Runs,
    changed,
    is_rows,
    lost,
    seeded,
    tensors_of,
)
from curvedp.sampling.records import (
    FILLED,
    NUMBERS,
    GivenRecords,
    MadeUpRecords,
    Records,
    Sizes,
    as_dicts,
)

__all__ = ["Beside", "Collate", "RowCollate"]

Collate = Callable[[list[Any]], Any]
#: A length of the batch, by tensor and dimension.
Length = tuple[str, int]

#: Batches of the trial, and the largest one for records of more than LARGE numbers.
BATCHES = (2, 3, 17)
LARGE, FEW = 100_000, 3

_SAMPLE = "give sample=[...], some public examples in the form of the dataset's"


@dataclass(frozen=True)
class Beside:
    """Two kinds of records, of which the shorter is padded beside the longer one.

    Attributes:
        short: number of a given record, or lengths of a made-up one.
        long: the same for the other.
        lengths: what is another length then.
    """

    short: tuple[int, Sizes]
    long: tuple[int, Sizes]
    lengths: frozenset[Length]


@dataclass(frozen=True, eq=False)
class RowCollate:
    """A collate function that gives a row for each example.

    Attributes:
        collate: the user's.
        records: what it was tried on.
        template: a batch of one example, all zeros.
        found: kinds of records that were collated together.
        free: lengths that may differ from the template's; None if all may.
    """

    collate: Collate
    records: Records
    template: Any
    found: tuple[Beside, ...] = ()
    free: frozenset[Length] | None = None

    @classmethod
    def of(
        cls,
        dataset: Any,
        collate: Collate | None = None,
        sample: Sequence[Any] | None = None,
    ) -> RowCollate:
        """Try a collate function; torch's default needs none, it stacks."""
        if isinstance(collate, RowCollate):
            return collate
        records: Records
        if sample is None:
            with withheld("the dataset"):
                records = MadeUpRecords(dataset[0])
        else:
            records = GivenRecords(sample)
        if collate is None or collate is default_collate:
            if sample is not None:
                raise ConfigurationError(
                    "sample is what a collate function is tried on, and there is none",
                    "leave it out: torch's own puts each example into its row",
                )
            trial = cls(default_collate, records, None)
            return replace(trial, template=_template(trial.collated([records.make(0)])))
        with seeded(0):  # the caller's random state is left alone
            trial = cls(collate, _understood(collate, records), None)
            trial = replace(
                trial, template=_template(trial.collated([records.make(0)]))
            )
            trial = replace(trial, found=tuple(_neighbours(trial)))
            trial._try_order()
        lengths = (beside.lengths for beside in trial.found)
        return replace(trial, free=frozenset().union(*lengths))

    @cached_property
    def _expected(self) -> dict[str, Tensor]:
        return dict(tensors_of(self.template))

    @property
    def stacks(self) -> bool:
        """Whether it is torch's own."""
        return self.collate is default_collate

    def __call__(self, examples: list[Any]) -> Any:
        """A batch of the run."""
        batch = as_dicts(self.collate(examples))
        expected = self._expected
        for number, (place, x) in enumerate(tensors_of(batch), 1):
            if place not in expected or x.dim() != expected[place].dim():
                # a key may be a record's text, unless it was there in the trial
                told = place if place in expected else f"(number {number} of the batch)"
                raise DataError(
                    f"the collate function gave a tensor {told} that it did not give "
                    "when it was tried",
                    "return the same tensors for all examples, or " + _SAMPLE,
                )
            if x.shape[0] != len(examples):
                raise DataError(
                    "the collate function gave another number of rows than of examples"
                    f"{place and f', in {place}'}: a row that is nobody's, or a second "
                    "one of an example, is not bounded",
                    "return one row per example; filter and split in the dataset",
                )
            if self.free is None or len(examples) == 1:
                continue
            like = expected[place].shape
            for d in range(1, x.dim()):
                if x.shape[d] != like[d] and (place, d) not in self.free:
                    raise DataError(
                        f"dimension {d} of a batch{place and f'[{place}]'} varies, and "
                        "no padding of it was tried that the model could take",
                        "pad it to a declared length; or give sample=[...], public "
                        "examples of different lengths",
                    )
        return batch

    def __getstate__(self) -> dict[str, Any]:
        """A worker needs nothing to try it on."""
        return {**vars(self), "records": None, "found": ()}

    def refuse_lists(self) -> None:
        """Refuse what is no tensor and has an entry for each example.

        It would stay where it is when rows are put beside those of their person.
        """
        leaves = tree_flatten_with_path(self.template, is_leaf=partial(is_rows, 1))[0]
        for path, x in leaves:
            if is_rows(1, x):
                raise DataError(
                    "a batch has a list with an entry for each example "
                    f"{keystr(path)}, which is not put in the order of persons",
                    "return tensors, or leave it out of the examples",
                )

    def collated(self, records: Sequence[Any]) -> Any:
        """A batch of records that are nobody's."""
        try:
            batch = as_dicts(self.collate([_copied(record) for record in records]))
        except Exception as error:  # the user's, of whatever kind
            raise DataError(
                f"the collate function raised {type(error).__name__} on {len(records)} "
                "public examples, or records made up from the types and shapes of the "
                "dataset's",
                _SAMPLE,
            ) from error
        leaves = tree_flatten_with_path(batch)[0]
        if any(isinstance(x, np.ndarray) for _, x in leaves):
            raise DataError(
                "the collate function gives arrays, which are neither padded nor moved",
                "return tensors (torch.as_tensor)",
            )
        shapes = [tuple(x.shape) for _, x in leaves if isinstance(x, Tensor)]
        if not shapes or any(not s or s[0] != len(records) for s in shapes):
            raise DataError(
                "the collate function must give tensors with one row per example, and "
                f"for {len(records)} of them it gave "
                + (", ".join(map(str, shapes)) or "no tensor"),
                "return tensors (or tuples and dictionaries of them) of shape "
                "[batch, ...]",
            )
        return batch

    def _try_order(self) -> None:
        made = isinstance(self.records, MadeUpRecords)
        small = _numbers(self.template) <= LARGE
        for count, lengths in product(BATCHES if small else (2, FEW), self._lengths()):
            own, other = (
                [self.records.make(i + shift, lengths(i)) for i in range(count)]
                for shift in (0, count + 1 if made else 1)
            )
            before = Runs(partial(self.collated, own), count)
            for bit, side in product(range((count - 1).bit_length()), (0, 1)):
                stays = [i for i in range(count) if (i >> bit) & 1 != side]
                mixed = [own[i] if i in stays else other[i] for i in range(count)]
                after = Runs(partial(self.collated, mixed), count)
                _refuse_changed(changed(before, after, stays))
            if count <= FEW:
                for i in range(count):
                    alone = Runs(partial(self.collated, own[i : i + 1]), 1)
                    _refuse_cut(lost(alone, before, i))

    def _lengths(self) -> list[Callable[[int], Sizes]]:
        """Lengths of record i: each differs where it can, and so does each filling."""
        filled = [b for b in self.found if FILLED in b.short[1]]
        longer = [b for b in self.found if b not in filled and b.short[1]]
        longer.sort(key=lambda beside: not beside.lengths)

        def between(beside: Beside) -> Callable[[int], Sizes]:
            low, high = beside.short[1], beside.long[1]
            return lambda i: {
                k: int(np.random.default_rng(i).integers(low[k], high[k] + 1))
                for k in low
            }

        chosen = [between(beside) for beside in (*longer[:1], *filled[:1])]
        return chosen or [lambda i: {}]


def _copied(record: Any) -> Any:
    """A record that the function may take to pieces; others are made of it too."""
    try:
        return copy.deepcopy(record)
    except Exception:  # a public example of whatever class
        return record


def _refuse_changed(change: Change | None) -> None:
    place = change and change.place
    if change is not None and change.drawn:
        raise DataError(
            "how many random numbers the collate function draws depends on the "
            f"examples, and every entry of a row is drawn{place and f' (in {place})'}: "
            "whether it mixes examples cannot be seen",
            "draw as many numbers for each example, from the global generators; or "
            "draw in the dataset, or in augment=",
        )
    if place is not None:
        raise DataError(
            "a row that the collate function gives changes when another example of "
            f"the batch does{place and f' (in {place})'}: it sorts the examples or "
            "mixes them, and a row would be taken for somebody else's",
            "return the rows in the order of the examples, each made of its own "
            "example (pack_padded_sequence: enforce_sorted=False)",
        )


def _refuse_cut(place: str | None) -> None:
    if place is not None:
        raise DataError(
            "the collate function gives an example another row beside others than "
            f"alone{place and f' (in {place})'}, and not by padding only",
            "make each row of its own example: pad to the longest or to a declared "
            "length; cut to a declared length, not to the shortest",
        )


def _understood(collate: Collate, records: Records) -> Records:
    """Records whose numbers the function takes: it may look them up in a table."""
    if isinstance(records, MadeUpRecords):
        for high in (NUMBERS, 10, 2):
            records.high = high
            try:
                collate([records.make(0), records.make(1)])
            except Exception:  # the next range may do; else it is raised by name
                continue
            return records
    return records


def _neighbours(trial: RowCollate) -> Iterator[Beside]:
    """Kinds of records that are collated together; those of more lengths first."""
    records = trial.records
    kinds: list[list[tuple[tuple[int, Sizes], tuple[int, Sizes]]]]
    if isinstance(records, GivenRecords):
        few = range(min(len(records), 12))
        kinds = [[((i, {}), (j, {}))] for i, j in product(few, few) if i != j]
    else:
        assert isinstance(records, MadeUpRecords)
        kinds = [[((0, s), (1, t)) for s, t in pairs] for pairs in _sizes(records)]
    for pairs in kinds:
        refusals = 0
        for short, long in pairs:
            one, other = records.make(*short), records.make(*long)
            try:
                twins, mixed = trial.collated([one, one]), trial.collated([one, other])
            except DataError:
                refusals += 1
                if refusals > 2:
                    break  # not a length that may differ
                continue
            yield Beside(short, long, frozenset(_differing(twins, mixed)))


def _sizes(records: MadeUpRecords) -> Iterator[list[tuple[Sizes, Sizes]]]:
    """Shorter and longer lengths. Those that are equal in the record vary together."""
    groups: dict[int, list[tuple[int, int]]] = {}
    for k, leaf in enumerate(records.leaves):
        for d, n in enumerate(leaf.shape):
            groups.setdefault(n, []).append((k, d))
    for n, members in groups.items():
        m = min(n, 16)
        pairs = [(m // 2, m), (n // 2, n), (n, n + 3), (n, 2 * n + 8), (n, 4 * n + 64)]
        counts = range(len(members), 0, -1) if len(members) <= 4 else (len(members), 1)
        for chosen in chain(*(combinations(members, count) for count in counts)):
            yield [
                (dict.fromkeys(chosen, low), dict.fromkeys(chosen, high))
                for low, high in dict.fromkeys(pairs)
                if 0 < low < high
            ]
    if groups:
        yield [({FILLED: 40}, {FILLED: 100})]


def _differing(x: Any, y: Any) -> Iterator[Length]:
    other = dict(tensors_of(y))
    for place, t in tensors_of(x):
        if place in other:
            for d, (n, m) in enumerate(zip(t.shape, other[place].shape, strict=False)):
                if n != m:
                    yield place, d


def _numbers(batch: Any) -> int:
    return sum(x.numel() for _, x in tensors_of(batch))


def _template(batch: Any) -> Any:
    return tree_map(
        lambda x: torch.zeros_like(x) if isinstance(x, Tensor) else x, batch
    )
