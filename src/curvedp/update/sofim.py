r"""SOFIM: one direction of curvature, the average gradient's, inverted in O(d)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvedp.errors import ConfigurationError
from curvedp.layers.precision import compute_dtype
from curvedp.update.momentum import filtered_variance
from curvedp.update.ranges import check_decay, check_positive
from curvedp.update.transform import Gradient, Transform, Values

__all__ = ["Sofim"]

_FORMS = ("paper", "code")
#: Coordinates that are widened to float64 at a time: a few megabytes.
_CHUNK = 2**20
#: The longest memory that an adaptive beta takes.
_LARGEST_BETA = 0.99


@dataclass(frozen=True)
class Sofim(Transform):
    r"""``(M M^T + rho I)^-1`` times the gradient or its average, for plain SGD.

    With U the released mean and ``M <- beta M + (1 - beta) U``, over all parameters as
    one vector, by the Sherman-Morrison formula:

    ======  =======================================  =================================
    form    update                                   is
    ======  =======================================  =================================
    paper   ``(U - M (M.U) / (rho + |M|^2)) / rho``  ``(M M^T + rho I)^-1 U``
    code    ``M^ / (rho + |M^|^2)``                  ``(M^ M^^T + rho I)^-1 M^``
    ======  =======================================  =================================

    ``M^ = M / (1 - beta^t)``. The first takes out of U most of what lies along M and
    is a step of ``1 / rho`` in every other direction; the second is a rule for the
    length of a momentum step. Both are functions of releases: they cost no privacy.

    What epsilon sets is the noise. With ``adaptive_rho`` it is ``max(rho, E |noise in
    M|^2)``, so that M counts as curvature only where it is longer than its noise. With
    ``adaptive_beta`` M's memory is as long as that noise needs to come down to rho.

    State and work are O(d): one vector beside the parameters.

    Nair, Sen and Sen, "DP-FedSOFIM", 2026 (eq. 11 to 15), and its public code.

    Attributes:
        beta: weight of the past in M.
        rho: added to the diagonal.
        form: "paper" or "code".
        adaptive_rho: raise rho to the energy of M's noise.
        adaptive_beta: choose beta from the energy of the noise; ``beta`` is not used.
    """

    beta: float = 0.9
    rho: float = 0.5
    form: str = "paper"
    adaptive_rho: bool = False
    adaptive_beta: bool = False

    def __post_init__(self) -> None:
        check_decay("beta", self.beta)
        check_positive("rho", self.rho)
        if self.form not in _FORMS:
            raise ConfigurationError(
                f"unknown form {self.form!r}", f"choose one of: {', '.join(_FORMS)}"
            )

    @property
    def reads_noise(self) -> bool:
        return self.adaptive_rho or self.adaptive_beta

    def init(self, parameters: Values) -> dict[str, Any]:
        average = {
            n: torch.zeros_like(p, dtype=compute_dtype(p), requires_grad=False)
            for n, p in parameters.items()
        }
        return {"average": average, "noise": {}, "weight": 0.0}

    def update(
        self, gradient: Gradient, state: dict[str, Any]
    ) -> tuple[Gradient, dict[str, Any]]:
        values, noise = gradient.values, gradient.noise_variance
        if self.reads_noise and noise is None:
            raise ConfigurationError(
                "SOFIM was not told how much noise is in the gradient",
                "let the transform before it say so, or fix rho and beta",
            )
        beta = self._beta(values, noise)
        average = {
            n: torch.lerp(g, state["average"][n].to(g), beta) for n, g in values.items()
        }
        weight = beta * state["weight"] + 1 - beta  # 1 - beta^t where beta is fixed
        filtered = filtered_variance(state["noise"], noise, beta**2, (1 - beta) ** 2)
        rho = self._rho(values, filtered, weight)
        if self.form == "paper":
            along = _dot(average, values) / (rho + _dot(average, average))
            update = {n: (g - along * average[n]).div_(rho) for n, g in values.items()}
        else:
            length = rho + _dot(average, average) / weight**2
            update = {n: m / (weight * length) for n, m in average.items()}
        following = {"average": average, "noise": filtered or {}, "weight": weight}
        return Gradient(update), following

    def _beta(self, values: Values, noise: Values | None) -> float:
        """Smallest with ``E |noise in M|^2 = e (1 - beta) / (1 + beta) <= rho``."""
        if not self.adaptive_beta or noise is None:
            return self.beta
        energy = _energy(values, noise)
        needed = (energy - self.rho) / (energy + self.rho)
        return min(max(needed, 0.0), _LARGEST_BETA)

    def _rho(self, values: Values, filtered: Values | None, weight: float) -> float:
        if not self.adaptive_rho or filtered is None:
            return self.rho
        corrected = 1.0 if self.form == "paper" else weight**2
        return max(self.rho, _energy(values, filtered) / corrected)


def _energy(values: Values, variance: Values) -> float:
    """Expected squared length of the noise, over all coordinates."""
    return sum(
        float(v.double().sum()) * (1 if v.dim() else values[n].numel())
        for n, v in variance.items()
    )


def _dot(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """Inner product over all parameters in float64, a little at a time."""
    total = 0.0
    for name, x in left.items():
        x, y = x.reshape(-1), right[name].reshape(-1)
        for start in range(0, len(x), _CHUNK):
            part = slice(start, start + _CHUNK)
            total += float(torch.dot(x[part].double(), y[part].double()))
    return total
