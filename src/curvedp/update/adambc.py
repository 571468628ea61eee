"""DP-AdamBC: Adam whose second moment is that of the signal, without the noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvedp.errors import ConfigurationError
from curvedp.layers.precision import compute_dtype, square_dtype
from curvedp.update.ranges import check_decay, check_positive
from curvedp.update.transform import Gradient, Transform, Values

__all__ = ["AdamBC"]


@dataclass(frozen=True)
class AdamBC(Transform):
    r"""``m^ / sqrt(max(v^ - Phi, floor))``, for plain SGD to take as its gradient.

    With g the released mean gradient and ``phi`` the variance of its noise, coordinate
    by coordinate and step by step:

    - ``m <- beta1 m + (1 - beta1) g``,  ``m^ = m / (1 - beta1^t)``;
    - ``v <- beta2 v + (1 - beta2) g^2``,  ``v^ = v / (1 - beta2^t)``;
    - ``Phi``: the same average of ``phi``, with the same correction.

    Noise of variance phi raises the mean of ``g^2`` by phi, whatever the signal is. So
    ``v^ - Phi`` estimates the second moment of the signal, and steps keep Adam's form
    where ``v^`` is mostly noise. It may come out negative; the floor is a bound on the
    step and not an addition to the root.

    Both averages are linear, so ``w = v - Phi`` is kept as one:
    ``w <- beta2 w + (1 - beta2) (g^2 - phi)``. That is Adam's memory, and no difference
    of two large numbers.

    Tang, Shpilevskiy and Lecuyer, "DP-AdamBC: Your DP-Adam Is Actually DP-SGD (Unless
    You Apply Bias Correction)", AAAI 2024.

    Attributes:
        beta1: weight of the past in the first moment.
        beta2: in the second.
        floor: least value under the root, absolute. A coordinate whose signal is below
            it moves by ``lr m^ / sqrt(floor)``.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    floor: float = 1e-8

    def __post_init__(self) -> None:
        check_decay("beta1", self.beta1)
        check_decay("beta2", self.beta2)
        check_positive("floor", self.floor)

    @property
    def reads_noise(self) -> bool:
        return True

    def init(self, parameters: Values) -> dict[str, Any]:
        return {"step": 0, "first": _zeros(parameters), "second": _zeros(parameters)}

    def update(
        self, gradient: Gradient, state: dict[str, Any]
    ) -> tuple[Gradient, dict[str, Any]]:
        variances = gradient.noise_variance
        if variances is None:
            raise ConfigurationError(
                "AdamBC was not told how much noise is in the gradient",
                "let the transform before it say so (Gradient.noise_variance)",
            )
        step = state["step"] + 1
        values, first, second = {}, {}, {}
        for name, g in gradient.values.items():
            m, w, values[name] = self._moments(
                g, variances[name], state["first"][name], state["second"][name], step
            )
            first[name], second[name] = m, w
        return Gradient(values), {"step": step, "first": first, "second": second}

    def _moments(
        self, g: Tensor, phi: Tensor, m: Tensor, w: Tensor, step: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Both moments in the dtype of g, computed in float64, and the update."""
        wide = g.to(square_dtype(g))
        m = (self.beta1 * m.to(wide) + (1 - self.beta1) * wide).to(g.dtype)
        news = wide.square() - phi
        w = (self.beta2 * w.to(wide) + (1 - self.beta2) * news).to(g.dtype)
        signal = (w.to(wide) / (1 - self.beta2**step)).clamp_min(self.floor)
        update = m.to(wide) / (1 - self.beta1**step) / signal.sqrt()
        return m, w, update.to(g.dtype)

    def second_moment(self, state: dict[str, Any]) -> dict[str, Tensor]:
        """``v^ - Phi`` by parameter name, after at least one step; may be negative."""
        scale = 1 - self.beta2 ** state["step"]
        return {n: w / scale for n, w in state["second"].items()}


def _zeros(parameters: Values) -> dict[str, Tensor]:
    return {
        n: torch.zeros_like(p, dtype=compute_dtype(p), requires_grad=False)
        for n, p in parameters.items()
    }
