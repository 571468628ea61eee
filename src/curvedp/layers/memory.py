"""Which memory a tensor lies in, whether it lives, whether it was written to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from curvedp.errors import LoopError

__all__ = ["alive", "is_plain", "refuse_written", "version", "weakly"]


def version(x: Tensor) -> int:
    """A number that moves when the tensor is written to."""
    return 0 if x.is_inference() else x._version


def weakly(x: Tensor) -> StorageWeakRef:
    """A reference to a tensor's memory that lets it go.

    As long as the reference is there, no other piece of memory has its identity.
    """
    return StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]


def alive(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """The memory, if some tensor still lies in it."""
    found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(
        reference.cdata
    )
    return found


def is_plain(x: Any) -> bool:
    """Whether it has memory of its own to ask for: no subclass, no tensor of vmap."""
    return (
        isinstance(x, Tensor)
        and type(x) in (Tensor, torch.nn.Parameter)
        and x.layout is torch.strided
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    )


def refuse_written(x: Tensor, before: int) -> None:
    """Refuse a tensor that was written to since it had this version."""
    if version(x) != before:
        raise LoopError(
            "a tensor that the backward pass needs was modified in place after it "
            "was used",
            "use the out-of-place form of the operation",
        )
