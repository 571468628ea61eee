"""``LayerIO``: what a layer saw of a batch, in the form its gradients follow from.

Private values. They are made by :mod:`curvedp.layers.capture` from one forward and one
backward pass, they live for one physical batch, and they know these things about the
per-example gradients ``g_i`` of their layer, mostly without keeping those:

- ``sq_norms()``: an upper bound on ``||g_i||^2``, tight up to rounding, ``[B]``;
- ``weighted_sum(c)``: ``sum_i c_i g_i``, a tensor per parameter;
- ``keep(mask)``: the same with some examples *replaced* by zero (not multiplied by
  zero: ``0 * nan`` is ``nan``);
- ``per_example()``: the ``g_i`` themselves;
- ``settled()``: the same layer by its ``g_i``, where those take less memory.

Three forms cover all weights: :class:`~curvedp.layers.dense.DenseIO` (linear layers and
convolutions, ``g_i = sum_t d_t a_t^T``), :class:`~curvedp.layers.lookup.LookupIO`
(embeddings) and :class:`DirectIO` here (gradients small enough to write down). Layers
of several weights, and weights that modules share, are made of these by
:class:`~curvedp.layers.joined.JoinedIO`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from curvedp.layers.costs import CHUNK_ELEMENTS
from curvedp.layers.planned import kind_of
from curvedp.layers.precision import (
    ROUNDING,
    compute_dtype,
    fast_float64,
    square_dtype,
)

__all__ = [
    "CHUNK_ELEMENTS",
    "DirectIO",
    "LayerIO",
    "UnreachedIO",
    "added",
    "replace_examples",
    "together",
    "uses_together",
    "written_sum",
]


class LayerIO(ABC):
    """One layer's part of a physical batch. See the module's docstring."""

    #: Name of the module in the model; a site of clipping and of whitening.
    name: str

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Number of examples B, padding included."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Full names of the parameters whose gradients it knows."""

    @abstractmethod
    def sq_norms(self) -> Tensor:
        """Upper bound on the squared norm of every gradient, ``[B]``, float64."""

    @abstractmethod
    def weighted_sum(
        self, weights: Tensor, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """``sum_i weights[i] g_i`` for every parameter; ``weights`` is ``[B]``.

        Added up in ``dtype``; by default in float32, or float64 if the model is.
        """

    @abstractmethod
    def keep(self, mask: Tensor) -> LayerIO:
        """A copy in which examples with ``mask[i] == False`` are replaced by zero."""

    @abstractmethod
    def take(self, part: slice) -> LayerIO:
        """The examples of a slice, alone."""

    @abstractmethod
    def spread(self) -> tuple[Tensor, float]:
        """How much can cancel: ``S [B]`` and the rounding of ``weighted_sum``.

        S is the sum of the lengths of the terms that ``g_i`` is a sum of, and
        ``rounding * S`` bounds the rounding error of what one example adds to a sum.
        """

    @abstractmethod
    def per_example(self) -> dict[str, Tensor]:
        """The gradients ``[B, *parameter.shape]``, by parameter name."""

    def settled(self) -> LayerIO:
        """The same with the gradients written down, if they are smaller than the rest.

        Then ``sq_norms`` measures the very numbers that ``weighted_sum`` adds, and
        rounding has nothing left to hide.
        """
        return self

    def __repr__(self) -> str:
        # Never the tensors: they are private, and tracebacks end up in logs.
        return f"{type(self).__name__}({self.name!r})"


def replace_examples(x: Tensor, mask: Tensor) -> Tensor:
    """Put zeros where ``mask[i]`` is False, whatever stood there (also nan and inf)."""
    keep = mask.reshape(-1, *([1] * (x.dim() - 1)))
    return torch.where(keep, x, torch.zeros((), dtype=x.dtype, device=x.device))


def together(parts: Sequence[Tensor]) -> Tensor:
    """What was computed for parts of a batch; one that is the whole is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def added(values: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Their sum, by name."""
    total: dict[str, Tensor] = {}
    for own in values:
        for name, value in own.items():
            total[name] = total[name] + value if name in total else value
    return total


def uses_together(
    io: LayerIO,
    weights: Tensor,
    like: Tensor,
    summed: Callable[[torch.dtype], dict[str, Tensor]],
) -> dict[str, Tensor]:
    """``weighted_sum`` of a weight with several uses, which may cancel.

    Each use has a sum over the whole batch of its own, which is long where they cancel,
    however little is left of an example: float32 rounds 0.25 C of it at 65,536 rows. So
    they are added up in float64, and where that is slow the gradients of a few examples
    at a time are written down, each in its whole, before anything of others is added.

    Args:
        io: the layer.
        weights: of the examples.
        like: any tensor of the layer.
        summed: the sum, use by use, in a dtype.
    """
    if fast_float64(like) or like.dtype == torch.float64:
        return summed(torch.float64)
    return written_sum(io, weights, like)


def written_sum(io: LayerIO, weights: Tensor, like: Tensor) -> dict[str, Tensor]:
    """``weighted_sum`` of gradients that are written down, a few at a time."""
    one = io.take(slice(0, 1)).per_example()
    each = sum(g.numel() for g in one.values())
    rows = max(1, CHUNK_ELEMENTS.get(kind_of(like), 2**20) // max(1, each))
    parts = [slice(i, i + rows) for i in range(0, io.batch_size, rows)]
    return added(
        DirectIO(io.name, io.take(part).per_example()).weighted_sum(weights[part])
        for part in parts
    )


@dataclass(frozen=True, repr=False)
class UnreachedIO(LayerIO):
    """A site that this batch did not reach: all gradients are zero.

    It stays in the list, because the number of sites enters per-layer clipping and must
    not depend on the batch.
    """

    name: str
    examples: int
    device: torch.device

    @property
    def batch_size(self) -> int:
        return self.examples

    @property
    def names(self) -> tuple[str, ...]:
        return ()

    def sq_norms(self) -> Tensor:
        return torch.zeros(self.examples, device=self.device, dtype=torch.float64)

    def weighted_sum(
        self, weights: Tensor, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        return {}

    def keep(self, mask: Tensor) -> UnreachedIO:
        return self

    def take(self, part: slice) -> UnreachedIO:
        return replace(self, examples=len(range(self.examples)[part]))

    def spread(self) -> tuple[Tensor, float]:
        return self.sq_norms(), 0.0

    def per_example(self) -> dict[str, Tensor]:
        return {}


@dataclass(frozen=True, repr=False)
class DirectIO(LayerIO):
    """Per-example gradients written down: norm layers, biases, tokens, odd modules.

    Attributes:
        name: module name.
        grads: ``[B, *shape]`` for each parameter name.
    """

    name: str
    grads: Mapping[str, Tensor]

    @property
    def batch_size(self) -> int:
        return next(iter(self.grads.values())).shape[0]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.grads)

    def sq_norms(self) -> Tensor:
        total: Tensor | float = 0.0
        for g in self.grads.values():
            total = total + _sq_lengths(g)
        assert isinstance(total, Tensor)
        return total

    def weighted_sum(
        self, weights: Tensor, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        dtype = dtype or compute_dtype(next(iter(self.grads.values())))
        weights = weights.to(dtype)  # once for all
        return {n: _weighted(g, weights) for n, g in self.grads.items()}

    def keep(self, mask: Tensor) -> DirectIO:
        kept = {n: replace_examples(g, mask) for n, g in self.grads.items()}
        return DirectIO(self.name, kept)

    def take(self, part: slice) -> DirectIO:
        return DirectIO(self.name, {n: g[part] for n, g in self.grads.items()})

    def spread(self) -> tuple[Tensor, float]:
        g = next(iter(self.grads.values()))
        return self.sq_norms().sqrt(), 8 * ROUNDING[compute_dtype(g)]

    def per_example(self) -> dict[str, Tensor]:
        return {n: g.to(compute_dtype(g)) for n, g in self.grads.items()}


def _weighted(g: Tensor, weights: Tensor) -> Tensor:
    dtype, rows = weights.dtype, g.reshape(g.shape[0], -1)
    if rows.dtype == dtype:
        return (weights @ rows).reshape(g.shape[1:])
    size = max(1, CHUNK_ELEMENTS.get(kind_of(g), 2**20) // max(1, rows.shape[1]))
    pieces = zip(torch.split(weights, size), torch.split(rows, size), strict=True)
    sums = [w @ part.to(dtype) for w, part in pieces]
    total = sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)
    return total.reshape(g.shape[1:])


def _sq_lengths(g: Tensor) -> Tensor:
    """Squared norm of every row, a piece at a time: float64 takes twice the memory."""
    rows = g.reshape(g.shape[0], -1)
    size = max(1, CHUNK_ELEMENTS.get(kind_of(g), 2**20) // max(1, rows.shape[1]))
    dtype = square_dtype(g)
    parts = torch.split(rows, size)
    lengths = [torch.linalg.vector_norm(part.to(dtype), dim=1) for part in parts]
    return together(lengths).double().square()
