r"""A clamp on products of eigenvalues, which is not a Kronecker product (DP-NGD).

With eigenpairs ``A = Q_A diag(l) Q_A^T`` and ``G = Q_G diag(m) Q_G^T``, the map is

    P g = Q_G (S * (Q_G^T g Q_A)) Q_A^T,    S_jk = max(m_j l_k, floor)^-1/2.

Eigenvalues that probes did not reach are zero, so their products stand at the floor:
with thin bases, ``P g = floor^-1/2 g + Q_G ((S - floor^-1/2) * h) Q_A^T`` where
``h = Q_G^T g Q_A``, and ``||P g||^2 = sum S^2 h^2 + (||g||^2 - ||h||^2) / floor``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from curvedp.errors import ConfigurationError
from curvedp.layers.dense import DenseIO
from curvedp.layers.io import LayerIO, together
from curvedp.layers.precision import ROUNDING, norm_dtype, square_dtype
from curvedp.layers.rounding import counted, terms_of
from curvedp.whitening.maps import DenseMap, Values, like

__all__ = ["FloorSchedule", "JointMap", "matched_floor"]


@dataclass(frozen=True)
class JointMap(DenseMap):
    """The natural root of a Kronecker-factored Fisher matrix, clamped from below.

    Attributes:
        inputs: ``Q_A [G, p, k]``, float64.
        input_values: ``l [G, k]``.
        outputs: ``Q_G [G, r, h]``.
        output_values: ``m [G, h]``.
        floor: smallest product, a number or a tensor of one; 0 clamps nothing and
            needs full bases.
        exponent: of the products; 1/2 whitens, 1 is the natural gradient's map.
    """

    inputs: Tensor
    input_values: Tensor
    outputs: Tensor
    output_values: Tensor
    floor: Tensor | float
    exponent: float = 0.5

    @cached_property
    def scales(self) -> Tensor:
        """``S [G, h, k]``."""
        return self.products.clamp_min(self.floor) ** -self.exponent

    @property
    def products(self) -> Tensor:
        """``m_j l_k``, the eigenvalues that are clamped."""
        return self.output_values.unsqueeze(-1) * self.input_values.unsqueeze(-2)

    @property
    def _full(self) -> bool:
        """Whether the bases leave nothing out."""
        return all(q.shape[-1] == q.shape[-2] for q in (self.inputs, self.outputs))

    @cached_property
    def _rest(self) -> Tensor | float:
        """The map of everything outside the bases; 0 where they leave nothing out.

        With full bases there is rounding alone outside of them, which a small floor
        would stretch beyond everything that is inside.
        """
        return 0.0 if self._full else self.floor**-self.exponent

    def sq_norms(self, io: LayerIO) -> Tensor:
        if isinstance(io, DenseIO):
            return together([self._of_rows(io, part) for part, _ in io.chunks()])
        m, spread, rounding = self.written(io)
        m, summed_in = m.to(square_dtype(m)), norm_dtype(m)
        rounding += 8 * ROUNDING[summed_in]
        terms = self._largest * spread
        return counted(self._of_gradients(m), terms, rounding, summed_in)

    def sum_dtype(self, io: LayerIO) -> torch.dtype | None:
        return norm_dtype(like(io))

    @cached_property
    def _largest(self) -> Tensor:
        return self.scales.max().clamp_min(self._rest)

    def _of_rows(self, io: DenseIO, part: slice) -> Tensor:
        like = io.calls[0][1]
        a, d = io.rows(part, square_dtype(like))
        spread = terms_of(a.square().sum((2, 3)), d.square().sum((2, 3))).sqrt()
        summed_in = norm_dtype(like)
        rounding = (a.shape[2] + 8) * ROUNDING[summed_in]
        terms = self._largest * spread
        return counted(self._of_pairs(a, d), terms, rounding, summed_in)

    def _of_pairs(self, a: Tensor, d: Tensor) -> Tensor:
        if a.shape[2] > 1:
            return self._of_gradients(d.mT @ a)
        in_basis = (d @ self.outputs.to(d.dtype)).square()  # [B, G, 1, h]
        of_input = (a @ self.inputs.to(a.dtype)).square()  # [B, G, 1, k]
        square = self.scales.square().to(a.dtype)
        inside = ((in_basis @ square) * of_input).sum((1, 2, 3))
        whole = d.square().sum((2, 3)) * a.square().sum((2, 3))
        covered = in_basis.sum((2, 3)) * of_input.sum((2, 3))
        return self._added(inside, whole, covered)

    def _of_gradients(self, m: Tensor) -> Tensor:
        h = self.outputs.mT.to(m.dtype) @ m @ self.inputs.to(m.dtype)
        inside = (self.scales.to(m.dtype) * h).square().sum((1, 2, 3))
        return self._added(inside, m.square().sum((2, 3)), h.square().sum((2, 3)))

    def _added(self, inside: Tensor, whole: Tensor, covered: Tensor) -> Tensor:
        """A difference, so it is raised by what its own rounding can hide."""
        n = self.inputs.shape[-2] + self.outputs.shape[-2]
        hidden = 8 * n * ROUNDING[whole.dtype] * whole
        if self._full:  # nothing is outside; rounding is, of what was rotated
            return (inside + self._largest**2 * hidden.sum(1)).double()
        rest = (whole - covered).clamp_min(0) + hidden
        return (inside + self._rest**2 * rest.sum(1)).double()

    def apply(self, values: Values) -> dict[str, Tensor]:
        m = self.matrix(values)
        return self.values(
            self._map(m.to(square_dtype(m)), self.scales, self._rest), values
        )

    adjoint = apply

    def inverse(self, values: Values) -> dict[str, Tensor]:
        m = self.matrix(values)
        rest = 0.0 if self._full else 1 / self._rest
        return self.values(
            self._map(m.to(square_dtype(m)), 1 / self.scales, rest), values
        )

    def row_sq_norms(self, like: Values, *, inverse: bool = False) -> dict[str, Tensor]:
        # in the basis of products u_j q_k^T, P^2 is diag(S^2), and rest^2 outside of it
        squares = self.scales.square()
        squares = 1 / squares if inverse else squares
        rest = 0.0 if self._full else self._rest ** (-2 if inverse else 2)
        rows, columns = self.outputs.square(), self.inputs.square()
        inside = rows @ squares @ columns.mT
        known = rows.sum(-1).unsqueeze(-1) * columns.sum(-1).unsqueeze(-2)
        return self.values(inside + rest * (1 - known).clamp_min(0), like)

    def _map(self, m: Tensor, scales: Tensor, rest: Tensor | float) -> Tensor:
        q, u = self.inputs.to(m.dtype), self.outputs.to(m.dtype)
        h = u.mT @ m @ q
        return rest * m + u @ ((scales.to(m.dtype) - rest) * h) @ q.mT

    def tensors(self) -> dict[str, Any]:
        return {
            "inputs": self.inputs,
            "input_values": self.input_values,
            "outputs": self.outputs,
            "output_values": self.output_values,
            "floor": self.floor,
            "exponent": self.exponent,
        }


def matched_floor(products: list[tuple[Tensor, int]], ratio: float) -> float:
    """Smallest floor f with ``mean 1 / max(l, f) <= ratio^-2`` over all parameters.

    The noise then displaces the parameters no more than a plain step would:
    ``ratio = eta_ngd C_ngd / (eta_sgd C_sgd)``.

    Args:
        products: for each layer the eigenvalues that are known, and how many more
            there are, all zero.
        ratio: of the two step lengths.
    """
    count = sum(p.numel() + rest for p, rest in products)
    known = torch.cat([p.flatten().double().cpu() for p, _ in products])
    zeros = sum(rest for _, rest in products)
    target = ratio**-2

    def mean(floor: float) -> float:
        return (float((1 / known.clamp_min(floor)).sum()) + zeros / floor) / count

    low, high = math.log(1e-30), math.log(max(float(known.max()), ratio**2, 1e-30)) + 1
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (
            (low, middle) if mean(math.exp(middle)) <= target else (middle, high)
        )
    return math.exp(high)


@dataclass(frozen=True)
class FloorSchedule:
    r"""The floor over the run (DP-NGD, eq. 18): down, a plateau, and up again.

    ``safe - (safe - base) t / T1`` before ``T1 = warm_up T``, from then on
    ``base + (safe - base) ((t - T1) / (T - T1))^power``.

    Attributes:
        steps: T.
        warm_up: share of T.
        power: of the rise.
        base: share of the safe floor on the plateau; 1 is a fixed floor.
    """

    steps: int
    warm_up: float = 0.1
    power: float = 10.0
    base: float = 0.01

    def __post_init__(self) -> None:
        for name, value, right, range_ in (
            ("floor_base", self.base, 0 < self.base <= 1, "above 0 and up to 1"),
            ("floor_warm_up", self.warm_up, 0 <= self.warm_up < 1, "from 0 to below 1"),
            ("floor_power", self.power, 0 < self.power < math.inf, "above 0"),
        ):
            if not right:
                raise ConfigurationError(
                    f"{name} is {value!r}", f"give a number {range_}"
                )

    def share(self, step: int) -> float:
        """The floor of a step as a share of the safe one."""
        first = self.warm_up * self.steps
        if step < first:
            return 1 - (1 - self.base) * step / first
        rise = (step - first) / max(self.steps - first, 1e-9)
        return self.base + (1 - self.base) * math.pow(min(rise, 1.0), self.power)
