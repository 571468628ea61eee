"""What a whitener is: an invertible linear map on gradients, one block per layer.

It is public: it is built from probes or released values, and it is fixed before the
batch is drawn. Clipping happens in its coordinates, its *frame*.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from curvedp.layers.io import LayerIO

__all__ = ["Part", "Parted", "Whitener", "parts_of"]


class Whitener(Protocol):
    """A map ``P``. All methods are linear except ``sq_norms``.

    Identities that every implementation keeps (``curvedp.testing.conformance`` checks
    them): ``sq_norms(io)_i >= ||P g_i||^2`` and equal up to rounding;
    ``<P u, v> = <u, adjoint(v)>``; ``inverse(apply(u)) = u``; ``materialize() @ u`` is
    ``apply(u)`` flattened; ``row_sq_norms`` is the diagonal of ``P^T P``, and of
    ``P^-1 P^-T``.
    """

    @property
    def frame(self) -> str:
        """Id of the coordinates that ``apply`` maps to; equal maps have equal ids."""
        ...

    def sq_norms(self, io: LayerIO) -> Tensor:
        """``||P g_i||^2`` for every example of a layer, ``[B]``."""
        ...

    def sum_dtype(self, io: LayerIO) -> torch.dtype | None:
        """In which dtype a layer's clipped sum is added up before it is mapped.

        None is the layer's own, float32. ``sq_norms`` counts what its rounding can
        become under the map.
        """
        ...

    def apply(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``P u``, by parameter name."""
        ...

    def adjoint(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``P^T v``."""
        ...

    def inverse(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``P^-1 v``."""
        ...

    def row_sq_norms(
        self, like: Mapping[str, Tensor], *, inverse: bool = False
    ) -> dict[str, Tensor]:
        """Squared norms of the rows of ``P^T`` (of ``P^-1``), by parameter name.

        The variance of every coordinate of ``P^T z`` (of ``P^-1 z``) where z has
        independent coordinates of variance 1: what noise becomes on its way back.
        """
        ...

    def materialize(self, like: Mapping[str, Tensor]) -> Tensor:
        """The matrix of ``P`` on the flattened, concatenated values. For tests."""
        ...


@dataclass(frozen=True)
class Part:
    """One of several parts that a map is the sum of, clipped by itself.

    Attributes:
        whitener: the part's map; it need not be invertible.
        share: of the clip bound, in (0, 1].
    """

    whitener: Whitener
    share: float


@runtime_checkable
class Parted(Protocol):
    """A whitener whose image is a sum of parts that are orthogonal to each other.

    One example then contributes at most ``C sqrt(sum of squared shares) <= C``.
    """

    @property
    def parts(self) -> tuple[Part, ...]:
        """Their maps add up to the whole; squared shares add up to at most 1."""
        ...


def parts_of(whitener: Whitener) -> tuple[Part, ...]:
    """What is clipped by itself: the parts, or the whole where there are none."""
    if isinstance(whitener, Parted):
        return whitener.parts
    return (Part(whitener, 1.0),)
