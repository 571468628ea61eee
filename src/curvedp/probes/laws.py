"""How often the word of a rank occurs, and draws from weights and from logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvedp.errors import ConfigurationError
from curvedp.probes.base import JSON
from curvedp.values import is_number

__all__ = [
    "RankLaw",
    "check_temperature",
    "draw_categories",
    "draw_rows",
    "not_finite",
]

#: Rows are worked on in float64 in blocks of this many numbers, about 32 MB: logits of
#: a language model can fill the memory by themselves.
_BLOCK = 2**22


@dataclass(frozen=True)
class RankLaw:
    """Zipf-Mandelbrot: rank r = 1, 2, ... has the weight ``(r + shift)^-exponent``.

    Attributes:
        exponent: 1.07 fits English; 0 makes all ranks alike.
        shift: 2.7 fits English: the first few words are more alike than in Zipf's law.
    """

    exponent: float = 1.07
    shift: float = 2.7

    def __post_init__(self) -> None:
        if not (is_number(self.exponent) and self.exponent >= 0):
            raise ConfigurationError(
                f"the exponent of a rank law is {self.exponent!r}, not a finite number "
                "from 0 on",
                "1.07 fits English, 0 is uniform",
            )
        if not (is_number(self.shift) and self.shift > -1):
            raise ConfigurationError(
                f"the shift of a rank law is {self.shift!r}, not a number above -1",
                "2.7 fits English, 0 is Zipf's own law",
            )

    @classmethod
    def parse(cls, law: RankLaw | str) -> RankLaw:
        """A law, or one of the names ``"zipf"`` and ``"uniform"``."""
        if isinstance(law, RankLaw):
            return law
        if law == "zipf":
            return cls()
        if law == "uniform":
            return cls(exponent=0.0, shift=0.0)
        raise ConfigurationError(
            f"unknown token law {law!r}",
            'choose "zipf", "uniform" or RankLaw(exponent, shift)',
        )

    def weights(self, ranks: int) -> Tensor:
        """Probabilities of the ranks 1 to ``ranks``, ``[ranks]``, float64."""
        rank = torch.arange(1, ranks + 1, dtype=torch.float64)
        # relative to the first rank: a large exponent gives zeros, and not all of them
        weights = ((rank + self.shift) / (1 + self.shift)) ** -self.exponent
        return weights / weights.sum()

    def describe(self) -> dict[str, JSON]:
        """Both parameters."""
        return {"exponent": self.exponent, "shift": self.shift}


def draw_categories(
    weights: Tensor, shape: tuple[int, ...], generator: torch.Generator
) -> Tensor:
    """Independent draws from one table: ``[K] -> shape``, int64.

    By inversion of the cumulated weights in float64, which has no limit on the number
    of categories. A category of weight zero is never drawn.
    """
    cumulated = weights.to(torch.float64).cumsum(0)
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
    found = torch.searchsorted(cumulated, uniform * cumulated[-1], right=True)
    # rounding may put u * total at the total itself, beyond the last category
    last = int(weights.nonzero()[-1])
    return found.clamp_max(last)


def check_temperature(temperature: float) -> None:
    """Refuse what does not divide logits."""
    if not (is_number(temperature) and temperature >= 0):
        raise ConfigurationError(
            f"temperature is {temperature!r}, not a finite number from 0 on",
            "1 draws from the model as it is",
        )


def draw_rows(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """One class per row from ``softmax(logits / temperature)``: ``[N, K] -> [N]``.

    By inversion in float64. A logit of minus infinity excludes its class.
    """
    uniform = torch.rand(len(logits), generator=generator, dtype=torch.float64)
    uniform = uniform.to(logits.device)
    block = max(_BLOCK // logits.shape[1], 1)
    drawn = [
        _invert(logits[at : at + block], temperature, uniform[at : at + block])
        for at in range(0, len(logits), block)
    ]
    return torch.cat(drawn)


def _invert(logits: Tensor, temperature: float, uniform: Tensor) -> Tensor:
    best = logits.max(1)
    if not bool(torch.isfinite(best.values).all()):  # NaN counts as the largest
        raise not_finite()
    if temperature == 0:
        return best.indices
    # relative to the largest: nothing overflows, however small the temperature
    relative = (logits - best.values[:, None]).double() / temperature
    cumulated = relative.exp().cumsum(1)
    threshold = uniform[:, None] * cumulated[:, -1:]
    found = torch.searchsorted(cumulated, threshold, right=True)[:, 0]
    # rounding may put the threshold at the total itself, beyond the last class
    return torch.where(found < logits.shape[1], found, best.indices)


def not_finite() -> ConfigurationError:
    """The error for an output that nothing can be drawn from."""
    return ConfigurationError(
        "the model's output on a probe is not finite",
        "training has diverged (lower the learning rate), or the probe does not fit "
        "the model (look at probe.inputs)",
    )
