"""Tensors without memory of their own: sparse ones, by what they are made of."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from curvedp.errors import CoverageError

__all__ = ["parts_of"]

#: Methods that give the parts of a layout.
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def parts_of(t: Tensor, name: str = "of a model") -> list[Tensor] | None:
    """Tensors that a tensor is made of; None if it has memory of its own.

    Args:
        t: any tensor.
        name: of its place, for the error.

    Raises:
        CoverageError: it has neither, or no shape yet.
    """
    if isinstance(t, UninitializedBuffer | UninitializedParameter):
        raise CoverageError(
            f"the tensor {name!r} has no shape yet (a Lazy layer's)",
            "run the model once over an example batch that is public, then build the "
            "optimiser and attach",
        )
    if t.layout in _PARTS:
        whole = t.detach()
        return [getattr(whole, part)() for part in _PARTS[t.layout]]
    if hasattr(t, "__tensor_flatten__"):  # a wrapper says so itself
        return [getattr(t, part) for part in t.__tensor_flatten__()[0]]
    try:
        watched = not t.is_nested
        t.data_ptr()
    except (RuntimeError, NotImplementedError):
        watched = False
    if not watched:
        raise CoverageError(
            f"the tensor {name!r} ({type(t).__name__}, {t.layout}) has no memory that "
            "can be watched in private passes",
            "hold it as plain or sparse tensors (its values and its lengths)",
        )
    return None
