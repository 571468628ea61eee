"""What is no container and no tensor in a model: its bytes, and the way back.

Arrays, buffers and files in memory are read and written by their bytes; objects with
slots by identity; what only pickle can look into by what pickle says.
"""

from __future__ import annotations

import array
import io
import itertools
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvedp.layers.parts import parts_of

__all__ = [
    "Leaf",
    "Place",
    "array_leaf",
    "buffer_leaf",
    "missing",
    "objects_leaf",
    "parts_leaf",
    "pickled_leaf",
    "slots",
    "slots_leaf",
    "stream_leaf",
]

#: A module's full name, and its attribute or buffer; None for the module's own
#: dictionaries, whose keys are the attributes.
Place = tuple[str, str | None]

#: Bytes of what only pickle can look into; what takes more is left alone.
PICKLED = 2**16

#: Stands where there is no value.
missing = object()


@dataclass(frozen=True, eq=False)
class Leaf:
    """Something that is written into where it stands, and no tensor.

    Attributes:
        where: its place.
        read: its bytes now.
        write: puts bytes back; None if it can only be replaced.
        then: its bytes when it was looked at.
        value: what stands there, if it can only be replaced.
        held: what its bytes stand for, if they do not tell it.
    """

    where: Place
    read: Callable[[], bytes]
    write: Callable[[bytes], None] | None
    then: bytes
    value: Any = None
    held: Callable[[], Any] | None = None

    def same(self) -> bool:
        """Whether it holds the same bytes."""
        return self.read() == self.then


def slots(value: Any) -> list[str]:
    """Names of an object's slots."""
    kinds = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = itertools.chain.from_iterable(
        (slots,) if isinstance(slots, str) else slots for slots in kinds
    )
    return [n for n in names if n not in ("__dict__", "__weakref__")]


def identity_leaf(
    where: Place, values: Callable[[], list[Any]], put: Callable[[list[Any]], None]
) -> Leaf:
    """Of values in a row, which are compared by identity."""
    held = values()

    def read() -> bytes:
        now = values()
        same = len(now) == len(held) and all(map(is_, now, held))
        return b"same" if same else b"other"

    return Leaf(where, read, lambda _: put(held), b"same", held=values)


def slots_leaf(value: Any, names: list[str], where: Place) -> Leaf:
    """The values that an object has in its slots."""

    def put(held: list[Any]) -> None:
        for n, then in zip(names, held, strict=True):
            if then is not missing:
                object.__setattr__(value, n, then)
            elif hasattr(value, n):
                object.__delattr__(value, n)

    return identity_leaf(
        where, lambda: [getattr(value, n, missing) for n in names], put
    )


def objects_leaf(value: Any, where: Place) -> Leaf:
    """Of an array of objects."""
    view = value.reshape(value.shape or (1,))

    def put(held: list[Any]) -> None:
        for index, then in zip(np.ndindex(view.shape), held, strict=True):
            view[index] = then

    return identity_leaf(where, lambda: list(view.flat), put)


def parts_leaf(value: Tensor, where: Place) -> Leaf:
    """Of a tensor without memory: which memory its parts lie in."""
    whole = value.detach()  # holds the same parts

    def read() -> bytes:
        parts = [(p.data_ptr(), p.shape) for p in parts_of(value) or []]
        merged = value.layout == torch.sparse_coo and value.is_coalesced()
        return repr((parts, value.shape, merged)).encode()

    def write(_: bytes) -> None:
        value.data = whole

    return Leaf(where, read, write, read(), held=lambda: value)


def array_leaf(value: Any, where: Place) -> Leaf:
    """The numbers of a numpy array."""

    def write(then: bytes) -> None:
        value[...] = np.frombuffer(then, value.dtype).reshape(value.shape)

    return Leaf(where, value.tobytes, write, value.tobytes())


def stream_leaf(value: Any, where: Place) -> Leaf | None:
    """Of a file in memory: its text and its position."""
    kinds: list[Any] = [io.BytesIO, io.StringIO]
    kind = next((k for k in kinds if isinstance(value, k)), None)
    if kind is None or value.closed:
        return None

    def read() -> bytes:  # without its attributes, which come last
        return b"" if value.closed else pickle.dumps(kind.__getstate__(value)[:-1])

    def write(then: bytes) -> None:
        kind.__setstate__(value, (*pickle.loads(then), None))

    return Leaf(where, read, write, read())


def buffer_leaf(value: Any, where: Place) -> Leaf | None:
    """Anything with bytes of its own that may be written into."""
    try:
        view = memoryview(value)
    except TypeError:
        return None
    then = view.tobytes()
    view.release()  # or it could not grow

    def write(content: bytes) -> None:
        if isinstance(value, bytearray):
            value[:] = content
        elif isinstance(value, array.array):
            del value[:]
            value.frombytes(content)
        else:
            memoryview(value).cast("B")[:] = content

    return Leaf(where, lambda: memoryview(value).tobytes(), write, then)


def pickled_leaf(value: Any, where: Place) -> Leaf | None:
    """What pickle says of it; what cannot be pickled does not leave with the model."""
    try:
        then = pickle.dumps(value)
    except Exception:  # of whatever kind
        return None
    if len(then) > PICKLED:
        return None
    return Leaf(where, lambda: pickle.dumps(value), None, then, value)
