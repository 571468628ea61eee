"""The noise of a step as one CUDA graph, whose generator is seeded anew every time.

A recorded draw would repeat itself: the danger of noise in a graph. Here the generator
is registered with the graph, so that a replay reads seed and offset from it, and it is
seeded with the step's own seed before each replay. The values are those that the same
seed gives without a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from curvedp.cuda import record

__all__ = ["GraphedNormals"]

#: Fills places with standard normals from a seed.
Fill = Callable[[int], list[Tensor]]


class GraphedNormals:
    """Standard normal values in the shapes of some tensors, from a seed."""

    def __init__(self) -> None:
        self._fills: dict[Hashable, Fill] = {}

    def like(self, values: Sequence[Tensor], seed: int) -> list[Tensor]:
        """Standard normals; the next call overwrites them."""
        key = tuple((v.shape, v.dtype, v.device) for v in values)
        if key not in self._fills:
            self._fills[key] = _recorded(values)
        return self._fills[key](seed)


def _recorded(values: Sequence[Tensor]) -> Fill:
    device = values[0].device
    generator = torch.Generator(device=device)
    forms = [(v.shape, v.dtype) for v in values]

    def draw() -> list[Tensor]:
        return [
            torch.randn(shape, device=device, dtype=dtype, generator=generator)
            for shape, dtype in forms
        ]

    replay = record(draw, device, generator)

    def fill(seed: int) -> list[Tensor]:
        generator.manual_seed(seed)
        return replay()

    return fill
