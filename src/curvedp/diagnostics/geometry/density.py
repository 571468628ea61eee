r"""The density of the Hessian's eigenvalues, by stochastic Lanczos quadrature.

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
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from curvedp.diagnostics.geometry.study import Source, Study, evaluated
from curvedp.errors import ConfigurationError
from curvedp.layers import as_call
from curvedp.probes import draw
from curvedp.train.datasets import moved

__all__ = ["Density", "hessian_density", "hessian_product", "lanczos_density"]


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


def hessian_product(
    study: Study, source: Source, seed: int = 0
) -> Callable[[Tensor], Tensor]:
    """``v -> H v`` of the mean loss over the source's examples, by autograd twice.

    Shapes: v is ``[n]``, all trained parameters flattened in the order of
    ``study.parameters``. The model runs in float64 and in evaluation mode: dropout
    would make another matrix of every product.
    """
    generator = torch.Generator().manual_seed(seed)
    model, parameters = study.model, study.parameters
    device = next(iter(parameters.values())).device
    batches = [_batch(study, source, generator) for _ in range(source.how.batches)]
    leaves = {n: p.double().requires_grad_() for n, p in parameters.items()}
    others = {
        name: value.detach().double() if value.is_floating_point() else value
        for name, value in [*model.named_parameters(), *model.named_buffers()]
        if name not in leaves
    }
    sizes = [p.numel() for p in leaves.values()]

    def product(vector: Tensor) -> Tensor:
        parts = torch.split(vector.to(device, torch.float64), sizes)
        along = [
            v.reshape(p.shape) for v, p in zip(parts, leaves.values(), strict=True)
        ]
        total = torch.zeros_like(vector, dtype=torch.float64, device=device)
        for inputs, targets in batches:
            args, kwargs = as_call(inputs)
            with evaluated(model), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                output = functional_call(model, {**others, **leaves}, args, kwargs)
                loss = study.loss(output, targets).mean()
                total = total + _second(loss, list(leaves.values()), along)
        return total / len(batches)

    return product


def _second(loss: Tensor, leaves: list[Tensor], along: list[Tensor]) -> Tensor:
    grads = torch.autograd.grad(loss, leaves, create_graph=True, materialize_grads=True)
    inner = torch.stack(
        [(g * v).sum() for g, v in zip(grads, along, strict=True)]
    ).sum()
    if not inner.requires_grad:  # the loss is linear in the parameters
        return torch.cat([torch.zeros_like(p).flatten() for p in leaves])
    second = torch.autograd.grad(inner, leaves, materialize_grads=True)
    return torch.cat([h.flatten() for h in second])


def _batch(study: Study, source: Source, generator: torch.Generator) -> tuple[Any, Any]:
    """Inputs and targets in float64; the model gives the labels where the rule asks."""
    how, device = source.how, next(study.model.parameters()).device
    drawn = draw(how.probe, how.labels, how.size, generator)
    inputs = moved(drawn.inputs, device)
    args, kwargs = as_call(inputs)
    with evaluated(study.model), torch.no_grad():
        targets = moved(drawn.targets(study.model(*args, **kwargs)), device)
    return tree_map(_double, inputs), tree_map(_double, targets)


def _double(x: Any) -> Any:
    is_float = isinstance(x, Tensor) and x.is_floating_point()
    return x.double() if is_float else x


def hessian_density(
    study: Study,
    source: Source,
    *,
    steps: int = 40,
    vectors: int = 8,
    seed: int = 0,
) -> Density:
    """The density of the Hessian of the mean loss over a source's examples.

    On an oracle it is not private. Costs ``steps * vectors`` double backward passes.
    """
    size = sum(p.numel() for p in study.parameters.values())
    device = next(study.model.parameters()).device
    if device.type == "mps":
        raise ConfigurationError(
            "the Hessian is computed in float64, which this device lacks",
            "use --device cpu",
        )
    product = hessian_product(study, source, seed)
    return lanczos_density(
        product, size, steps=steps, vectors=vectors, seed=seed, device=device
    )
