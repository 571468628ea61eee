r"""Curvature of the private data, measured in the same sum and paid for with it.

Factors ``A = mean a a^T`` and ``G = mean d d^T`` of private data are as private as its
gradients. Here they are *further coordinates of the same clipped sum*. Of the squared
bound ``C^2`` the gradient keeps ``1 - share``; the rest is divided evenly between the
factors that are measured, K of them. One example adds to a factor

    ``c S_i / max(limit_i, tr S_i)``,   ``c = C sqrt(share / K)``,

with ``S_i = sum_t a_t a_t^T`` (or of the ``d_t``). ``S_i`` is positive, so its trace is
at least its Frobenius norm, and the example adds at most c to each factor and at most
``C sqrt(1 - share + share) = C`` to the whole, whatever it is. Noise of ``s C`` on all
coordinates makes it one Gaussian event with multiplier s: the plan, the ledger and the
budget are those of the gradient alone, and there is no second event to forget.

===========  =========================================  ============================
side         ``limit_i``                                 an example counts in full if
===========  =========================================  ============================
``a``        ``input_bound^2 n T_i``                     the root mean square of its
                                                         inputs is below the bound
``g``        ``output_bound^2``                          its d are shorter than the
                                                         bound, all together
===========  =========================================  ============================

A symmetric matrix is written as its upper triangle, what is off the diagonal times
``sqrt 2``: the same length, and noise on independent coordinates only.

Only positions t with ``d_t != 0`` count, ``T_i`` of them: those that are in the
gradient. Padding that the loss does not see stays unseen, so nobody's factor depends on
the length of others' sequences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from curvedp.clipping.rules import SHRINK, ClippingRule, Seen
from curvedp.errors import ConfigurationError
from curvedp.layers.dense import DenseIO
from curvedp.layers.io import UnreachedIO
from curvedp.layers.precision import ROUNDING, compute_dtype, square_dtype

__all__ = ["CurvatureClipping", "MeasuredLayer", "packed", "unpacked"]

#: Bounds on inputs and outputs far outside of these would under- or overflow.
_SMALLEST, _LARGEST = 1e-6, 1e6


@dataclass(frozen=True)
class MeasuredLayer:
    """A dense layer whose factors are measured.

    Attributes:
        name: of the module.
        weight: name of the weight.
        bias: name of the bias, or None.
        groups: G.
        inputs: n of A, with the bias's column of ones.
        outputs: n of G.
        sides: which of "a" and "g".
    """

    name: str
    weight: str
    bias: str | None
    groups: int
    inputs: int
    outputs: int
    sides: tuple[str, ...]

    def key(self, side: str) -> str:
        """Name of a factor's coordinates; no parameter can be called so."""
        return f"${'inputs' if side == 'a' else 'output gradients'} of {self.weight}"

    def size(self, side: str) -> int:
        """N of a factor ``[G, n, n]``."""
        return self.inputs if side == "a" else self.outputs


