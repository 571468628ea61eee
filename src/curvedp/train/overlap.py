"""Is what was declared public the private data, or a part of it?

The declaration is the user's, and no look at rows can prove it. A slip can be seen: the
same dataset under another name, a subset of it that training uses too, a copy of its
rows. Parts of one dataset that do not meet (volunteers who agreed, say) may be declared
apart.

A copy is told by contents where both sides lie in memory: when at least half of the
rows that were declared public are rows that the private data has exactly once. So no
single private record decides (rows that many share, as in a table of few categories,
count for nothing). That a run is refused is still something that nobody paid for, as
every failure is.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from curvedp.errors import ConfigurationError

__all__ = ["refuse_private_rows"]

#: Rows of the public side whose contents are looked for.
LOOKED_FOR = 1024
#: More bytes of private rows than this are not read to find a copy.
LARGEST_READ = 2**32


def refuse_private_rows(public: Any, private: Any, what: str) -> None:
    """Refuse data that was declared public and is, or holds, what is trained on.

    Args:
        public: dataset or tensor of inputs.
        private: dataset that is trained on.
        what: names the public one in the message.
    """
    if public is None or private is None:
        return
    if _meet(public, private) or _copied(public, private):
        raise ConfigurationError(
            f"{what} holds rows of the private data itself: what is made of them is a "
            "release that nobody paid for",
            "give data of people whom the run need not protect and who are not in the "
            'training data; for research without a guarantee there is probe="oracle"',
        )


def _meet(public: Any, private: Any) -> bool:
    """Whether they share an example by identity or by memory."""
    pairs = [(p, q) for p in _parts(public) for q in _parts(private)]
    return any(_same(p, q) for p, q in pairs)


def _parts(data: Any, rows: set[int] | None = None) -> Iterator[tuple[Any, Any]]:
    """Datasets that it is made of, each with the rows of it; None stands for all."""
    if isinstance(data, Subset):
        chosen = [int(i) for i in data.indices]
        kept = chosen if rows is None else [chosen[i] for i in rows if i < len(chosen)]
        yield from _parts(data.dataset, set(kept))
    elif isinstance(data, ConcatDataset) and rows is None:
        for part in data.datasets:
            yield from _parts(part)
    else:
        yield data, rows


def _same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    (data, rows), (own, chosen) = one, other
    if data is own:
        return rows is None or chosen is None or bool(rows & chosen)
    if rows is not None or chosen is not None:
        return False  # parts of two objects: told by contents
    return any(_overlap(x, y) for x in _inputs(data) for y in _inputs(own))


def _inputs(data: Any) -> list[Tensor]:
    """The inputs of a dataset in memory; labels and masks may well be shared."""
    if isinstance(data, Tensor):
        return [data]
    tensors = getattr(data, "tensors", None)
    if not isinstance(tensors, tuple | list):
        return []
    return [x for x in tensors[:1] if isinstance(x, Tensor)]


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Whether a row of one begins where a row of the other does."""
    if (
        x.numel() == 0
        or y.numel() == 0
        or x.device != y.device
        or not x.dim() * y.dim()
    ):
        return False
    return bool(np.isin(_starts(x), _starts(y)).any())


def _starts(x: Tensor) -> npt.NDArray[np.int64]:
    step = x.stride(0) * x.element_size()
    return x.data_ptr() + step * np.arange(len(x), dtype=np.int64)


def _copied(public: Any, private: Any) -> bool:
    """Whether most public rows are rows that the private data has once."""
    shown, own = _rows(public, LOOKED_FOR), _rows(private, None)
    if shown is None or own is None or shown.shape[1:] != own.shape[1:]:
        return False
    if shown.dtype != own.dtype or own.numel() * own.element_size() > LARGEST_READ:
        return False
    counts = Counter(_digests(own))
    found = sum(counts[digest] == 1 for digest in _digests(shown))
    return 2 * found >= len(shown) > 0


def _rows(data: Any, most: int | None) -> Tensor | None:
    """Inputs of a dataset that lies in memory as a tensor; at most so many rows."""
    if isinstance(data, Subset):
        inner = _rows(data.dataset, None)
        chosen = torch.as_tensor(list(data.indices), dtype=torch.long)[:most]
        return None if inner is None else inner[chosen.to(inner.device)]
    found = _inputs(data)
    return found[0].detach()[:most] if found else None


def _digests(rows: Tensor) -> Iterator[bytes]:
    flat = rows.cpu().contiguous().reshape(len(rows), -1).view(torch.uint8).numpy()
    return (hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in flat)
