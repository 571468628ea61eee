"""Slow exact twins: gradients, clipped sums and update rules straight from definitions.

They share no code with the engine. Gradients come from plain autograd on a batch of
one example; clip factors are written down again from the formulas; everything is added
up in float64, an example at a time.

Update rules take one coordinate as a list of Python floats, one for each step, and are
sums over the whole past where the engine keeps a running state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

__all__ = [
    "adambc",
    "clipped_sum",
    "embedded_sums",
    "exponential_average",
    "fedopt",
    "heavy_ball",
    "kalman_filter",
    "mapped_variances",
    "measured_factor",
    "nesterov",
    "per_example_gradients",
    "sofim",
    "tail_average",
    "weighted_variances",
]

#: The engine keeps squared norms in float32; beyond this they overflow.
LARGEST_SQUARED_NORM = float(torch.finfo(torch.float32).max)


def per_example_gradients(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    inputs: Any,
    targets: Any,
    *,
    together: bool = False,
) -> dict[str, Tensor]:
    """Gradients ``[B, *shape]`` in float64, from one backward pass per example.

    Args:
        model: its trainable parameters are differentiated; it is not changed.
        loss: ``(output, targets) -> [B]``.
        inputs: a tensor, a tuple of positional or a mapping of keyword arguments, with
            examples at dimension 0.
        targets: as the loss takes them.
        together: run the forward pass on the whole batch. Only where examples must
            share random draws with another run on the same batch (dropout).
    """
    leaves = {n: p for n, p in model.named_parameters() if p.requires_grad}
    rows: list[dict[str, Tensor]] = []
    size = _first_size((inputs, targets))
    batches = [slice(None)] if together else [slice(i, i + 1) for i in range(size)]
    for rows_of_batch in batches:
        x, y = tree_map(lambda t, s=rows_of_batch: _cut(t, s), (inputs, targets))
        args, kwargs = _arguments(x)
        losses = loss(model(*args, **kwargs), y)
        for one in losses:
            grads = torch.autograd.grad(
                one, list(leaves.values()), retain_graph=True, allow_unused=True
            )
            rows.append(
                {
                    name: (torch.zeros_like(p) if g is None else g).double()
                    for (name, p), g in zip(leaves.items(), grads, strict=True)
                }
            )
    return {name: torch.stack([row[name] for row in rows]) for name in leaves}


def clipped_sum(
    gradients: Mapping[str, Tensor],
    rule: str,
    bound: float,
    *,
    layers: Iterable[Sequence[str]] | None = None,
    gamma: float = 0.01,
    present: Sequence[bool] | None = None,
) -> dict[str, Tensor]:
    """Sum of clipped gradients, by definition.

    Args:
        gradients: ``[B, *shape]`` by parameter name.
        rule: "flat", "normalised" or "per-layer".
        bound: C.
        layers: parameter names of every layer, for "per-layer".
        gamma: of "normalised".
        present: which examples count; by default all of them.

    An example with a non-finite coordinate, or whose squared norm exceeds float32,
    adds nothing.
    """
    names = list(gradients)
    groups = [list(layer) for layer in layers] if layers is not None else [names]
    size = len(next(iter(gradients.values())))
    total = {n: torch.zeros_like(g[0]).double() for n, g in gradients.items()}
    for i in range(size):
        one = {name: gradients[name][i].double() for name in names}
        length = _length(one, names)
        usable = math.isfinite(length) and length**2 <= LARGEST_SQUARED_NORM
        if not usable or (present is not None and not present[i]):
            continue
        for group in groups:
            if rule == "flat":
                factor = 1.0 if length <= bound else bound / length
            elif rule == "normalised":
                factor = bound / (length + gamma)
            elif rule == "per-layer":
                share = bound / math.sqrt(len(groups))
                own = _length(one, group)
                factor = 1.0 if own <= share else share / own
            else:
                raise ValueError(f"no such rule: {rule!r}")
            for name in group:
                total[name] += factor * one[name]
    return total


def embedded_sums(
    gradients: Mapping[str, Tensor],
    bases: Sequence[tuple[Sequence[str], Tensor]],
    embedding_clip: float,
    residual_clip: float,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """GEP by definition: ``sum_i L clip(w_i)`` and ``sum_i clip(g_i - L w_i)``.

    ``w_i = L^T g_i`` with the bases of all groups together; each of the two is clipped
    as one vector over all groups, and the residual is that of the unclipped embedding.

    Args:
        gradients: ``[B, *shape]`` by parameter name.
        bases: names and orthonormal columns ``[p, k]`` of every group; the names' flat
            gradients stand one below the other.
        embedding_clip: C0.
        residual_clip: C1.
    """
    size = len(next(iter(gradients.values())))
    totals = [
        {n: torch.zeros_like(g[0]).double() for n, g in gradients.items()}
        for _ in range(2)
    ]
    for i in range(size):
        inside: dict[str, Tensor] = {}
        coordinates = []
        for names, basis in bases:
            flat = torch.cat([gradients[n][i].double().flatten() for n in names])
            w = [float(column @ flat) for column in basis.double().T]
            coordinates += w
            back = torch.zeros_like(flat)
            for value, column in zip(w, basis.double().T, strict=True):
                back += value * column
            sizes = [gradients[n][i].numel() for n in names]
            for n, piece in zip(names, torch.split(back, sizes), strict=True):
                inside[n] = piece.reshape(gradients[n][i].shape)
        outside = {n: gradients[n][i].double() - inside[n] for n in gradients}
        lengths = (math.hypot(*coordinates), _length(outside, outside))
        clips = (embedding_clip, residual_clip)
        parts = (inside, outside)
        for k in range(2):
            factor = 1.0 if lengths[k] <= clips[k] else clips[k] / lengths[k]
            for n, vector in parts[k].items():
                totals[k][n] += factor * vector
    return totals[0], totals[1]


# -- after the noise: one coordinate, step by step -------------------------------------


def measured_factor(
    rows: Sequence[Tensor], limits: Sequence[float], length: float
) -> Tensor:
    """``sum_i c S_i / max(limit_i, tr S_i)``, ``S_i = sum_t x_t x_t^T``, float64.

    Args:
        rows: ``[T_i, n]`` of every example.
        limits: traces up to which it counts in full.
        length: c, the most that one example adds.
    """
    size = rows[0].shape[1]
    total = torch.zeros(size, size, dtype=torch.float64)
    for x, limit in zip(rows, limits, strict=True):
        own = torch.zeros(size, size, dtype=torch.float64)
        for row in x.double():
            own += torch.outer(row, row)
        total += length * own / max(limit, float(own.trace()))
    return total


def heavy_ball(gradients: Sequence[float], mu: float) -> list[float]:
    """``m_t = sum_j mu^(t-j) g_j``."""
    return [
        math.fsum(mu ** (t - j) * gradients[j] for j in range(t + 1))
        for t in range(len(gradients))
    ]


def nesterov(gradients: Sequence[float], mu: float) -> list[float]:
    """``g_t + mu m_t``."""
    momenta = heavy_ball(gradients, mu)
    return [g + mu * m for g, m in zip(gradients, momenta, strict=True)]


def adambc(
    gradients: Sequence[float],
    variances: Sequence[float],
    beta1: float,
    beta2: float,
    floor: float,
) -> list[float]:
    """``m^_t / sqrt(max(v^_t - Phi_t, floor))``, each average over the whole past."""
    updates = []
    for t in range(1, len(gradients) + 1):
        m = _averaged(gradients[:t], beta1)
        v = _averaged([g * g for g in gradients[:t]], beta2)
        phi = _averaged(variances[:t], beta2)
        updates.append(m / math.sqrt(max(v - phi, floor)))
    return updates


def _averaged(values: Sequence[float], beta: float) -> float:
    """``sum_j (1 - beta) beta^(t-j) x_j / (1 - beta^t)``: Adam's corrected average."""
    t = len(values)
    weights = [(1 - beta) * beta ** (t - 1 - j) for j in range(t)]
    total = math.fsum(w * x for w, x in zip(weights, values, strict=True))
    return total / (1 - beta**t)


