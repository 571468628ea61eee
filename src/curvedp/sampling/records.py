"""Made-up records: the types and shapes of a dataset's examples, and nothing else.

What a collate function does to examples is tried on records that nobody owns. Of the
private dataset one record's types and shapes are read: numbers, arrays, tensors, texts
(how many words), images, and dictionaries, tuples and lists of them. Their values are
random, words are :data:`WORDS`. So types and shapes count as public; where they are
not, or a record is of a class that cannot be made up, public examples are given.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten_with_path,
    tree_unflatten,
)

from curvedp.errors import DataError

__all__ = [
    "FILLED",
    "Bounds",
    "GivenRecords",
    "MadeUpRecords",
    "Records",
    "Sizes",
    "as_dicts",
]

#: What made-up texts are made of.
WORDS = ("a", "the", "of", "and", "to", "in", "is", "it", "you", "that", "was", "for")

#: Made-up whole numbers are below this, unless somebody knows better.
NUMBERS = 1000

#: Other lengths than those of the record, by leaf and dimension.
Sizes = Mapping[tuple[int, int], int]
#: Among them, how many hundredths of each array are filled; the rest is zero, as that
#: of a record which the dataset has padded.
FILLED = (-1, -1)
#: Other ranges ``[low, high)`` of whole numbers, by leaf.
Bounds = Mapping[int, tuple[int, int]]


class Records(Protocol):
    """Where records for trials come from."""

    def make(
        self, number: int, sizes: Sizes | None = None, bounds: Bounds | None = None
    ) -> Any:
        """A record; other numbers have other values."""
        ...


@dataclass(frozen=True)
class Leaf:
    """One part of a record.

    Attributes:
        place: where in the record it stands.
        shape: lengths of its dimensions; words for a text.
        kind: the type of its numbers; "U" where it is made of words.
        wrap: makes the part of an array.
    """

    place: str
    shape: tuple[int, ...]
    kind: np.dtype[Any]
    wrap: Callable[[npt.NDArray[Any]], Any]

    @property
    def is_whole(self) -> bool:
        """Whether it is made of whole numbers."""
        return self.kind.kind in "iu"

    @property
    def is_mask(self) -> bool:
        """Whether it says which positions count; in a record all of them do."""
        return "mask" in self.place.lower()


class GivenRecords:
    """Public examples, in turn."""

    def __init__(self, sample: Sequence[Any]) -> None:
        if len(sample) < 2:
            raise DataError(
                "sample needs at least two public examples",
                "give some, of different lengths if those of the dataset differ",
            )
        self._sample = sample

    def __len__(self) -> int:
        return len(self._sample)

    def make(
        self, number: int, sizes: Sizes | None = None, bounds: Bounds | None = None
    ) -> Any:
        """Example ``number`` of the sample, which begins again at its end."""
        return self._sample[number % len(self._sample)]


class MadeUpRecords:
    """Records like one of the dataset.

    Args:
        record: whose types and shapes are taken; it is not kept.
        high: whole numbers are below this.
    """

    def __init__(self, record: Any, high: int = NUMBERS) -> None:
        parts, self._spec = _flat(as_dicts(record))
        self.leaves = [_leaf(keystr(path), part) for path, part in parts]
        self.high = high

    def make(
        self, number: int, sizes: Sizes | None = None, bounds: Bounds | None = None
    ) -> Any:
        """A record with random values, of other lengths where they are given."""
        made = []
        for k, leaf in enumerate(self.leaves):
            size = [(sizes or {}).get((k, d), n) for d, n in enumerate(leaf.shape)]
            span = (bounds or {}).get(k, (0, self.high))
            if leaf.is_mask:  # hides nothing, as that of an example without padding
                span = (0, 1) if "special" in leaf.place.lower() else (1, 2)
            drawn = _drawn(np.random.default_rng([number, k]), size, span, leaf.kind)
            if drawn.ndim and drawn.dtype.kind != "U":
                drawn[-(-len(drawn) * (sizes or {}).get(FILLED, 100) // 100) :] = 0
            made.append(leaf.wrap(drawn))
        return tree_unflatten(made, self._spec)


def as_dicts(x: Any) -> Any:
    """The same with plain dictionaries in the place of other mappings."""
    if isinstance(x, Mapping):
        return {key: as_dicts(value) for key, value in x.items()}
    if type(x) in (list, tuple):
        return type(x)(map(as_dicts, x))
    return x


def _flat(record: Any) -> tuple[list[tuple[Any, Any]], TreeSpec]:
    parts, spec = tree_flatten_with_path(record, is_leaf=_is_sequence)
    return list(parts), spec


def _is_sequence(x: Any) -> bool:
    """Whether x is a list of numbers or words, or of such lists."""
    if type(x) is not list:
        return False
    numbers = all(isinstance(y, int | float | np.generic) for y in x)
    return numbers or all(isinstance(y, str) for y in x) or all(map(_is_sequence, x))


def _leaf(place: str, x: Any) -> Leaf:
    wrap: Callable[[npt.NDArray[Any]], Any]
    if isinstance(x, Tensor):
        dtype, device = x.dtype, x.device

        def wrap(drawn: npt.NDArray[Any]) -> Any:
            return torch.as_tensor(drawn).to(device, dtype)

        return Leaf(place, tuple(x.shape), _kind(dtype), wrap)
    if isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "biufc":
        taken = np.asarray if isinstance(x, np.ndarray) else lambda drawn: drawn[()]
        return Leaf(place, x.shape, x.dtype, taken)
    if isinstance(x, bool | int | float):
        number = next(t for t in (bool, int, float) if isinstance(x, t))
        return Leaf(place, (), np.dtype(number), lambda drawn: drawn.item())
    if isinstance(x, str):
        words = (max(1, len(x.split())),)
        return Leaf(place, words, np.dtype("U"), lambda drawn: " ".join(drawn.tolist()))
    if isinstance(x, bytes):
        return Leaf(place, (len(x),), np.dtype("u1"), lambda drawn: drawn.tobytes())
    if x is None:
        return Leaf(place, (), np.dtype(bool), lambda drawn: None)
    if _is_sequence(x):
        shape, first = _depth(x)
        kind = np.dtype("U") if isinstance(first, str) else _leaf(place, first).kind
        return Leaf(place, shape, kind, lambda drawn: drawn.tolist())
    if type(x).__module__.startswith("PIL."):
        return _image(place, x)
    raise DataError(
        "no record like those of the dataset can be made up: one has a "
        f"{type(x).__name__}{place and f' at {place}'}",
        "give sample=[...], some public examples in the form of the dataset's",
    )


def _kind(dtype: torch.dtype) -> np.dtype[Any]:
    if dtype == torch.bool:
        return np.dtype(bool)
    inexact = dtype.is_floating_point or dtype.is_complex
    return np.dtype(np.float64 if inexact else np.int64)


def _depth(x: list[Any]) -> tuple[tuple[int, ...], Any]:
    """Lengths of nested lists, by their first elements, and the innermost of those."""
    if not x:
        return (0,), 0
    if not isinstance(x[0], list):
        return (len(x),), x[0]
    shape, first = _depth(x[0])
    return (len(x), *shape), first


def _image(place: str, x: Any) -> Leaf:
    mode, library = x.mode, sys.modules["PIL.Image"]

    def wrap(drawn: npt.NDArray[Any]) -> Any:
        return library.fromarray(drawn.astype("u1")).convert(mode)

    return Leaf(place, (x.height, x.width), np.dtype("u1"), wrap)


def _drawn(
    r: np.random.Generator, shape: list[int], span: tuple[int, int], kind: np.dtype[Any]
) -> npt.NDArray[Any]:
    if kind.kind == "U":
        return r.choice(WORDS, shape)
    if kind.kind == "b":
        return np.ones(shape, dtype=bool)  # as a mask that hides nothing
    if kind.kind in "iu":
        most = int(np.iinfo(kind).max)
        return np.asarray(
            r.integers(min(span[0], most), min(span[1], most), shape, kind)
        )
    return np.asarray(r.random(shape)).astype(kind)
