"""Linear layers with any leading dimensions: ``[B, ..., p] -> [B, ..., r]``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvedp.layers.dense import Geometry

__all__ = ["LinearGeometry"]


@dataclass(frozen=True)
class LinearGeometry(Geometry):
    """All dimensions between the batch and the features are positions."""

    weight: torch.Size

    def input_rows(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], 1, -1, x.shape[-1])

    def output_rows(self, d: Tensor) -> Tensor:
        return d.reshape(d.shape[0], 1, -1, d.shape[-1])

    def weight_sum(self, x: Tensor, d: Tensor) -> Tensor:
        return d.reshape(-1, d.shape[-1]).mT @ x.reshape(-1, x.shape[-1])

    def weight_shape(self) -> torch.Size:
        return self.weight
