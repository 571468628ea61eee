r"""Designs: which strategy for how many steps, bands and which workload; with a cache.

Finding a strategy takes up to a minute and depends on nothing private, so it is kept in
the user's cache folder under a name that is a hash of what it was found for. A file is
checked when it is read: a matrix whose columns are too long is never used, whoever
wrote it, and nothing is unpacked that is larger than the design. The format is numpy's,
without pickle; what cannot be read is found again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from curvedp.data.files import brief
from curvedp.data.npz import read_npz
from curvedp.errors import ConfigurationError, CurvedpError
from curvedp.noise.strategies import (
    Banded,
    BandedToeplitz,
    BufferedToeplitz,
    Strategy,
    Workload,
    optimise_banded,
    optimise_blt,
    optimise_toeplitz,
    workload_from_json,
)
from curvedp.noise.strategies.banded import inverse_series
from curvedp.noise.strategies.optimise import quadratic_form
from curvedp.storage import cache_folder, write_atomically

__all__ = ["LARGEST_DENSE", "STRATEGIES", "Design", "designs_folder", "error_of"]

_log = logging.getLogger(__name__)

#: Kinds of strategies that can be designed; those with bands can be trained with.
STRATEGIES = ("banded", "toeplitz", "blt")

#: Part of every name in the cache: another number where the same design is found by
#: other means.
VERSION = 1

#: Bytes of a file that are no numbers, at most.
_HEADERS = 1 << 16
#: Steps up to which all of C^-1 is written down (2 GiB).
LARGEST_DENSE = 1 << 14


@dataclass(frozen=True)
class Design:
    """What a strategy is found for. Public, and so is the strategy.

    Attributes:
        kind: "banded", "toeplitz" or "blt".
        steps: n.
        bands: b; of a buffered strategy, its buffers.
        workload: as JSON text, so that equal designs are equal.
        block: steps after which noise begins anew; 0 for never.
    """

    kind: str
    steps: int
    bands: int
    workload: str
    block: int = 0

    @classmethod
    def of(
        cls, kind: str, steps: int, bands: int, workload: Workload, block: int = 0
    ) -> Design:
        """With a workload as it is."""
        if kind not in STRATEGIES:
            raise ConfigurationError(
                f"unknown strategy {kind!r}", f"choose one of: {', '.join(STRATEGIES)}"
            )
        text = json.dumps(workload.to_json(), sort_keys=True)
        return cls(kind, steps, bands, text, block)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        facts: dict[str, Any] = {
            "strategy": self.kind,
            "steps": self.steps,
            "bands": self.bands,
            "workload": json.loads(self.workload),
        }
        return facts | ({"block": self.block} if self.block else {})

    def named_workload(self) -> Workload:
        """The workload itself."""
        return workload_from_json(json.loads(self.workload))

    def strategy(self) -> Strategy:
        """The strategy, remembered, from the cache, or found now."""
        return _strategy(self, designs_folder())

    def path(self, folder: Path) -> Path:
        """Where it is cached."""
        text = json.dumps([VERSION, self.to_json()], sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        return folder / f"{self.kind}-{self.steps}-{self.bands}-{name}.npz"

    def find(self) -> Strategy:
        """The strategy, found anew."""
        workload = self.named_workload()
        if self.kind == "toeplitz":
            return optimise_toeplitz(workload, self.steps, self.bands)
        if self.kind == "blt":
            return optimise_blt(workload, self.steps, self.bands)
        block = self.block or None
        return optimise_banded(workload, self.steps, self.bands, block=block)


def designs_folder() -> Path:
    """Where strategies are cached."""
    return cache_folder("strategies")


@lru_cache(maxsize=32)
def _strategy(design: Design, folder: Path) -> Strategy:
    path = design.path(folder)
    stored = _read(path, design)
    if stored is not None:
        return stored
    found = design.find()
    try:
        write_atomically(path, lambda file: _write(file, found))
    except (CurvedpError, OSError) as error:  # a cache is not needed to go on
        _log.info("the strategy was not cached: %s", error)
    return found


def _write(path: Path, strategy: Strategy) -> None:
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **strategy.arrays())


def _read(path: Path, design: Design) -> Strategy | None:
    try:
        if not path.exists():
            return None
        arrays = read_npz(path, most=8 * _numbers(design) + _HEADERS)
        return _made(design, {n: a.astype(np.float64) for n, a in arrays.items()})
    except (OSError, ValueError, KeyError, CurvedpError) as error:
        _log.warning("the cached strategy %s is not used: %s", path, brief(error))
        return None


def _numbers(design: Design) -> int:
    """How many the file of a design has, at most."""
    if design.kind == "banded":
        return design.bands * design.steps
    return 2 * design.bands + 1


def _made(design: Design, arrays: dict[str, Any]) -> Strategy:
    """Of arrays that have the design's shapes: what is made is not larger either."""
    shapes: dict[str, dict[str, tuple[int, ...]]] = {
        "banded": {"columns": (design.bands, design.steps)},
        "toeplitz": {"coefficients": (design.bands,)},
        "blt": {"weights": (design.bands,), "decays": (design.bands,)},
    }
    for name, shape in shapes[design.kind].items():
        if arrays[name].shape != shape:
            raise ValueError(f"{name} is {brief(arrays[name].shape)}, not {shape}")
    if design.kind == "banded":
        return Banded(arrays["columns"])
    if design.kind == "toeplitz":
        return BandedToeplitz(arrays["coefficients"], design.steps)
    return BufferedToeplitz(arrays["weights"], arrays["decays"], design.steps)


def error_of(strategy: Strategy, workload: Workload) -> float:
    """``tr(W X^-1)``: squared error of a run with noise of multiplier 1."""
    if isinstance(strategy, BandedToeplitz):
        series = inverse_series(strategy.coefficients, strategy.steps)
        return quadratic_form(workload, strategy.steps)(series)[0]
    if strategy.steps > LARGEST_DENSE:
        raise ConfigurationError(
            f"the error of a {strategy.kind} strategy for {strategy.steps} steps is "
            f"that of a matrix of {strategy.steps} x {strategy.steps} numbers",
            f"use the strategy 'toeplitz', or up to {LARGEST_DENSE} steps",
        )
    return workload.error(strategy.inverse())
