"""Labels for probes: from the model or from nowhere, never from private data.

================  ===========================================  =====================
rule              label                                        for the loss
================  ===========================================  =====================
ModelLabels       class ~ softmax(logits): the true Fisher     cross-entropy,
                                                               language-modelling
UniformLabels     class uniform (DP-KFC)                       the same
GaussianLabels    prediction + std * N(0, 1)                   mse
BernoulliLabels   each label ~ sigmoid(logit), or a coin       bce
OwnLabels         the public example's own: empirical Fisher   any
================  ===========================================  =====================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from curvedp.errors import ConfigurationError
from curvedp.probes.base import JSON
from curvedp.probes.laws import check_temperature, draw_rows, not_finite
from curvedp.values import is_number

__all__ = [
    "BernoulliLabels",
    "GaussianLabels",
    "LabelRule",
    "ModelLabels",
    "OwnLabels",
    "UniformLabels",
    "labels_for",
]


@runtime_checkable
class LabelRule(Protocol):
    """Targets for the loss from the model's output on a probe."""

    def targets(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """Targets on the output's device, without gradient.

        Args:
            output: What the model gave, a tensor with examples at dimension 0.
            generator: On the CPU; the only source of randomness.
        """
        ...

    def describe(self) -> dict[str, JSON]:
        """The settings as public facts; ``kind`` names the rule."""
        ...


@dataclass(frozen=True)
class ModelLabels:
    """Class from the model's own softmax: ``[B, K] -> [B]``, ``[B, T, K] -> [B, T]``.

    The curvature of cross-entropy under these labels is the true Fisher information.

    Attributes:
        temperature: Divides the logits. 1 is the Fisher; 0 takes the likeliest class.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_temperature(self.temperature)

    def targets(self, output: Tensor, generator: torch.Generator) -> Tensor:
        logits = _checked_logits(output)
        rows = logits.reshape(-1, logits.shape[-1])
        drawn = draw_rows(rows, self.temperature, generator)
        return drawn.reshape(logits.shape[:-1])

    def describe(self) -> dict[str, JSON]:
        return {"kind": "model", "temperature": self.temperature}


@dataclass(frozen=True)
class UniformLabels:
    """Every class alike, whatever the model says: ``[B, K] -> [B]`` (DP-KFC)."""

    def targets(self, output: Tensor, generator: torch.Generator) -> Tensor:
        logits = _checked_logits(output)
        classes, shape = logits.shape[-1], logits.shape[:-1]
        drawn = torch.randint(0, classes, shape, generator=generator)
        return drawn.to(output.device)

    def describe(self) -> dict[str, JSON]:
        return {"kind": "uniform"}


@dataclass(frozen=True)
class GaussianLabels:
    """``prediction + std * N(0, 1)``, of the output's shape: regression.

    The loss ``(prediction - label)^2`` is the Gaussian likelihood of std ``1/sqrt(2)``;
    another std scales its Fisher by ``2 std^2`` and leaves its shape.

    Attributes:
        std: Standard deviation of the labels around the prediction.
    """

    std: float = 1.0

    def __post_init__(self) -> None:
        if not (is_number(self.std) and self.std > 0):
            raise ConfigurationError(
                f"the std of the labels is {self.std!r}, not a positive number",
                "1 is usual: it only scales the curvature",
            )

    def targets(self, output: Tensor, generator: torch.Generator) -> Tensor:
        prediction = _checked_finite(output)
        noise = torch.randn(prediction.shape, generator=generator)
        return prediction + self.std * noise.to(prediction.device, prediction.dtype)

    def describe(self) -> dict[str, JSON]:
        return {"kind": "gaussian", "std": self.std}


@dataclass(frozen=True)
class BernoulliLabels:
    """Each of several labels by itself, 0 or 1: ``[B, K] -> [B, K]``, multi-label.

    Attributes:
        probability: Of a 1. None: ``sigmoid(logit)``, which gives the true Fisher.
    """

    probability: float | None = None

    def __post_init__(self) -> None:
        p = self.probability
        if p is not None and not (is_number(p) and 0 <= p <= 1):
            raise ConfigurationError(
                f"the probability of a label is {p!r}, not in [0, 1]",
                "leave it out to draw from the model, or 0.5 for a fair coin",
            )

    def targets(self, output: Tensor, generator: torch.Generator) -> Tensor:
        logits = _checked_finite(output)
        uniform = torch.rand(logits.shape, generator=generator).to(logits.device)
        ones: Tensor | float = (
            logits.float().sigmoid() if self.probability is None else self.probability
        )
        return (uniform < ones).to(logits.dtype)

    def describe(self) -> dict[str, JSON]:
        return {"kind": "bernoulli", "probability": self.probability}


@dataclass(frozen=True)
class OwnLabels:
    """The labels that public examples came with: the empirical Fisher.

    They are fetched together with the inputs, by :func:`curvedp.probes.draw`.
    """

    def targets(self, output: Tensor, generator: torch.Generator) -> Tensor:
        raise ConfigurationError(
            "own labels do not follow from the model's output",
            "use curvedp.probes.draw, which fetches them together with the inputs",
        )

    def describe(self) -> dict[str, JSON]:
        return {"kind": "own"}


_BY_NAME: dict[str, type[ModelLabels | GaussianLabels | BernoulliLabels]] = {
    "cross-entropy": ModelLabels,
    "language-modelling": ModelLabels,
    "mse": GaussianLabels,
    "bce": BernoulliLabels,
}

_BY_MODULE: dict[type[nn.Module], str] = {
    nn.CrossEntropyLoss: "cross-entropy",
    nn.NLLLoss: "cross-entropy",  # softmax of log-probabilities gives the probabilities
    nn.MSELoss: "mse",
    nn.BCEWithLogitsLoss: "bce",
}


def labels_for(loss: Any) -> LabelRule:
    """The usual rule for a loss: a name of ``per_example_loss`` or a torch loss."""
    name = loss if isinstance(loss, str) else _BY_MODULE.get(type(loss), "")
    if name not in _BY_NAME:
        raise ConfigurationError(
            f"no label rule is known for the loss {loss!r}",
            f"known are {', '.join(_BY_NAME)}; with any other loss give a rule: "
            "ModelLabels() for logits, GaussianLabels() for predictions, "
            "BernoulliLabels() for several labels, or one of your own",
        )
    return _BY_NAME[name]()


def _checked_output(output: object) -> Tensor:
    if not isinstance(output, Tensor):
        raise ConfigurationError(
            f"the model returns a {type(output).__name__}, and labels are drawn from a "
            "tensor",
            "wrap the model so that it returns its logits or predictions alone",
        )
    if not output.is_floating_point() or output.dim() == 0:
        raise ConfigurationError(
            f"the model returns {output.dtype} of shape {tuple(output.shape)}",
            "return logits or predictions, with the examples at dimension 0",
        )
    return output.detach()


def _checked_finite(output: object) -> Tensor:
    values = _checked_output(output)
    if not bool(torch.isfinite(values).all()):
        raise not_finite()
    return values


def _checked_logits(output: object) -> Tensor:
    logits = _checked_output(output)
    if logits.dim() not in (2, 3) or logits.shape[-1] < 2:
        raise ConfigurationError(
            f"classes cannot be drawn from an output of shape {tuple(logits.shape)}",
            "logits are [B, K] or [B, T, K] with K from 2 on; use BernoulliLabels for "
            "one logit, GaussianLabels for predictions, or write a LabelRule",
        )
    return logits
