"""What a whitener is: an invertible linear map on gradients, one block per layer.

It is public: it is built from probes or released values, and it is fixed before the
batch is drawn. Clipping happens in its coordinates, its *frame*.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from curvedp.layers.io import LayerIO

__all__ = ["Whitener"]


class Whitener(Protocol):
    """A map ``P``. All methods are linear except ``sq_norms``.

    Identities that every implementation keeps (``curvedp.testing.conformance`` checks
    them): ``sq_norms(io)_i >= ||P g_i||^2`` and equal up to rounding;
    ``<P u, v> = <u, adjoint(v)>``; ``inverse(apply(u)) = u``; ``materialize() @ u`` is
    ``apply(u)`` flattened.
    """

    @property
    def frame(self) -> str:
        """Id of the coordinates that ``apply`` maps to; equal maps have equal ids."""
        ...

    def sq_norms(self, io: LayerIO) -> Tensor:
        """``||P g_i||^2`` for every example of a layer, ``[B]``."""
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

    def materialize(self, like: Mapping[str, Tensor]) -> Tensor:
        """The matrix of ``P`` on the flattened, concatenated values. For tests."""
        ...
