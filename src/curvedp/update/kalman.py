"""DiSK: a simplified Kalman filter over released gradients, with a look ahead."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from curvedp.errors import ConfigurationError
from curvedp.layers.precision import compute_dtype
from curvedp.update.momentum import filtered_variance
from curvedp.update.ranges import check_positive
from curvedp.update.transform import Gradient, LookAhead, Transform, Values
from curvedp.values import is_number

__all__ = ["KalmanFilter"]


@dataclass(frozen=True)
class KalmanFilter(Transform):
    r"""``m <- (1 - kappa) m + kappa g``; the update is m.

    Without more, m would lag behind: its past gradients were taken at earlier
    parameters. So each example's gradient is taken ahead, with ``dx = x_t - x_{t-1}``
    the last displacement:

        c grad(x_t + gamma dx) + (1 - c) grad(x_t),    c = (1 - kappa) / (kappa gamma)

    which adds ``(1 - kappa) / kappa`` times the change of the gradient along dx. After
    the filter, past gradients are carried to the present point to first order. With
    ``gamma = (1 - kappa) / kappa``, c is 1, and one gradient is enough.

    The combination is clipped as one vector, so sensitivity and noise are those of
    DP-SGD. The filter starts at the first gradient. Noise of independent steps has the
    variance ``V <- (1 - kappa)^2 V + kappa^2 v`` in m.

    Zhang et al., "DiSK: Differentially Private Optimizer with Simplified Kalman Filter
    for Noise Reduction", ICLR 2025.

    Attributes:
        kappa: weight of the new gradient; 1 is no filter.
        gamma: how far ahead, in displacements; 0 takes ``(1 - kappa) / kappa``.
    """

    kappa: float = 0.7
    gamma: float = 0.0

    def __post_init__(self) -> None:
        check_positive("kappa", self.kappa, most=1.0)
        if not (is_number(self.gamma) and self.gamma >= 0):
            raise ConfigurationError(
                f"gamma is {self.gamma!r}",
                "give a positive number, or 0 for (1 - kappa) / kappa",
            )

    @property
    def distance(self) -> float:
        """Gamma, or what stands for it."""
        return self.gamma or (1 - self.kappa) / self.kappa

    @property
    def weight(self) -> float:
        """``c``; exactly 1 where one gradient is enough."""
        whole = (1 - self.kappa) / self.kappa
        one_gradient = self.gamma == 0 or math.isclose(self.gamma, whole)
        return 1.0 if one_gradient else whole / self.gamma

    @property
    def tracks_noise(self) -> bool:
        return True

    @property
    def looks_ahead(self) -> bool:
        return self.kappa < 1

    def init(self, parameters: Values) -> dict[str, Any]:
        still = {
            n: torch.zeros_like(p, dtype=compute_dtype(p), requires_grad=False)
            for n, p in parameters.items()
        }
        return {"filtered": {}, "noise": {}, "moved": still}

    def look_ahead(self, state: dict[str, Any]) -> LookAhead | None:
        if not self.looks_ahead:
            return None
        offsets = {n: self.distance * dx for n, dx in state["moved"].items()}
        return LookAhead(offsets, self.weight)

    def update(
        self, gradient: Gradient, state: dict[str, Any]
    ) -> tuple[Gradient, dict[str, Any]]:
        k, past, new = self.kappa, state["filtered"], gradient.noise_variance
        if past:
            filtered = {n: past[n] + k * (g - past[n]) for n, g in _items(gradient)}
            noise = filtered_variance(state["noise"], new, (1 - k) ** 2, k**2)
        else:
            filtered, noise = dict(gradient.values), new
        following = {**state, "filtered": filtered, "noise": dict(noise or {})}
        return Gradient(filtered, noise), following

    def stepped(
        self, before: Values, after: Values, state: dict[str, Any]
    ) -> dict[str, Any]:
        moved = {
            n: after[n].to(compute_dtype(x)) - x.to(compute_dtype(x))
            for n, x in before.items()
        }
        return {**state, "moved": moved}


def _items(gradient: Gradient) -> Any:
    return gradient.values.items()