def kalman_filter(gradients: Sequence[float], kappa: float) -> list[float]:
    """``m_t = (1 - kappa)^t g_0 + sum_j kappa (1 - kappa)^(t-j) g_j``, j from 1."""
    return [
        math.fsum(
            (1.0 if j == 0 else kappa) * (1 - kappa) ** (t - j) * gradients[j]
            for j in range(t + 1)
        )
        for t in range(len(gradients))
    ]


def exponential_average(iterates: Sequence[float], beta: float) -> list[float]:
    """Weights ``beta^(t-j)``, divided by their sum."""
    found = []
    for t in range(1, len(iterates) + 1):
        weights = [beta ** (t - 1 - j) for j in range(t)]
        total = math.fsum(w * x for w, x in zip(weights, iterates, strict=False))
        found.append(total / math.fsum(weights))
    return found


def tail_average(iterates: Sequence[float], start: int) -> list[float]:
    """The mean from step ``start`` (counted from 0) on; before it, the last one."""
    found = []
    for t in range(len(iterates)):
        tail = iterates[start : t + 1] or [iterates[t]]
        found.append(math.fsum(tail) / len(tail))
    return found


def fedopt(
    gradients: Sequence[float], beta1: float, beta2: float, tau: float, *, yogi: bool
) -> list[float]:
    """FedAdam and FedYogi as published: ``m / (sqrt(v) + tau)``, v from ``tau^2``."""
    found, m, v = [], 0.0, tau**2
    for g in gradients:
        m = beta1 * m + (1 - beta1) * g
        if yogi:
            v -= (1 - beta2) * g * g * ((v > g * g) - (v < g * g))
        else:
            v = beta2 * v + (1 - beta2) * g * g
        found.append(m / (math.sqrt(v) + tau))
    return found


