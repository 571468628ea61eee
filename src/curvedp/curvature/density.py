r"""The density of a symmetric matrix's eigenvalues, by stochastic Lanczos quadrature.

For a random unit vector v and the symmetric matrix ``H [n, n]``, m steps of Lanczos
give a tridiagonal T whose eigenvalues ``t_j`` and squared first components ``w_j`` are
a Gauss quadrature: ``v^T f(H) v = sum_j w_j f(t_j)`` for every polynomial f of degree
below 2m. As ``E[v v^T] = I / n``, its mean over v is ``tr f(H) / n``: the nodes and
weights of all v together are the density of eigenvalues, spread with a Gaussian where
it is drawn (DP-KFC, figure 7; Ghorbani et al., 2019).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvedp.errors import ConfigurationError

__all__ = ["Density", "lanczos_density"]


@dataclass(frozen=True)
class Density:
    """Nodes and weights of the quadrature.

    Attributes:
        nodes: ``[k]``, ascending.
        weights: ``[k]``, not negative, with sum 1: shares of all eigenvalues.
        size: n.
    """

    nodes: Tensor
    weights: Tensor
    size: int

    def at(self, points: Tensor, width: float) -> Tensor:
        """The density at points ``[q]``, spread by a Gaussian of standard deviation."""
        scaled = (points.double()[:, None] - self.nodes) / width
        kernel = torch.exp(-0.5 * scaled.square()) / (width * math.sqrt(2 * math.pi))
        return kernel @ self.weights

    def cumulative(self, points: Tensor) -> Tensor:
        """Share of the eigenvalues that are at most as large as each point."""
        below = self.nodes[None, :] <= points.double()[:, None]
        return below.double() @ self.weights

    def moment(self, power: int) -> float:
        """``tr(H^power) / n``."""
        return float((self.nodes**power * self.weights).sum())

    def negative_part(self) -> float:
        """Share of negative eigenvalues in the sum of all magnitudes.

        Their share in the *number* of eigenvalues says nothing: most are zero, and fall
        to either side of it by chance.
        """
        parts = self.nodes.abs() * self.weights
        total = float(parts.sum())
        return float(parts[self.nodes < 0].sum()) / total if total > 0 else 0.0

    def positive_sum(self, below: float = math.inf) -> float:
        """Sum of all positive eigenvalues, or of those below a limit.

        The few largest make most of the sum and nearly all of its variance: who knows
        them already asks for those below, and adds the others exactly.
        """
        parts = self.nodes * self.weights
        chosen = (self.nodes > 0) & (self.nodes < below)
        return self.size * float(parts[chosen].sum())

    def ranked(self) -> tuple[Tensor, Tensor]:
        """Magnitudes, the largest first, and the rank at which each of them ends."""
        order = self.nodes.abs().sort(descending=True).indices
        return self.nodes[order].abs(), self.size * self.weights[order].cumsum(0)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "size": self.size,
            "smallest": float(self.nodes[0]),
            "largest": float(self.nodes[-1]),
            "mean": self.moment(1),
            "mean_square": self.moment(2),
            "negative_part": self.negative_part(),
            "nodes": self.nodes.tolist(),
            "weights": self.weights.tolist(),
        }


def lanczos_density(
    product: Callable[[Tensor], Tensor],
    size: int,
    *,
    steps: int = 40,
    vectors: int = 8,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Density:
    """The density of a symmetric matrix that is known by its products.

    Args:
        product: ``[n] -> [n]``, float64.
        size: n.
        steps: m of each run; the largest eigenvalues converge first.
        vectors: random signs to start from; the density's error falls like
            ``1 / sqrt(vectors n)``.
        seed: of the vectors.
        device: where ``product`` takes its vectors.
    """
    if steps < 1 or vectors < 1:
        raise ConfigurationError(
            f"{steps} steps and {vectors} vectors give no quadrature",
            "use 1 or more of each",
        )
    generator = torch.Generator().manual_seed(seed)
    nodes, weights = [], []
    for _ in range(vectors):
        signs = torch.randint(0, 2, (size,), generator=generator) * 2 - 1
        start = signs.to(device, torch.float64) / math.sqrt(size)
        values, vector = torch.linalg.eigh(_tridiagonal(product, start, steps))
        nodes.append(values)
        weights.append(vector[0].square())
    found, order = torch.cat(nodes).sort()
    return Density(found, torch.cat(weights)[order] / vectors, size)


def _tridiagonal(
    product: Callable[[Tensor], Tensor], start: Tensor, steps: int
) -> Tensor:
    """T of at most ``steps`` rows, on the CPU; fewer where the vectors end."""
    basis = [start]
    diagonal: list[float] = []
    beside: list[float] = []
    for _ in range(min(steps, len(start))):
        image = product(basis[-1])
        diagonal.append(float(image @ basis[-1]))
        known = torch.stack(basis, 1)
        # orthogonal to all that came before, and again for what rounding left:
        # without it eigenvalues that have converged appear a second time
        for _ in range(2):
            image = image - known @ (known.mT @ image)
        length = float(image.norm())
        scale = max(abs(x) for x in diagonal + beside + [length])
        if not length > 1e-10 * scale:
            break
        beside.append(length)
        basis.append(image / length)
    row = torch.tensor(diagonal, dtype=torch.float64)
    side = torch.tensor(beside[: len(diagonal) - 1], dtype=torch.float64)
    return row.diag() + side.diag(1) + side.diag(-1)
