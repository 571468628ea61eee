"""Rows of a table, drawn column by column from what is declared about each column.

Columns are those of the *model's input*, after scaling and coding. What is declared
must be public knowledge (a scaled age lies in 0..1), never measured on private data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvedp.barrier import Provenance
from curvedp.errors import ConfigurationError
from curvedp.probes.base import JSON
from curvedp.probes.checks import check_draw
from curvedp.probes.laws import draw_categories
from curvedp.values import is_number, is_whole

__all__ = [
    "CategoryColumn",
    "Column",
    "FeatureProbe",
    "NormalColumn",
    "RangeColumn",
]


@dataclass(frozen=True)
class NormalColumn:
    """``N(mean, std^2)``: a column that public constants have standardised."""

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        if not (is_number(self.mean) and is_number(self.std) and self.std > 0):
            raise ConfigurationError(
                f"a normal column has mean {self.mean!r} and std {self.std!r}",
                "give a finite mean and a positive std",
            )

    @property
    def width(self) -> int:
        """Numbers in the input for this column."""
        return 1

    def draw(self, size: int, generator: torch.Generator) -> Tensor:
        """``[size, 1]``."""
        return self.mean + self.std * torch.randn((size, 1), generator=generator)

    def describe(self) -> dict[str, JSON]:
        """Its law."""
        return {"law": "normal", "mean": self.mean, "std": self.std}


@dataclass(frozen=True)
class RangeColumn:
    """A number within public limits: uniform, or a normal law cut off at them.

    Attributes:
        low: Smallest value.
        high: Largest value.
        truncated: Whether values gather around the middle: ``N((low + high)/2,
            ((high - low)/4)^2)``, given that it lies within the limits.
    """

    low: float
    high: float
    truncated: bool = False

    def __post_init__(self) -> None:
        if not (is_number(self.low) and is_number(self.high) and self.low < self.high):
            raise ConfigurationError(
                f"a column has the range {self.low!r} to {self.high!r}",
                "give two finite numbers, the smaller one first",
            )

    @property
    def width(self) -> int:
        """Numbers in the input for this column."""
        return 1

    def draw(self, size: int, generator: torch.Generator) -> Tensor:
        """``[size, 1]``, within the limits."""
        unit = torch.rand((size, 1), generator=generator, dtype=torch.float64)
        if self.truncated:
            # inverse of the normal distribution function between -2 and 2
            tail = torch.special.ndtr(torch.tensor(-2.0, dtype=torch.float64))
            normal = torch.special.ndtri(tail + unit * (1 - 2 * tail))
            unit = (normal + 2) / 4
        values = self.low + unit * (self.high - self.low)
        return values.float().clamp(self.low, self.high)

    def describe(self) -> dict[str, JSON]:
        """Its law."""
        law = "truncated normal" if self.truncated else "uniform"
        return {"law": law, "low": self.low, "high": self.high}


@dataclass(frozen=True)
class CategoryColumn:
    """One of several categories, coded one-hot in as many columns.

    Attributes:
        size: Number of categories.
        weights: Public frequencies in any unit, one per category; None: all alike.
    """

    size: int
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not is_whole(self.size, at_least=1):
            raise ConfigurationError(
                f"a column has {self.size!r} categories", "give a number from 1 on"
            )
        if self.weights is None:
            return
        weights = tuple(self.weights)
        if (
            len(weights) != self.size
            or not all(is_number(w) and w >= 0 for w in weights)
            or not sum(weights) > 0
        ):
            raise ConfigurationError(
                f"{self.size} categories have the weights {weights!r}",
                "give one number from 0 on per category, not all of them 0",
            )
        object.__setattr__(self, "weights", weights)

    @property
    def width(self) -> int:
        """Numbers in the input for this column."""
        return self.size

    def draw(self, size: int, generator: torch.Generator) -> Tensor:
        """``[size, width]``, a single 1 in every row."""
        weights = torch.ones(self.size) if self.weights is None else self.weights
        table = torch.as_tensor(weights, dtype=torch.float64)
        drawn = draw_categories(table, (size,), generator)
        return torch.nn.functional.one_hot(drawn, self.size).float()

    def describe(self) -> dict[str, JSON]:
        """Its law."""
        weights = None if self.weights is None else list[JSON](self.weights)
        return {"law": "categories", "size": self.size, "weights": weights}


Column = NormalColumn | RangeColumn | CategoryColumn


@dataclass(frozen=True)
class FeatureProbe:
    """Rows ``[B, sum of widths]`` of independent columns, float32.

    Attributes:
        columns: The columns in the order of the input; a number n stands for n columns
            of ``N(0, 1)``.
    """

    columns: tuple[Column, ...] | int

    def __post_init__(self) -> None:
        given: Any = self.columns
        if is_whole(given, at_least=1):
            return
        listed = tuple(given) if isinstance(given, tuple | list) else ()
        if not listed or not all(isinstance(c, Column) for c in listed):
            raise ConfigurationError(
                f"columns is {given!r}",
                "give their number, or a sequence of NormalColumn, RangeColumn and "
                "CategoryColumn",
            )
        object.__setattr__(self, "columns", listed)

    @property
    def provenance(self) -> Provenance:
        """SYNTHETIC: ranges and categories are declared facts."""
        return Provenance.SYNTHETIC

    def inputs(self, size: int, generator: torch.Generator) -> Tensor:
        """Rows ``[size, sum of widths]``, float32."""
        check_draw(size, generator)
        if isinstance(self.columns, int):
            return torch.randn((size, self.columns), generator=generator)
        return torch.cat([c.draw(size, generator) for c in self.columns], 1)

    def describe(self) -> dict[str, JSON]:
        """The law of each column."""
        columns: JSON = (
            self.columns
            if isinstance(self.columns, int)
            else [c.describe() for c in self.columns]
        )
        return {"kind": "features", "columns": columns}
