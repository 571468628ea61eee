"""``secure=True``: noise and sampling from AES-256-CTR, noise on a public grid."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from curvedp.errors import CurvedpError
from curvedp.noise.grid import Grid
from curvedp.noise.keystream import Keystream, Reader, Words
from curvedp.noise.randomness import RandomStreams, Stream, drawn_before
from curvedp.sampling import PoissonSampler

__all__ = ["SecureStreams"]

#: Coins that are thrown at once.
COINS = 1 << 20


class SecureStreams(RandomStreams):
    """All randomness of a run, its secret part from a cryptographic generator.

    Noise at an address is drawn once. Sampling may be asked for again, and is then the
    same: a loop that is left and entered again gets the batch that it left.

    Args:
        seed: of the public streams, as for :class:`RandomStreams`.

    Raises:
        ConfigurationError: the package ``cryptography`` is not installed.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed)
        self._keystream = Keystream()

    def sampler(
        self, sample_rate: float, address: Callable[[int], Sequence[int]]
    ) -> PoissonSampler:
        return _CoinSampler(
            sample_rate,
            lambda step: self.generator(Stream.SAMPLING, *address(step)),
            lambda step: self._keystream.reader(Stream.SAMPLING.value, *address(step)),
        )

    def add_gaussian(
        self, values: Mapping[str, Tensor], multiplier: float, bound: float, *at: int
    ) -> tuple[dict[str, Tensor], float]:
        grid = Grid.of(multiplier * bound)
        sizes = [value.numel() for value in values.values()]
        std = grid.widened(multiplier, bound, sum(sizes))
        noise = self.rounded_normals(sum(sizes), std / grid.spacing, *at)
        noisy = {
            name: grid.add(value, steps.reshape(value.shape))
            for (name, value), steps in zip(
                values.items(), torch.split(noise, sizes), strict=True
            )
        }
        return noisy, std

    def _noise_words(self, *at: int) -> Callable[[int], Words]:
        self._refuse_fork()
        if at in self._drawn:
            raise drawn_before(at)
        self._drawn.add(at)
        return self._keystream.reader(Stream.NOISE.value, *at).words

    def torch_seed(self, stream: Stream, *address: int) -> int:
        if stream in (Stream.FORWARD, Stream.VIEWS):
            return int(self._keystream.reader(stream.value, *address).words(1)[0])
        return super().torch_seed(stream, *address)

    def _sequence(
        self, stream: Stream, address: tuple[int, ...]
    ) -> np.random.SeedSequence:
        if stream.is_secret:
            raise CurvedpError(
                f"{stream.name.lower()} comes from the cryptographic generator here, "
                "and numpy's was asked for",
                "use sampler() or add_gaussian()",
            )
        return super()._sequence(stream, address)

    def __repr__(self) -> str:
        return f"SecureStreams(seed={self.seed}, secret=<AES-256-CTR>)"


@dataclass(frozen=True)
class _CoinSampler(PoissonSampler):
    """One coin per example: a 64-bit word below ``q 2^64``.

    The rate is at most the declared one, and less than it by under 2^-64.

    Attributes:
        reader: gives the keystream of a step.
    """

    reader: Callable[[int], Reader] = field(repr=False)

    def draw(self, step: int, population: int) -> npt.NDArray[np.int64]:
        reader = self.reader(step)
        limit = int(self.sample_rate * 2.0**64)
        if limit == 1 << 64:
            drawn = np.arange(population)
        else:
            parts = [
                start + np.flatnonzero(reader.words(size) < np.uint64(limit))
                for start in range(0, population, COINS)
                for size in (min(COINS, population - start),)
            ]
            drawn = np.concatenate([np.empty(0, dtype=np.int64), *parts])
        order = np.argsort(reader.words(len(drawn)))
        return drawn[order].astype(np.int64)
