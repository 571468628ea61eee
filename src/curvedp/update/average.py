"""Averages of the parameters over the run: what is evaluated, not what is trained.

Parameters are released, so an average of them is too. Training goes on from the last
ones; ``averaged`` gives the others.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from curvedp.errors import ConfigurationError
from curvedp.layers.precision import compute_dtype
from curvedp.update.ranges import check_decay
from curvedp.update.transform import Gradient, Transform, Values
from curvedp.values import is_whole

__all__ = ["ExponentialAverage", "IterateAverage", "TailAverage"]


class IterateAverage(Transform):
    """``a <- a + w_t (x_t - a)`` with t counted from 1; gradients pass as they are."""

    @abstractmethod
    def weight(self, step: int) -> float:
        """``w_t`` of the parameters after step t."""

    @property
    def tracks_noise(self) -> bool:
        return True

    def init(self, parameters: Values) -> dict[str, Any]:
        average = {
            n: p.detach().to(compute_dtype(p), copy=True) for n, p in parameters.items()
        }
        return {"step": 0, "average": average}

    def update(
        self, gradient: Gradient, state: dict[str, Any]
    ) -> tuple[Gradient, dict[str, Any]]:
        return gradient, state

    def stepped(
        self, before: Values, after: Values, state: dict[str, Any]
    ) -> dict[str, Any]:
        step, past = state["step"] + 1, state["average"]
        weight = self.weight(step)
        if weight == 1:
            average = {n: x.to(past[n].dtype, copy=True) for n, x in after.items()}
        else:
            average = {n: past[n] + weight * (x - past[n]) for n, x in after.items()}
        return {"step": step, "average": average}

    def averaged(self, state: dict[str, Any]) -> Values | None:
        average: Values = state["average"]
        return average


@dataclass(frozen=True)
class ExponentialAverage(IterateAverage):
    r"""Weights that fall by ``beta`` a step back, and add up to 1 at every step.

    ``a_t = sum_j beta^(t-j) x_j / sum_j beta^(t-j)`` over j from 1 to t, so
    ``w_t = (1 - beta) / (1 - beta^t)``: the initial parameters have no weight.

    Attributes:
        average_decay: beta; the average reaches back about ``1 / (1 - beta)`` steps.
    """

    average_decay: float = 0.99

    def __post_init__(self) -> None:
        check_decay("average_decay", self.average_decay)

    def weight(self, step: int) -> float:
        return (1 - self.average_decay) / (1 - self.average_decay**step)


@dataclass(frozen=True)
class TailAverage(IterateAverage):
    """The mean of all parameters after a declared number of steps; before, the last.

    Attributes:
        average_from: steps that are left out.
    """

    average_from: int = 0

    def __post_init__(self) -> None:
        if not is_whole(self.average_from):
            raise ConfigurationError(
                f"average_from is {self.average_from!r}", "give a whole number of steps"
            )

    def weight(self, step: int) -> float:
        return 1 / max(1, step - self.average_from)
