r"""Does noise have the law that is accounted for, and does the sampler?

Noise is counted into cells of equal probability, so that 1e8 draws need no memory. The
Kolmogorov-Smirnov distance is taken at the cells' borders: between two of them it can
be larger by the width of a cell, ``2^-16``, at most.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np
import torch
from scipy import special, stats

from curvedp.noise import RandomStreams, SecureStreams

CELLS = 2**16
CHUNK = 2**22
#: Two-sided, for all intervals that are printed.
CONFIDENCE = 0.95
SIGMA, BOUND = 1.3, 0.7


@dataclass(frozen=True)
class NoiseLaw:
    """What was seen of a noise, in units of its declared standard deviation."""

    source: str
    draws: int
    variance: float
    variance_low: float
    variance_high: float
    mean_z: float
    ks: float
    ks_p: float

    @property
    def fits(self) -> bool:
        """At a level that a right law fails once in about a million runs."""
        spread = (self.variance_high - self.variance_low) / 2 / 1.96
        return (
            abs(self.variance - 1) < 5 * spread
            and abs(self.mean_z) < 5
            and self.ks_p > 1e-6
        )

    def to_json(self):
        return asdict(self)


def streams_of(source):
    return SecureStreams(0) if source == "secure" else RandomStreams(0)


def noise_law(source, draws):
    """The law of what is added to a sum of zeros, over as many steps as it takes."""
    streams, counts = streams_of(source), np.zeros(CELLS, dtype=np.int64)
    total = squares = 0.0
    done = step = 0
    while done < draws:
        size = min(CHUNK, draws - done)
        zeros = {"a": torch.zeros(size // 2), "b": torch.zeros(size - size // 2)}
        noisy, std = streams.add_gaussian(zeros, SIGMA, BOUND, step, 0)
        x = np.concatenate([v.numpy() for v in noisy.values()]).astype(np.float64)
        x /= std
        total += x.sum()
        squares += np.square(x).sum()
        cells = (special.ndtr(x) * CELLS).astype(np.int64).clip(0, CELLS - 1)
        counts += np.bincount(cells, minlength=CELLS)
        done, step = done + size, step + 1
    variance = squares / draws
    half = stats.norm.ppf(0.5 + CONFIDENCE / 2) * math.sqrt(2 / draws)
    borders = np.arange(1, CELLS + 1) / CELLS
    ks = float(np.abs(np.cumsum(counts) / draws - borders).max())
    return NoiseLaw(
        source, draws, variance, variance - half, variance + half,
        total / math.sqrt(draws), ks, float(special.kolmogorov(ks * math.sqrt(draws))),
    )  # fmt: skip


def correlations(source, size):
    """Z scores of noise against noise: other steps, attempts, parameters, sittings."""
    first, resumed = streams_of(source), streams_of(source)

    def noise(streams, *at):
        zeros = {"a": torch.zeros(size), "b": torch.zeros(size)}
        noisy, std = streams.add_gaussian(zeros, SIGMA, BOUND, *at)
        return {n: v.double().numpy() / std for n, v in noisy.items()}

    begun = [noise(first, step, 0) for step in range(4)]
    pairs = {
        "parameters": (begun[0]["a"], begun[0]["b"]),
        "steps": (begun[0]["a"], begun[1]["a"]),
        "distant steps": (begun[0]["a"], begun[3]["a"]),
        "attempts": (begun[0]["a"], noise(first, 0, 1)["a"]),
        "resumed": (begun[0]["a"], noise(resumed, 0, 0)["a"]),
        "shifted": (begun[0]["a"][1:], begun[0]["a"][:-1]),
    }
    return {
        name: float(x @ y) / math.sqrt(len(x)) for name, (x, y) in pairs.items()
    } | {
        f"squares, {name}": float((x**2 - 1) @ (y**2 - 1)) / 2 / math.sqrt(len(x))
        for name, (x, y) in pairs.items()
    }


@dataclass(frozen=True)
class SamplerLaw:
    """How a Poisson sampler draws: counts, single rates, pairs, across steps."""

    source: str
    steps: int
    counts_p: float
    rate_z: float
    pair_z: float
    step_z: float

    @property
    def fits(self) -> bool:
        worst = max(self.rate_z, self.pair_z, self.step_z)
        return self.counts_p > 1e-6 and worst < 6

    def to_json(self):
        return asdict(self)


def sampler_law(source, steps, rate=0.3, population=20):
    """Over many steps of one run; z scores are the largest of all pairs."""
    sampler = streams_of(source).sampler(rate, lambda step: (step, 0))
    drawn = np.zeros((steps, population))
    for step in range(steps):
        drawn[step, sampler.draw(step, population)] = 1
    sizes = np.bincount(drawn.sum(1).astype(int), minlength=population + 1)
    expected = stats.binom.pmf(np.arange(population + 1), population, rate) * steps
    common = expected >= 5  # the rest in one cell
    seen = [*sizes[common], sizes[~common].sum()]
    thought = [*expected[common], expected[~common].sum()]
    counts_p = stats.chisquare(seen, thought).pvalue
    variance = rate * (1 - rate)
    centred = (drawn - rate) / math.sqrt(variance)
    root = math.sqrt(steps)
    pairs = centred.T @ centred / root
    later = centred[1:].T @ centred[:-1] / root
    off = ~np.eye(population, dtype=bool)
    return SamplerLaw(
        source, steps, float(counts_p), float(np.abs(centred.sum(0) / root).max()),
        float(np.abs(pairs[off]).max()), float(np.abs(later).max()),
    )  # fmt: skip
