"""Named random streams: what happens to the private data is secret, the rest public.

Each draw has an address, (stream, step, ...), and its generator is derived from the
stream's entropy and that address alone. So draws of different streams, steps and
attempts are independent, resuming needs no generator state, and nothing secret has to
be stored: a resumed run takes fresh entropy from the operating system.

A 32-bit seed could be searched through, and torch's CPU generator keeps no more than 32
bits of its seed. The secret streams therefore use 256 bits of operating-system entropy
through numpy's ``SeedSequence``. On a GPU the noise of a step comes from torch's Philox
generator, whose seed is 63 bits drawn from that stream, anew for every step.

:class:`RandomStreams` is the default; :class:`curvedp.noise.secure.SecureStreams` draws
the secret part from a cryptographic generator. A mechanism asks either of them to
:meth:`~RandomStreams.add_gaussian` and does not know which it has.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from curvedp.errors import ConfigurationError, CurvedpError
from curvedp.noise.graphed import GraphedNormals
from curvedp.noise.grid import rounded_normals
from curvedp.noise.keystream import Words
from curvedp.sampling import PoissonSampler

__all__ = ["RandomStreams", "Stream"]


class Stream(Enum):
    """What a random draw is for. The numbers are in its address; never reuse one."""

    NOISE = 1
    SAMPLING = 2
    INITIALISATION = 3
    FORWARD = 4
    PROBE = 5
    VALIDATION = 6
    VIEWS = 7
    PRETRAINING = 8
    GROUPS = 9
    SPECTRUM = 10

    @property
    def is_secret(self) -> bool:
        """Whether knowing the stream would undo the guarantee.

        Dropout masks and views belong to rows of a batch. Where one example is missing,
        others stand in other rows: whoever knows what each row was multiplied with, or
        how it was cropped, sees more than one example change. While nobody knows, masks
        and views are the examples' own, independent of everything.
        """
        drawn = (Stream.NOISE, Stream.SAMPLING, Stream.GROUPS)
        return self in drawn or self in (Stream.FORWARD, Stream.VIEWS)


class RandomStreams:
    """All randomness of a run.

    Args:
        seed: of the public streams (initialisation, probes); None draws one.
        unsafe_reproducible_noise: makes the *secret* streams (noise, sampling, dropout,
            views) reproducible from a number. Whoever knows the number can subtract the
            noise: for tests and paired experiments on public data, never for a release.
            The ledger notes it.
    """

    def __init__(
        self, seed: int | None = None, *, unsafe_reproducible_noise: int | None = None
    ) -> None:
        for name, value in (
            ("seed", seed),
            ("unsafe_reproducible_noise", unsafe_reproducible_noise),
        ):
            if value is not None and (isinstance(value, bool) or value < 0):
                raise ConfigurationError(
                    f"{name} must be a number from 0 on, not {value!r}"
                )
        self.seed = secrets.randbits(63) if seed is None else int(seed)
        self.is_unsafe = unsafe_reproducible_noise is not None
        self._secret = (
            secrets.randbits(256)
            if unsafe_reproducible_noise is None
            else int(unsafe_reproducible_noise)
        )
        self._groups = self._secret
        self._past: dict[int, int] = {}
        self._drawn: set[tuple[int, ...]] = set()
        self._graphed: GraphedNormals | None = None
        self._process = os.getpid()

    def draw_in_graphs(self) -> None:
        """Draw noise on a GPU in one launch: the same numbers with less waiting."""
        self._graphed = GraphedNormals()

    def generator(self, stream: Stream, *address: int) -> np.random.Generator:
        """The generator at an address. Equal addresses give equal draws.

        Raises:
            CurvedpError: noise was drawn at this address before.
        """
        if stream is Stream.NOISE:
            self._refuse_fork()
            if address in self._drawn:
                raise drawn_before(address)
            self._drawn.add(address)
        return np.random.Generator(np.random.Philox(self._sequence(stream, address)))

    def torch_seed(self, stream: Stream, *address: int) -> int:
        """A 64-bit seed at an address, for a torch generator."""
        words = self._sequence(stream, address).generate_state(1, np.uint64)
        return int(words[0])

    def normals(
        self, shape: torch.Size, generator: np.random.Generator
    ) -> torch.Tensor:
        """Standard normal float32 values on the CPU."""
        drawn = generator.standard_normal(tuple(shape), dtype=np.float32)
        return torch.from_numpy(np.ascontiguousarray(drawn)).reshape(shape)

    def sampler(
        self, sample_rate: float, address: Callable[[int], Sequence[int]]
    ) -> PoissonSampler:
        """Poisson sampling on the secret stream, at an address for each step."""
        return PoissonSampler(
            sample_rate, lambda step: self.generator(Stream.SAMPLING, *address(step))
        )

    def add_gaussian(
        self, values: Mapping[str, Tensor], multiplier: float, bound: float, *at: int
    ) -> tuple[dict[str, Tensor], float]:
        """Values plus Gaussian noise, and the standard deviation that it has.

        Args:
            values: a clipped sum.
            multiplier: s. The noise is at least s times the distance that two
                neighbouring sums have when it is added to them.
            bound: C, their distance as it comes.
            at: address of the noise: step and attempt.

        Raises:
            CurvedpError: noise was drawn at this address before.
        """
        generator = self.generator(Stream.NOISE, *at)
        std = multiplier * bound
        plain = list(values.values())
        normals = self._normals_like(plain, generator)
        noisy = torch._foreach_add(plain, normals, alpha=std)
        return dict(zip(values, noisy, strict=True)), std

    def standard_normals(
        self, values: Sequence[Tensor], *at: int, again: bool = False
    ) -> list[Tensor]:
        """Standard normals in the shapes of some tensors; the next call may reuse them.

        Args:
            values: for shapes, dtypes and device.
            at: address of the noise: step and attempt.
            again: what was drawn at that address, to take its part in the noise of
                another step (:mod:`curvedp.noise.correlated`). Releasing it twice would
                undo it.

        Raises:
            CurvedpError: noise was drawn at this address before.
        """
        if again:
            self._refuse_fork()
            # a step that an earlier sitting paid for may have been made again by us
            own = at in self._drawn
            entropy = self._secret if own else self._past.get(at[0], self._secret)
            sequence = np.random.SeedSequence(
                entropy, spawn_key=(Stream.NOISE.value, *at)
            )
            generator = np.random.Generator(np.random.Philox(sequence))
        else:
            generator = self.generator(Stream.NOISE, *at)
        return self._normals_like(values, generator)

    def rounded_normals(self, count: int, scale: float, *at: int) -> Tensor:
        """``round(scale z)`` of independent standard normals, int32, ``[count]``.

        Every whole number comes as often as it should (:mod:`curvedp.noise.grid`). Of
        normals that are float32 or float64 numbers, few of those in the tails, or on a
        fine grid anywhere, come at all, and which ones they are tells the sum.

        Args:
            count: how many.
            scale: standard deviation, below 2^27.
            at: address of the noise: step and attempt.

        Raises:
            CurvedpError: noise was drawn at this address before.
        """
        return rounded_normals(self._noise_words(*at), count, scale)

    def _noise_words(self, *at: int) -> Callable[[int], Words]:
        """Gives uniform 64-bit words of an address of noise."""
        generator = self.generator(Stream.NOISE, *at)
        return generator.bit_generator.random_raw

    def reveal_secret(self) -> int:
        """The entropy of noise and sampling. Whoever has it can undo the guarantee.

        Correlated noise needs it to go on after a crash. It is stored apart from all
        that is shared, for as long as the run goes on (:mod:`curvedp.train.secret`).
        """
        self._refuse_fork()
        return self._secret

    def continue_run(self, groups: int, past: Mapping[int, int]) -> None:
        """Know what earlier sittings of the same run have drawn.

        New noise and sampling keep the entropy of this sitting, so that nothing is ever
        drawn twice, whatever was restored from where.

        Args:
            groups: entropy of the sitting that drew the groups of examples.
            past: entropy with which the noise of each earlier step was drawn.
        """
        if self._drawn or self.is_unsafe:
            raise CurvedpError("these streams have drawn noise of their own already")
        self._groups, self._past = groups, dict(past)

    def fingerprint(self) -> str:
        """A public name of how groups are drawn, which tells nothing else of it.

        The entropy has 256 bits, so that nobody finds it by its hash.
        """
        data = self._groups.to_bytes(64, "big")
        return hashlib.sha256(b"curvedp groups" + data).hexdigest()[:16]

    def _normals_like(
        self, values: Sequence[Tensor], generator: np.random.Generator
    ) -> list[Tensor]:
        """Standard normals, on the CPU or on the values' device."""
        if not all(value.is_cuda for value in values):
            return [
                self.normals(v.shape, generator).to(v.device, v.dtype) for v in values
            ]
        # Philox with a 63-bit seed, from the same address and entropy
        seed = int(generator.integers(2**63 - 1))
        if self._graphed is not None:
            return self._graphed.like(values, seed)
        philox = torch.Generator(device=values[0].device).manual_seed(seed)
        return [
            torch.randn(v.shape, device=v.device, dtype=v.dtype, generator=philox)
            for v in values
        ]

    def _sequence(
        self, stream: Stream, address: tuple[int, ...]
    ) -> np.random.SeedSequence:
        entropy = self._secret if stream.is_secret else self.seed
        if stream is Stream.GROUPS:
            entropy = self._groups
        return np.random.SeedSequence(entropy, spawn_key=(stream.value, *address))

    def _refuse_fork(self) -> None:
        """A forked process has the same secret, and would draw the same noise."""
        if os.getpid() != self._process:
            raise CurvedpError(
                "these random streams belong to the process that was forked; noise "
                "drawn in both would be the same, and two releases would cancel it",
                "make the run private in the process that trains it",
            )

    def __repr__(self) -> str:
        kind = "unsafe, reproducible" if self.is_unsafe else "operating system"
        return f"RandomStreams(seed={self.seed}, secret=<{kind}>)"

    def __getstate__(self) -> NoReturn:
        raise CurvedpError(
            "random streams hold the secret entropy of noise and sampling; they cannot "
            "be pickled or copied",
            "make new ones in the other process; a resumed run takes fresh entropy",
        )

    def __deepcopy__(self, _: Any) -> NoReturn:
        self.__getstate__()


def drawn_before(address: tuple[int, ...]) -> CurvedpError:
    """The error for noise that is asked for a second time."""
    return CurvedpError(
        f"noise for address {address} was drawn before; drawing it again would let two "
        "releases cancel it",
        "pay for the step again and use the next attempt number",
    )
