"""Inputs shifted and scaled by constants that are declared public, never measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from curvedp.data.source import ArrayDataset, DataSource
from curvedp.errors import ConfigurationError
from curvedp.values import is_number

__all__ = ["normalised"]


def normalised(source: DataSource, mean: Any, std: Any) -> DataSource:
    """``(x - mean) / std`` for every input.

    Args:
        source: the data as loaded.
        mean: a number, or one for each channel (dimension 1 of a batch).
        std: likewise, positive.

    Synthetic probes have mean 0 and variance 1. Data that public constants bring near
    that is what they imitate best.
    """
    shift = _per_channel("mean", 0.0 if mean is None else mean, source)
    scale = _per_channel("std", 1.0 if std is None else std, source)
    if not bool((scale > 0).all()):
        raise ConfigurationError(
            f"the declared std is {std!r}", "give a positive number for each channel"
        )

    def of(part: ArrayDataset) -> ArrayDataset:
        return ArrayDataset((part.inputs - shift) / scale, part.targets)

    test = None if source.test is None else of(source.test)
    scaling = source.facts.get("scaling", "as stored")
    facts = {**source.facts, "scaling": f"({scaling} - {mean or 0}) / {std or 1}"}
    return replace(source, train=of(source.train), test=test, facts=facts)


def _per_channel(name: str, value: Any, source: DataSource) -> Tensor:
    given = list(value) if isinstance(value, Sequence) else [value]
    numbers = all(is_number(v) for v in given)
    channels = source.input_shape[0]
    if not numbers or len(given) not in (1, channels):
        raise ConfigurationError(
            f"the declared {name} of the inputs is {value!r}",
            f"give one public number, or one for each of {channels} channels; a "
            "statistic of the private data would be a release that nobody paid for",
        )
    ones = [1] * (len(source.input_shape) - 1)
    return torch.tensor(given, dtype=torch.float32).reshape(-1, *ones)
