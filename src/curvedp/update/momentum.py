"""Momentum on released gradients: heavy ball and Nesterov."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from curvedp.layers.precision import compute_dtype
from curvedp.update.ranges import check_decay
from curvedp.update.transform import Gradient, Transform, Values

__all__ = ["Momentum", "filtered_variance"]


@dataclass(frozen=True)
class Momentum(Transform):
    r"""``m <- mu m + g``; the update is ``m`` (heavy ball) or ``g + mu m`` (Nesterov).

    The same as ``torch.optim.SGD`` with that momentum; here it can stand before another
    transform. Noise of independent steps has the variance ``V <- mu^2 V + v`` in m, and
    ``(1 + mu)^2 v + mu^4 V_before`` in Nesterov's update.

    Attributes:
        mu: weight of the past.
        nesterov: look one step along the momentum.
    """

    mu: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_decay("mu", self.mu)

    @property
    def tracks_noise(self) -> bool:
        return True

    def init(self, parameters: Values) -> dict[str, Any]:
        velocity = {
            n: torch.zeros_like(p, dtype=compute_dtype(p), requires_grad=False)
            for n, p in parameters.items()
        }
        return {"velocity": velocity, "noise": {}}

    def update(
        self, gradient: Gradient, state: dict[str, Any]
    ) -> tuple[Gradient, dict[str, Any]]:
        mu, past = self.mu, state["velocity"]
        velocity = {n: mu * past[n] + g for n, g in gradient.values.items()}
        new = gradient.noise_variance
        noise = filtered_variance(state["noise"], new, mu**2, 1.0)
        following = {"velocity": velocity, "noise": noise or {}}
        if not self.nesterov:
            return Gradient(velocity, noise), following
        values = {n: g + mu * velocity[n] for n, g in gradient.values.items()}
        ahead = filtered_variance(state["noise"], new, mu**4, (1 + mu) ** 2)
        return Gradient(values, ahead), following


def filtered_variance(
    past: Values, new: Values | None, keep: float, take: float
) -> Values | None:
    """``keep past + take new`` by name: of a sum with the roots of these weights.

    The noise of one step must be independent of that of the steps before. Without
    ``past`` it is zero; without ``new`` nobody asks.
    """
    if new is None:
        return None
    return {n: take * v + keep * past[n] if past else take * v for n, v in new.items()}
