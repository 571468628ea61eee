r"""FedAdam and FedYogi: adaptive steps of a server on what its clients send."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvedp.layers.precision import compute_dtype, square_dtype
from curvedp.update.ranges import check_decay, check_positive
from curvedp.update.transform import Gradient, Transform, Values

__all__ = ["FedAdam", "FedYogi"]


@dataclass(frozen=True)
class _Adaptive(Transform):
    """``m / (sqrt(v) + tau)``, without correction of the first steps' bias.

    Attributes:
        beta1: weight of the past in m, the average gradient.
        beta2: in v, the average of its squares.
        tau: adaptivity: where ``sqrt(v)`` is below it, the step is plain. v starts at
            ``tau^2``, as published.
    """

    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        check_decay("beta1", self.beta1)
        check_decay("beta2", self.beta2)
        check_positive("tau", self.tau)

    def init(self, parameters: Values) -> dict[str, Any]:
        def filled(value: float) -> dict[str, Tensor]:
            return {
                n: torch.full_like(
                    p, value, dtype=compute_dtype(p), requires_grad=False
                )
                for n, p in parameters.items()
            }

        return {"first": filled(0.0), "second": filled(self.tau**2)}

    def update(
        self, gradient: Gradient, state: dict[str, Any]
    ) -> tuple[Gradient, dict[str, Any]]:
        first, second, update = {}, {}, {}
        for name, g in gradient.values.items():
            wide = g.to(square_dtype(g))
            m = self.beta1 * state["first"][name].to(wide) + (1 - self.beta1) * wide
            v = self._second(state["second"][name].to(wide), wide.square())
            update[name] = (m / (v.sqrt() + self.tau)).to(g.dtype)
            first[name], second[name] = m.to(g.dtype), v.to(g.dtype)
        return Gradient(update), {"first": first, "second": second}

    @abstractmethod
    def _second(self, v: Tensor, square: Tensor) -> Tensor:
        """The next second moment."""


@dataclass(frozen=True)
class FedAdam(_Adaptive):
    """``v <- beta2 v + (1 - beta2) g^2``; the step is ``m / (sqrt(v) + tau)``.

    Noise is in v too: where it outweighs the signal, all coordinates are divided by the
    noise. :class:`curvedp.update.AdamBC` takes it out.

    Reddi et al., "Adaptive Federated Optimization", ICLR 2021.

    Attributes:
        beta1: weight of the past in m, the average gradient.
        beta2: in v, the average of its squares.
        tau: adaptivity: where ``sqrt(v)`` is below it, the step is plain.
    """

    def _second(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


@dataclass(frozen=True)
class FedYogi(_Adaptive):
    """``v <- v - (1 - beta2) g^2 sign(v - g^2)``: v moves by no more than g^2 says.

    Reddi et al., "Adaptive Federated Optimization", ICLR 2021.

    Attributes:
        beta1: weight of the past in m, the average gradient.
        beta2: how slowly v moves.
        tau: adaptivity: where ``sqrt(v)`` is below it, the step is plain.
    """

    def _second(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * torch.sign(v - square)