@dataclass(frozen=True)
class CurvatureClipping(ClippingRule):
    """A clip rule that gives up a share of its bound to measure factors.

    Attributes:
        gradient: the rule for the gradient, with the whole bound.
        share: of the squared bound that the factors have, in (0, 1).
        input_bound: root mean square of inputs up to which an example counts in full.
        output_bound: the same for the length of the output gradients.
        layers: what is measured. It is part of the model and not of a plan.
    """

    name: ClassVar[str] = "curvature"
    gradient: ClippingRule
    share: float
    input_bound: float = 1.0
    output_bound: float = 1.0
    layers: tuple[MeasuredLayer, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.share < 1:
            raise ConfigurationError(
                f"curvature_share must be between 0 and 1, not {self.share!r}",
                "it is the factors' share of the squared clip bound; 0.2 is a start",
            )
        for name in ("input_bound", "output_bound"):
            value = getattr(self, name)
            if not _SMALLEST <= value <= _LARGEST:
                raise ConfigurationError(
                    f"{name} must be a number from {_SMALLEST:g} to {_LARGEST:g}, not "
                    f"{value!r}",
                    "1.0 suits inputs that are scaled to about 1",
                )
        if self.gradient.bound != self.bound:
            raise ConfigurationError("the rule for the gradient has another bound")
        self._of_gradient()

    def measuring(self, layers: tuple[MeasuredLayer, ...]) -> CurvatureClipping:
        """The same rule for the layers of a model."""
        return replace(self, layers=layers)

    @property
    def measured_sites(self) -> frozenset[str]:
        return frozenset(layer.name for layer in self.layers)

    def _of_gradient(self) -> ClippingRule:
        return self.gradient.of_part(math.sqrt(1.0 - self.share))

    def weights(self, sq_norms: Tensor) -> Tensor:
        return self._of_gradient().weights(sq_norms)

    def of_part(self, share: float) -> ClippingRule:
        if share != 1:
            raise ConfigurationError(
                "the map has parts that are clipped by themselves, and curvature is "
                "measured beside one gradient",
                "measure curvature for a Kronecker map",
            )
        return self

    @property
    def length(self) -> float:
        """c, the most that one example adds to a factor, in Frobenius norm."""
        factors = sum(len(layer.sides) for layer in self.layers)
        return self.bound * SHRINK * math.sqrt(self.share / factors)

    def limit(self, layer: MeasuredLayer, side: str) -> float:
        """``limit_i``, for each position on the side of the inputs."""
        if side == "a":
            return self.input_bound**2 * layer.groups * layer.inputs
        return self.output_bound**2

    def extras(self, seen: Seen) -> dict[str, Tensor]:
        by_site = {io.name: io for io in seen.ios}
        found: dict[str, Tensor] = {}
        for layer in self.layers:
            io = by_site[layer.name]
            if not isinstance(io, DenseIO | UnreachedIO):
                raise ConfigurationError(
                    f"the inputs of layer {layer.name!r} are not known as rows, so its "
                    "curvature cannot be measured",
                    f'add it to leave_out: leave_out = "{layer.name}"',
                )
            for side in layer.sides:
                total = self._factor(io, layer, side, seen)
                found[layer.key(side)] = packed(total)
        return found

    def _factor(
        self, io: DenseIO | UnreachedIO, layer: MeasuredLayer, side: str, seen: Seen
    ) -> Tensor:
        """``sum_i c S_i / max(limit_i, tr S_i)``, ``[G, n, n]``."""
        size = layer.size(side)
        shape, device = (layer.groups, size, size), seen.kept.device
        if isinstance(io, UnreachedIO):
            return torch.zeros(shape, device=device)
        total = torch.zeros(shape, device=device, dtype=compute_dtype(io.calls[0][1]))
        scale = 1.0 if side == "a" else abs(seen.scale)
        for rows, positions, part in _rows(io, side):
            squares = rows.to(square_dtype(rows)).square().sum((1, 2, 3)) * scale**2
            counted = positions if side == "a" else torch.ones_like(positions)
            limit = (self.limit(layer, side) * counted).to(squares.dtype)
            # what the sum's rounding may add to the matrix, relative to its trace
            rounding = (rows.shape[2] + 8) * ROUNDING[rows.dtype]
            largest = torch.maximum(limit, squares * (1 + rounding))
            # what a float32 cannot hold counts as non-finite
            ok = seen.kept[part] & torch.isfinite(squares.float()) & (positions > 0)
            roots = (self.length / largest).sqrt() * scale
            # Replaced, not weighted by zero: 0 * nan is nan.
            roots = torch.where(ok, roots, torch.zeros_like(roots)).to(rows.dtype)
            rows = torch.where(_wide(ok), rows * _wide(roots), torch.zeros_like(rows))
            flat = rows.transpose(0, 1).flatten(1, 2)  # [G, b T, n]
            total = total + flat.mT @ flat
        return total

    def read(
        self, values: Mapping[str, Tensor], expected_batch_size: float
    ) -> tuple[Mapping[str, Tensor], float | None]:
        own = {layer.key(side) for layer in self.layers for side in layer.sides}
        gradient = {name: v for name, v in values.items() if name not in own}
        return self._of_gradient().read(gradient, expected_batch_size)

    def mean_factor(
        self,
        values: Mapping[str, Tensor],
        layer: MeasuredLayer,
        side: str,
        expected_batch_size: float,
    ) -> Tensor:
        """A measured factor in its own units, noisy, ``[G, n, n]``, float64.

        Without noise, and if every example counts in full, it is the mean over examples
        of ``sum_t a_t a_t^T / T_i``, or of ``sum_t d_t d_t^T``.
        """
        unit = self.limit(layer, side) / (self.length * expected_batch_size)
        return unit * unpacked(values[layer.key(side)].double(), layer.size(side))

    def describe(self) -> str:
        return (
            f"{self.gradient.describe()}, of whose square {self.share:.3g} is for "
            "curvature, which is measured on the private data and paid for in the same "
            "event"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            **self.gradient.to_json(),
            "curvature_share": self.share,
            "input_bound": self.input_bound,
            "output_bound": self.output_bound,
        }


def _rows(io: DenseIO, side: str) -> Iterator[tuple[Tensor, Tensor, slice]]:
    """``[b, G, T, n]``, zero where d is; at how many positions it is not; whose."""
    for part, _ in io.chunks():
        a, d = io.rows(part, bias=side == "a")
        counts = (d != 0).any(-1, keepdim=True).any(1, keepdim=True)  # [b, 1, T, 1]
        positions = counts.sum((1, 2, 3))
        if side == "a":
            yield torch.where(counts, a, torch.zeros_like(a)), positions, part
        else:
            yield d, positions, part


def _wide(x: Tensor) -> Tensor:
    return x[:, None, None, None]


def packed(matrices: Tensor) -> Tensor:
    """Symmetric ``[G, n, n]`` to ``[G, n (n + 1) / 2]`` of the same length."""
    n = matrices.shape[-1]
    i, j = torch.triu_indices(n, n, device=matrices.device)
    return matrices[:, i, j] * _stretch(i, j, matrices)


def unpacked(values: Tensor, n: int) -> Tensor:
    """The symmetric ``[G, n, n]`` that :func:`packed` wrote down."""
    i, j = torch.triu_indices(n, n, device=values.device)
    entries = values / _stretch(i, j, values)
    matrices = values.new_zeros(values.shape[0], n, n)
    matrices[:, i, j] = entries
    matrices[:, j, i] = entries
    return matrices


def _stretch(i: Tensor, j: Tensor, like: Tensor) -> Tensor:
    """1 on the diagonal, sqrt 2 elsewhere: an entry there stands for two."""
    return torch.where(i == j, 1.0, math.sqrt(2.0)).to(like.dtype)
