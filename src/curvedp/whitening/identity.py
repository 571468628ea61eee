"""No whitening: plain DP-SGD, and the reference that every other map starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from curvedp.barrier import IDENTITY_FRAME
from curvedp.layers.io import LayerIO

__all__ = ["IdentityWhitener"]


@dataclass(frozen=True)
class IdentityWhitener:
    """``P = I``."""

    @property
    def frame(self) -> str:
        return IDENTITY_FRAME

    def sq_norms(self, io: LayerIO) -> Tensor:
        return io.sq_norms()

    def sum_dtype(self, io: LayerIO) -> torch.dtype | None:
        return None

    def apply(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(values)

    adjoint = apply
    inverse = apply

    def row_sq_norms(
        self, like: Mapping[str, Tensor], *, inverse: bool = False
    ) -> dict[str, Tensor]:
        return {name: torch.ones_like(v) for name, v in like.items()}

    def materialize(self, like: Mapping[str, Tensor]) -> Tensor:
        return torch.eye(sum(v.numel() for v in like.values()))
