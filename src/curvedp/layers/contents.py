"""What pieces of memory hold, bit by bit, however it was written.

A version counter does not move when somebody writes through ``.data`` or numpy, so the
bits themselves are compared. As long as it is little, all of it is copied, which also
says what to put back. Beyond that a piece is *printed*: rows of its 32-bit words times
odd random numbers, added up modulo 2^32. One word that changed always shows, several
stay hidden with a chance of 2^-32, whatever they are. The numbers are drawn for the
process: nobody can aim between them.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch
from torch import Tensor

from curvedp.layers.bits import Flag, any_of, differ

__all__ = ["Contents"]

#: Bytes of which copies are held; the smallest pieces come first.
COPIED = 2**26

#: Words in a row of a print, and in what is multiplied at a time.
_ROW = 2**14
_AT_A_TIME = {"cpu": 2**20, "cuda": 2**26}

_NUMBERS: dict[torch.device, Tensor] = {}


class _Copied:
    """Pieces of one device and dtype, and one copy of them all: a launch each way."""

    def __init__(self, members: list[int], pieces: list[Tensor]) -> None:
        self.members, self.pieces = members, pieces
        self._all = torch.cat(pieces)
        self.held = torch.split_with_sizes(self._all, [len(piece) for piece in pieces])

    def hold(self) -> None:
        torch.cat(self.pieces, out=self._all)

    def differs(self) -> Flag:
        if self._all.device.type == "cpu":  # without another copy
            return not all(map(torch.equal, self.pieces, self.held))
        return differ(torch.cat(self.pieces), self._all)

    def changed(self) -> list[int]:
        pairs = zip(self.members, self.pieces, self.held, strict=True)
        return [i for i, piece, held in pairs if not torch.equal(piece, held)]


class Contents:
    """Bits of the memory that some tensors lie in.

    Args:
        tensors: of any layout that has memory of its own; others are left out.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.words: list[Tensor | None] = [None] * len(tensors)
        known: set[int] = set()
        for i, t in enumerate(tensors):
            piece = _words(t)
            if piece is not None and piece.data_ptr() not in known:
                known.add(piece.data_ptr())
                self.words[i] = piece
        sizes = {i: w.numel() * w.element_size() for i, w in self._pieces()}
        self._printed: list[int] = []
        copied: dict[object, list[int]] = {}
        room = COPIED
        for i in sorted(sizes, key=sizes.__getitem__):
            room -= sizes[i]
            piece = self._piece(i)
            key = (piece.device, piece.dtype)
            kept = copied.setdefault(key, []) if room >= 0 else self._printed
            kept.append(i)
        self._groups = [
            _Copied(members, [self._piece(i) for i in members])
            for members in copied.values()
            if members
        ]
        self._prints: dict[int, Tensor] = {}

    def hold(self) -> None:
        """Remember what they hold now."""
        with torch.no_grad():
            for group in self._groups:
                group.hold()
            self._prints = {i: _print(self._piece(i)) for i in self._printed}

    def differences(self, *, printed: bool = True) -> list[Flag]:
        """Whether something holds something else now; on a GPU nobody waits for it."""
        found = [group.differs() for group in self._groups]
        for i, then in self._prints.items() if printed else ():
            found.append(differ(_print(self._piece(i)), then))
        return found

    def changed(self, *, printed: bool = True) -> list[int]:
        """Which tensors' memory holds something else now; or of those copied alone."""
        found: list[int] = []
        if any_of(self.differences(printed=False)):  # one answer to wait for
            for group in self._groups:
                found += group.changed()
        for i, then in self._prints.items() if printed else ():
            if not torch.equal(_print(self._piece(i)), then):
                found.append(i)
        return found

    def restore(self, i: int) -> bool:
        """Put back what a tensor's memory held; False where no copy is there."""
        then = self.copy_of(i)
        if then is not None:
            with torch.no_grad():
                self._piece(i).copy_(then)
        return then is not None

    def copy_of(self, i: int) -> Tensor | None:
        """What its memory held, as words."""
        for group in self._groups:
            if i in group.members:
                return group.held[group.members.index(i)]
        return None

    def was(self, i: int, other: Tensor) -> bool:
        """Whether a printed tensor's memory held just this."""
        words = _words(other.to(self._piece(i).device))
        then = self._prints.get(i)
        if words is None or then is None or words.shape != self._piece(i).shape:
            return False
        return torch.equal(_print(words), then)

    def _pieces(self) -> list[tuple[int, Tensor]]:
        return [(i, w) for i, w in enumerate(self.words) if w is not None]

    def _piece(self, i: int) -> Tensor:
        piece = self.words[i]
        assert piece is not None
        return piece


def _words(t: Tensor) -> Tensor | None:
    """The memory that a tensor lies in, as whole numbers; None where it has none."""
    try:
        storage = t.untyped_storage()
        size = storage.nbytes()
        if size == 0 or t.device.type == "meta" or storage.data_ptr() == 0:
            return None
    except (RuntimeError, NotImplementedError):  # sparse, wrapped, traced
        return None
    wide = size % 4 == 0
    empty = torch.empty(0, dtype=torch.int32 if wide else torch.uint8, device=t.device)
    return empty.set_(storage, 0, (size // 4 if wide else size,), (1,))


def _print(words: Tensor) -> Tensor:
    """Sums of rows times odd numbers; the last row may be short."""
    numbers = _numbers(words.device)
    body = len(words) // _ROW * _ROW
    rows = max(1, _AT_A_TIME.get(words.device.type, 2**20) // _ROW)
    found = [
        (part * numbers).sum(1)
        for part in torch.split(words[:body].view(-1, _ROW), rows)
        if body
    ]
    rest = words[body:]
    found.append((rest * numbers[: len(rest)]).sum().view(1))
    return torch.cat(found)


def _numbers(device: torch.device) -> Tensor:
    if device not in _NUMBERS:
        generator = torch.Generator().manual_seed(secrets.randbits(63))
        drawn = torch.randint(-(2**31), 2**31, (_ROW,), generator=generator)
        _NUMBERS[device] = (drawn.to(torch.int32) | 1).to(device)
    return _NUMBERS[device]