def sofim(
    gradients: Sequence[Tensor], beta: float, rho: float, form: str
) -> list[Tensor]:
    """SOFIM with the whole matrix: ``(M M^T + rho I)^-1`` as one solve of d equations.

    Args:
        gradients: vectors, one for each step.
        beta: weight of the past in M.
        rho: added to the diagonal.
        form: "paper" or "code".
    """
    found = []
    for t in range(1, len(gradients) + 1):
        past = [g.double() for g in gradients[:t]]
        weights = [(1 - beta) * beta ** (t - 1 - j) for j in range(t)]
        average = torch.stack([w * g for w, g in zip(weights, past, strict=True)]).sum(
            0
        )
        right = past[-1]
        if form == "code":
            right = average = average / math.fsum(weights)
        matrix = torch.outer(average, average)
        matrix.diagonal().add_(rho)
        found.append(torch.linalg.solve(matrix, right))
    return found


def weighted_variances(
    rule: Callable[[Sequence[float]], list[float]], variances: Sequence[float]
) -> list[float]:
    """Variance of a linear rule's outputs for independent noise in its inputs.

    ``sum_j w_tj^2 v_j``, with the weights ``w_tj`` from one unit impulse for each step.
    """
    steps = len(variances)
    impulses = [rule([float(i == j) for i in range(steps)]) for j in range(steps)]
    return [
        math.fsum(impulses[j][t] ** 2 * variances[j] for j in range(steps))
        for t in range(steps)
    ]


def mapped_variances(matrix: Tensor, variance: float) -> list[float]:
    """Variance of every coordinate of ``M z`` for white noise z of a variance."""
    rows = matrix.double().tolist()
    return [math.fsum(x * x for x in row) * variance for row in rows]


def _length(values: Mapping[str, Tensor], names: Iterable[str]) -> float:
    return math.sqrt(sum(float(values[name].square().sum()) for name in names))


def _cut(value: Any, rows: slice) -> Any:
    return value[rows] if isinstance(value, Tensor) else value


def _first_size(values: Any) -> int:
    leaves = torch.utils._pytree.tree_flatten(values)[0]
    return next(len(t) for t in leaves if isinstance(t, Tensor))


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, dict):
        return (), inputs
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})
