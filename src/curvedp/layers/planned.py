"""For which kind of device the work of a layer is planned.

A GPU has other ways than a CPU: larger chunks, sums from patches, tiles. They are
chosen here by where a tensor lies, and can be chosen without a GPU, so that a machine
that has none can test them and count what they take.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

__all__ = ["kind_of", "planned_for"]

_chosen: ContextVar[str | None] = ContextVar("kind", default=None)


def kind_of(x: Tensor) -> str:
    """Type of the device that a tensor lies on, or that its work is planned for."""
    return _chosen.get() or x.device.type


@contextmanager
def planned_for(kind: str) -> Iterator[None]:
    """Inside, all work is done the way of this kind of device, wherever it is done."""
    token = _chosen.set(kind)
    try:
        yield
    finally:
        _chosen.reset(token)
