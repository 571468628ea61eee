"""Releases of several clients made into one: scaled, added up, topped up with noise."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from curvedp.barrier import Release
from curvedp.errors import ConfigurationError
from curvedp.noise.randomness import RandomStreams

__all__ = ["mean_release", "scaled_release"]


def scaled_release(release: Release, divisor: float) -> Release:
    """A release divided by a public number."""
    values = {n: v / divisor for n, v in release.values.items()}
    return Release(values, release.frame, release.step, release.noise_std / divisor)


def mean_release(
    releases: Sequence[Release],
    divisor: float,
    *,
    top_up: float = 0.0,
    streams: RandomStreams | None = None,
    at: tuple[int, ...] = (),
) -> Release:
    """``(sum of releases + N(0, top_up^2 I)) / divisor``. Post-processing of releases.

    Args:
        releases: of one round, in one frame, with the same names; at least one.
        divisor: a public number.
        top_up: noise that a trusted aggregator adds in the place of missing shares.
        streams: where that noise comes from.
        at: its address.
    """
    first = releases[0]
    total = {n: v.clone() for n, v in first.values.items()}
    for other in releases[1:]:
        for name, value in total.items():
            value += other.values[name]
    variance = math.fsum(r.noise_std**2 for r in releases)
    if top_up:
        if streams is None:
            raise ConfigurationError("noise needs the streams that it comes from")
        total, std = streams.add_gaussian(total, top_up, 1.0, *at)
        variance += std**2
    values = dict(
        zip(total, torch._foreach_div(list(total.values()), divisor), strict=True)
    )
    return Release(values, first.frame, first.step, math.sqrt(variance) / divisor)
