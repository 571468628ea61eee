"""The whitener of a whole model: a map for every layer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from curvedp.barrier import IDENTITY_FRAME, Provenance
from curvedp.errors import CoverageError
from curvedp.layers.io import DirectIO, LayerIO, UnreachedIO
from curvedp.layers.joined import JoinedIO
from curvedp.whitening.maps import IdentityMap, LayerMap

__all__ = ["LayerwiseWhitener", "digest_of"]


class LayerwiseWhitener:
    """Applies each layer's own map. See :class:`curvedp.whitening.Whitener`.

    Args:
        maps: one for every layer; together they have every trainable parameter once.
        parameters: names of all trainable parameters.
        provenance: of the factors that the maps were made from.
        frame: id of these maps, where whoever made them knows one; None makes it of
            all their numbers.

    Raises:
        CoverageError: a parameter without a map, or with two, by name.
    """

    def __init__(
        self,
        maps: Sequence[LayerMap],
        parameters: Iterable[str],
        provenance: Provenance = Provenance.SYNTHETIC,
        frame: str | None = None,
    ) -> None:
        self.maps = tuple(maps)
        self.provenance = provenance
        self._by_name: dict[str, LayerMap] = {}
        for layer in self.maps:
            for name in layer.names:
                if name in self._by_name:
                    raise CoverageError(
                        f"the parameter {name!r} has two whitening maps"
                    )
                self._by_name[name] = layer
        missing = [name for name in parameters if name not in self._by_name]
        if missing:
            raise CoverageError(
                f"the parameter {missing[0]!r} has no whitening map",
                "give it one; IdentityMap leaves it as it is",
            )
        if frame is not None:
            self.frame = frame

    @cached_property
    def frame(self) -> str:
        """A digest of all maps: equal maps have equal ids."""
        if all(isinstance(layer, IdentityMap) for layer in self.maps):
            return IDENTITY_FRAME
        return digest_of(
            [[type(m).__name__, list(m.names), m.tensors()] for m in self.maps]
        )

    def sq_norms(self, io: LayerIO) -> Tensor:
        if isinstance(io, UnreachedIO):
            return io.sq_norms()
        if isinstance(io, JoinedIO) and len(self.maps_of(io)) > 1:
            return torch.stack([self.sq_norms(part) for part in io.parts]).sum(0)
        if isinstance(io, DirectIO) and len(self.maps_of(io)) > 1:
            return torch.stack([self.sq_norms(part) for part in self._split(io)]).sum(0)
        (layer,) = self.maps_of(io)
        return layer.sq_norms(io)

    def sum_dtype(self, io: LayerIO) -> torch.dtype | None:
        wanted = [] if isinstance(io, UnreachedIO) else self._sum_dtypes(io)
        return next((dtype for dtype in wanted if dtype is not None), None)

    def _sum_dtypes(self, io: LayerIO) -> list[torch.dtype | None]:
        """Of its maps: one that asks for more than the layer's own speaks for all."""
        if isinstance(io, JoinedIO):
            return [self.sum_dtype(part) for part in io.parts]
        return [layer.sum_dtype(io) for layer in self.maps_of(io)]

    def _split(self, io: DirectIO) -> list[DirectIO]:
        """By map: a layer of several weights, whose gradients were written down."""
        return [
            DirectIO(io.name, {n: io.grads[n] for n in layer.names})
            for layer in self.maps_of(io)
        ]

    def maps_of(self, io: LayerIO) -> list[LayerMap]:
        """The maps of a layer's parameters, each once."""
        found = {id(self._by_name[n]): self._by_name[n] for n in io.names}
        return list(found.values())

    def apply(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._each(values, "apply")

    def adjoint(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._each(values, "adjoint")

    def inverse(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._each(values, "inverse")

    def row_sq_norms(
        self, like: Mapping[str, Tensor], *, inverse: bool = False
    ) -> dict[str, Tensor]:
        mapped = {
            n: v
            for layer in self.maps
            for n, v in layer.row_sq_norms(like, inverse=inverse).items()
        }
        return {name: mapped[name] for name in like}

    def _each(self, values: Mapping[str, Tensor], method: str) -> dict[str, Tensor]:
        mapped = {
            n: v
            for layer in self.maps
            for n, v in getattr(layer, method)(values).items()
        }
        return {name: mapped[name] for name in values}

    def materialize(self, like: Mapping[str, Tensor]) -> Tensor:
        size = sum(v.numel() for v in like.values())
        columns = []
        for unit in torch.eye(size, dtype=torch.float64):
            parts = torch.split(unit, [v.numel() for v in like.values()])
            values = {
                name: part.reshape(v.shape)
                for (name, v), part in zip(like.items(), parts, strict=True)
            }
            columns.append(
                torch.cat([v.flatten() for v in self.apply(values).values()])
            )
        return torch.stack(columns, 1)


def digest_of(value: Any) -> str:
    """Id of numbers, texts and tensors, in lists and dicts: equal for equal ones."""
    digest = hashlib.sha256()
    _update(digest, value)
    return digest.hexdigest()[:32]


def _update(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(str((value.dtype, tuple(value.shape))).encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    elif isinstance(value, dict):
        _update(digest, [item for pair in sorted(value.items()) for item in pair])
    elif isinstance(value, list):
        for item in value:
            _update(digest, item)
    else:
        digest.update(repr(value).encode())
