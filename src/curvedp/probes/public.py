"""Probes from data: a dataset declared public or, for research, the private one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from curvedp.barrier import Provenance
from curvedp.errors import ConfigurationError, withheld
from curvedp.layers import Batch
from curvedp.probes.base import JSON
from curvedp.probes.checks import check_draw

__all__ = ["OracleProbe", "PublicProbe"]


@dataclass(frozen=True, eq=False)
class _Rows:
    """Random rows of a dataset; what they are is said by the two classes below."""

    dataset: Any = field(repr=False)
    name: str = ""
    allow_repeats: bool = False
    collate: Callable[[list[Any]], Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        readable = hasattr(self.dataset, "__getitem__") and not isinstance(
            self.dataset, dict | str
        )
        try:
            rows = len(self.dataset)
        except TypeError:
            readable, rows = False, 0
        if not readable:
            raise ConfigurationError(
                f"a probe cannot draw rows from a {type(self.dataset).__name__}",
                "give a tensor of inputs, or a dataset with len() and dataset[i]",
            )
        if rows == 0:
            raise ConfigurationError(
                f"the probe's dataset {self.name or type(self.dataset).__name__} is "
                "empty",
                "give at least as many rows as a probe batch has",
            )

    def inputs(self, size: int, generator: torch.Generator) -> Any:
        """Inputs of ``size`` random rows: float32, int64 or bool, on the CPU."""
        return self._draw(size, generator)[0]

    def labelled(self, size: int, generator: torch.Generator) -> Batch:
        """The same rows as ``inputs`` draws, with their own labels."""
        inputs, labels = self._draw(size, generator)
        if labels is None:
            raise ConfigurationError(
                f"the examples of {self.name or 'the dataset'} have no labels of their "
                "own",
                "give a dataset of pairs (inputs, label), or take ModelLabels()",
            )
        return Batch(inputs, labels)

    def _draw(self, size: int, generator: torch.Generator) -> tuple[Any, Any]:
        check_draw(size, generator)
        rows = len(self.dataset)
        if size <= rows:
            chosen = torch.randperm(rows, generator=generator)[:size]
        elif self.allow_repeats:
            chosen = torch.randint(0, rows, (size,), generator=generator)
        else:
            # the number of rows is not said: an oracle's is private
            raise ConfigurationError(
                f"a probe was asked for {size} examples, more than its dataset "
                f"{self.name or type(self.dataset).__name__} has",
                "ask for fewer, or allow_repeats=True to draw them with replacement",
            )
        if isinstance(self.dataset, Tensor):
            return _plain(self.dataset[chosen]), None
        batch = self._collated([self.dataset[i] for i in chosen.tolist()])
        if isinstance(batch, tuple | list) and len(batch) == 1:
            return _plain(batch[0]), None
        if isinstance(batch, tuple | list) and len(batch) == 2:
            return _plain(batch[0]), _plain(batch[1])
        return _plain(batch), None

    def _collated(self, examples: list[Any]) -> Any:
        if self.collate is not None:
            return self.collate(examples)
        try:
            return default_collate(examples)
        except (TypeError, RuntimeError) as error:
            raise ConfigurationError(
                f"the examples of {self.name or 'the dataset'} do not make a batch: "
                f"{type(error).__name__}",
                "return tensors of one shape from the dataset, or give a collate "
                "function",
            ) from None

    def _facts(self) -> dict[str, JSON]:
        return {"name": self.name, "allow_repeats": self.allow_repeats}


@dataclass(frozen=True, eq=False)
class PublicProbe(_Rows):
    """Examples of a dataset that is declared public, drawn without replacement.

    The declaration is the user's: nobody whom the run protects may be in this data.

    Attributes:
        dataset: A tensor ``[N, ...]`` of inputs, or a map-style dataset whose examples
            are inputs or pairs (inputs, label). Its transforms should not be random:
            they would draw from the global state.
        name: What the dataset is called, for the ledger.
        allow_repeats: Whether more examples than there are may be asked for; they are
            then drawn with replacement.
        collate: Makes a batch of a list of examples; torch's default if None.
    """

    @property
    def provenance(self) -> Provenance:
        """PUBLIC, by declaration."""
        return Provenance.PUBLIC

    def describe(self) -> dict[str, JSON]:
        """Name and number of rows."""
        return {"kind": "public", "rows": len(self.dataset), **self._facts()}


@dataclass(frozen=True, eq=False)
class OracleProbe(_Rows):
    """Examples of the *private* dataset. For research only: it voids the guarantee.

    Curvature from it answers how much a perfect probe could gain. A run that it steers
    is not private, whatever noise it adds, and has no epsilon. The attributes are
    those of :class:`PublicProbe`.
    """

    def _draw(self, size: int, generator: torch.Generator) -> tuple[Any, Any]:
        with withheld("the oracle's dataset"):
            return super()._draw(size, generator)

    @property
    def provenance(self) -> Provenance:
        """ORACLE."""
        return Provenance.ORACLE

    def describe(self) -> dict[str, JSON]:
        """The name alone; the number of rows may be private."""
        return {"kind": "oracle", **self._facts()}


def _plain(batch: Any) -> Any:
    """Tensors on the CPU, in float32, int64 or bool; refuses what is no tensor."""

    def convert(value: Any) -> Any:
        if not isinstance(value, Tensor):
            raise ConfigurationError(
                f"the examples of a probe's dataset hold a {type(value).__name__}",
                "return tensors or numbers, or give a collate function",
            )
        value = value.detach().cpu()
        if value.is_floating_point():
            return value.float()
        return value if value.dtype == torch.bool else value.long()

    # default_collate makes lists of tuples; a model takes its inputs from a tuple
    return tree_map(convert, tuple(batch) if isinstance(batch, list) else batch)
