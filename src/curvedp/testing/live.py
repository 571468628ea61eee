"""Bytes that live tensors take, counted as operations make them.

A GPU's allocator keeps such a record; a CPU has none. Counted on a CPU, with the work
planned as for a GPU (:mod:`curvedp.layers.planned`), it says what a step takes there.
Scratch memory inside of one operation (a convolution's workspace, say) is not seen, and
while somebody counts, autograd adds two gradients up in a third place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

__all__ = ["LiveBytes", "Piece"]


@dataclass(frozen=True)
class Piece:
    """Memory that an operation has made.

    Attributes:
        size: in bytes.
        operation: by torch's name.
        shape: of the tensor that it was made for.
        dtype: likewise.
    """

    size: int
    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class LiveBytes(TorchDispatchMode):
    """Inside of it, every new storage counts until it is freed.

    Args:
        known: tensors whose memory does not count, whenever it was made.

    Attributes:
        peak: most bytes that were alive at once.
        at_peak: what they were.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {_identity(x) for x in known}
        self._made: dict[int, tuple[StorageWeakRef, Piece]] = {}
        self.peak = 0
        self.at_peak: list[Piece] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = {_identity(x) for x in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for x in _tensors(result):
            identity = _identity(x)
            if identity not in given | self._known | self._made.keys():
                storage = x.untyped_storage()
                piece = Piece(storage.nbytes(), str(func), tuple(x.shape), x.dtype)
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._made[identity] = reference, piece
        now = self.now()
        if now > self.peak:
            self.peak = now
            self.at_peak = [piece for _, piece in self._made.values()]
        return result

    def now(self) -> int:
        """Bytes that are live at this moment."""
        self._made = {
            identity: (reference, piece)
            for identity, (reference, piece) in self._made.items()
            if not reference.expired()  # type: ignore[no-untyped-call]
        }
        return sum(piece.size for _, piece in self._made.values())


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_flatten(values)[0] if isinstance(x, Tensor)]


def _identity(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)
