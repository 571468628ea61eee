"""Splitting one dataset into clients, for simulations. Real clients have their own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from curvedp.errors import ConfigurationError
from curvedp.values import is_number, is_whole

__all__ = ["dirichlet_partition", "iid_partition"]

Indices = npt.NDArray[np.int64]


def iid_partition(size: int, clients: int, seed: int = 0) -> list[Indices]:
    """A random split into parts whose sizes differ by one at most."""
    _check(size, clients)
    shuffled = np.random.default_rng(seed).permutation(size)
    return [np.sort(part) for part in np.array_split(shuffled, clients)]


def dirichlet_partition(
    labels: Sequence[int] | Indices,
    clients: int,
    alpha: float,
    seed: int = 0,
    least: int = 1,
) -> list[Indices]:
    """Every class split by shares from ``Dirichlet(alpha)``: skewed classes and sizes.

    Args:
        labels: class of every record.
        clients: number of parts.
        alpha: 0.1 is very uneven, 100 nearly even.
        seed: of the shares and the order.
        least: records that every client has; taken from the largest ones.

    Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for
    Federated Visual Classification", 2019.
    """
    found = np.asarray(labels)
    _check(len(found), clients)
    if not (is_number(alpha) and alpha > 0):
        raise ConfigurationError(f"alpha is {alpha!r}", "give a number above 0")
    if not is_whole(least) or least * clients > len(found):
        raise ConfigurationError(
            f"{clients} clients cannot have {least!r} of {len(found)} records each",
            "lower it",
        )
    rng = np.random.default_rng(seed)
    parts: list[list[int]] = [[] for _ in range(clients)]
    for label in np.unique(found):
        own = rng.permutation(np.flatnonzero(found == label))
        cuts = np.cumsum(rng.dirichlet([alpha] * clients))[:-1] * len(own)
        for part, share in zip(parts, np.split(own, cuts.astype(int)), strict=True):
            part.extend(share.tolist())
    for part in parts:
        while len(part) < least:
            richest = max(parts, key=len)
            part.append(richest.pop(int(rng.integers(len(richest)))))
    return [np.sort(np.asarray(part, dtype=np.int64)) for part in parts]


def _check(size: int, clients: int) -> None:
    if not is_whole(clients, 1) or clients > size:
        raise ConfigurationError(
            f"{size} records cannot be split between {clients!r} clients",
            "give a number of clients from 1 up to the number of records",
        )
