r"""What mean-field theory says about factors, against what they are (DP-KFC, F.1, F.2).

*Variance recursion.* In a wide network with weights of variance ``sw^2 / fan_in`` and
biases of variance ``sb^2`` the variance q of pre-activations goes from one layer to the
next by

    ``q_l = sw^2 E_z[phi(sqrt(q_{l-1}) z)^2] + sb^2``,  z ~ N(0, 1)

(section 3.3 of the paper prints phi without its square). Proposition F.1 says: for a
*bounded* phi in the ordered phase, q forgets where it started. For ReLU the map is
linear, ``q_l = sw^2 q_{l-1} / 2 + sb^2``: with He's initialisation (sw^2 = 2, sb = 0)
it keeps its start for ever, and the claim does not cover it.

*Eigenvalue ratios.* Theorem F.2 says ``l_k(A private) / l_k(A synthetic)`` is about one
alpha for all k in deep layers. :func:`eigenvalue_ratio` gives alpha and how far the
ratios are from being one number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvedp.curvature import DenseFactor, Factors
from curvedp.errors import ConfigurationError

__all__ = ["EigenvalueRatio", "eigenvalue_ratio", "input_scales", "variance_recursion"]

_POINTS = 101


def variance_recursion(
    start: float,
    layers: int,
    activation: Callable[[Tensor], Tensor],
    *,
    weight_variance: float,
    bias_variance: float = 0.0,
) -> list[float]:
    """``[q_0, ..., q_layers]`` of the map above, by Gauss-Hermite quadrature.

    Args:
        start: q_0, the variance of the first layer's pre-activations.
        layers: how often the map is applied.
        activation: phi, elementwise.
        weight_variance: sw^2, fan-in times the variance of a weight.
        bias_variance: sb^2.
    """
    if start < 0 or weight_variance < 0 or bias_variance < 0 or layers < 0:
        raise ConfigurationError(
            "variances and numbers of layers are not negative",
            "give start, weight_variance, bias_variance and layers from 0 on",
        )
    points, weights = np.polynomial.hermite_e.hermegauss(_POINTS)
    z = torch.from_numpy(points)
    w = torch.from_numpy(weights / weights.sum())
    found = [float(start)]
    for _ in range(layers):
        mean = float((w * activation(math.sqrt(found[-1]) * z).square()).sum())
        found.append(weight_variance * mean + bias_variance)
    return found


def input_scales(factors: Factors) -> dict[str, float]:
    """Mean square of each dense layer's inputs, ``tr A / p`` without the bias column.

    It is ``E[phi(s)^2]`` of the layer before, so ``sw^2`` times it (plus ``sb^2``) is
    the q of this layer.
    """
    found = {}
    for name, factor in factors.layers.items():
        if isinstance(factor, DenseFactor):
            diagonal = factor.a.mean().double().diagonal(dim1=-2, dim2=-1)
            inputs = diagonal if factor.bias is None else diagonal[:, :-1]
            found[name] = float(inputs.mean())
    return found


@dataclass(frozen=True)
class EigenvalueRatio:
    """Whether eigenvalues of two matrices are proportional, rank by rank.

    Attributes:
        alpha: geometric mean of ``r_k = l_k / m_k``.
        spread: ``exp`` of the standard deviation of ``log r_k``; 1 if and only if the
            spectra are proportional.
        compared: ranks that entered: those where both eigenvalues are above the floor.
        ratios: ``[compared]``, by rank.
    """

    alpha: float
    spread: float
    compared: int
    ratios: list[float]

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def eigenvalue_ratio(
    oracle: Tensor, other: Tensor, floor: float = 1e-4
) -> EigenvalueRatio:
    """Ratios ``oracle_k / other_k`` of sorted eigenvalues. Pure.

    Args:
        oracle: ``[n]``, the largest first.
        other: ``[n]``, the largest first.
        floor: ranks where either is below this share of its largest are left out: of
            directions that nothing excites the ratio says nothing.
    """
    if oracle.shape != other.shape or oracle.dim() != 1:
        raise ConfigurationError(
            f"eigenvalues {tuple(oracle.shape)} and {tuple(other.shape)} are not of "
            "one length",
            "compare the same factor of the same layer",
        )
    kept = (oracle > floor * oracle.max()) & (other > floor * other.max())
    ratios = oracle[kept].double() / other[kept].double()
    if len(ratios) == 0:
        return EigenvalueRatio(math.nan, math.nan, 0, [])
    logs = ratios.log()
    spread = float(logs.std(unbiased=False).exp())
    return EigenvalueRatio(
        float(logs.mean().exp()), spread, len(ratios), ratios.tolist()
    )
