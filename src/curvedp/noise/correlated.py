r"""Correlated Gaussian noise: ``Release_t = ClippedSum_t + s C (strategy^-1 z)_t``.

The noise of a step is known up to what is new in it to whoever knows the noise of the
steps before. So the state of this mechanism is a secret like the sums themselves: with
it and the releases, anybody could compute them. It is kept in memory, has a type that
cannot be printed, copied or pickled, and is in no checkpoint.

**Blocks.** Noise of one block has nothing to do with that of another. A new one begins

- at the first step, and after a rewind or a crash that lost a release: the step is made
  again with other noise, and the one that was lost must not be in what follows;
- at another frame. Coordinates of an earlier whitener mean something else; to carry the
  noise over, it would have to go through ``P_new P_old^-1``, which would multiply what
  an example has done in the past by the norm of that map.

Within a block, the steps released are ``strategy^-1`` applied to the Gaussian
mechanism on ``strategy S``. So for a strategy with b bands, columns of norm up to 1 and
an example that takes part at most once in b steps, each participation is one Gaussian
event of multiplier s (:mod:`curvedp.sampling.cyclic` samples so).

**Memory.** ``keep="buffer"`` remembers what the strategy needs, ``b - 1`` vectors of
the model's size. ``keep="regenerate"`` remembers addresses, and draws all noise of the
block again for every step: constant memory, and t times the noise in step t.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

import numpy as np
from torch import Tensor

from curvedp.accounting.events import Event, PoissonGaussianEvent
from curvedp.barrier import ClippedSum, Release
from curvedp.errors import ConfigurationError, CurvedpError
from curvedp.noise.gaussian import GaussianMechanism
from curvedp.noise.mechanism import NoiseState
from curvedp.noise.randomness import RandomStreams
from curvedp.noise.strategies import Strategy
from curvedp.noise.strategies.base import Memory

__all__ = ["KEEPING", "CorrelatedMechanism", "CorrelatedState"]

#: Ways to have the noise of earlier steps at hand.
KEEPING = ("buffer", "regenerate")


@dataclass(frozen=True)
class CorrelatedState(NoiseState):
    """What the noise of the present block was. Secret: with it, releases are the sums.

    Attributes:
        drawn: step and attempt of every z of the block; public.
        frame: of the block; public.
        memory: what the strategy remembers of the noise, by parameter name. None if it
            has to be drawn again first.
        rows: the same of the rows of the strategy's inverse; public.
    """

    drawn: tuple[tuple[int, int], ...] = ()
    frame: str = ""
    memory: Mapping[str, Memory] | None = None
    rows: Memory = ()

    @property
    def start(self) -> int | None:
        """First step of the block; None before any."""
        return self.drawn[0][0] if self.drawn else None

    def follows(self, step: int, frame: str) -> bool:
        """Whether a step belongs to the block."""
        return bool(self.drawn) and (self.drawn[-1][0] + 1, self.frame) == (step, frame)

    def __repr__(self) -> str:
        return f"CorrelatedState(block from step {self.start}, noise=<secret>)"

    def __getstate__(self) -> NoReturn:
        raise CurvedpError(
            "the state of correlated noise is a secret: with it, releases are the "
            "private sums; it cannot be pickled or copied",
            "start a new block of noise in the other process",
        )

    def __deepcopy__(self, _: Any) -> NoReturn:
        self.__getstate__()


@dataclass(frozen=True)
class CorrelatedMechanism:
    """The Gaussian mechanism with noise that later steps take back in part.

    Attributes:
        noise_multiplier: s.
        bound: C, the largest bound of the sums it accepts.
        strategy: of the whole run.
        keep: "buffer" or "regenerate".

    Guarantees:
        Within a block the noise has the law of ``s C strategy^-1 z``, z independent
        standard normals, whatever ``keep`` is; between blocks it is independent. A
        release says the standard deviation of its own noise.
    """

    noise_multiplier: float
    bound: float
    strategy: Strategy
    keep: str = "buffer"
    correlated: ClassVar[bool] = True

    def __post_init__(self) -> None:
        GaussianMechanism(self.noise_multiplier, self.bound)
        self.strategy.check()
        if self.keep not in KEEPING:
            raise ConfigurationError(
                f"unknown way {self.keep!r} to keep noise",
                f"choose one of: {', '.join(KEEPING)}",
            )

    def init(self, streams: RandomStreams) -> CorrelatedState:
        return CorrelatedState(streams)

    def resumed(
        self, streams: RandomStreams, steps: Sequence[int], frame: str
    ) -> CorrelatedState:
        """The state of a block whose steps were released, all at their first attempt.

        The streams must have the entropy that they were released with.
        """
        state = CorrelatedState(streams, frame=frame)
        rows: Memory = ()
        for step in steps:
            _, rows = self._row(rows, step, step - steps[0])
        return replace(state, drawn=tuple((step, 0) for step in steps), rows=rows)

    def update(
        self, clipped: ClippedSum, state: NoiseState
    ) -> tuple[Release, CorrelatedState]:
        if clipped.bound > self.bound:
            raise ConfigurationError(
                f"the sum is bounded by {clipped.bound}, the noise is made for "
                f"{self.bound}",
                "make clipping and noise from one Plan",
            )
        step, frame = clipped.step, clipped.frame
        if step >= self.strategy.steps:
            raise ConfigurationError(
                f"the noise is designed for {self.strategy.steps} steps, and this is "
                f"step {step}",
                "plan a run with more steps",
            )
        block = self._block(state, step, frame)
        names = sorted(clipped.values)
        like = [clipped.values[name] for name in names]
        row, rows = self._row(block.rows, step, len(block.drawn))
        if self.keep == "buffer":
            noise, memory = self._buffered(block, names, like, step)
        else:
            noise, memory = self._regenerated(block, like, row, step), None
        std = self.noise_multiplier * self.bound
        values = {
            n: clipped.values[n] + std * x for n, x in zip(names, noise, strict=True)
        }
        release = Release(
            {name: values[name] for name in clipped.values},
            frame,
            step,
            std * float(np.linalg.norm(row)),
        )
        drawn = (*block.drawn, (step, block.attempt))
        return release, CorrelatedState(
            block.streams, drawn=drawn, frame=frame, memory=memory, rows=rows
        )

    def _block(self, state: NoiseState, step: int, frame: str) -> CorrelatedState:
        """The block that a step belongs to: the one of the state, or a new one."""
        if isinstance(state, CorrelatedState) and state.follows(step, frame):
            return state
        return CorrelatedState(state.streams, state.attempt, frame=frame, memory={})

    def _row(self, rows: Memory, step: int, place: int) -> tuple[Any, Memory]:
        """Row of the strategy's inverse within the block: weights of its z."""
        unit = np.zeros(self.strategy.steps)
        unit[place] = 1.0
        row, rows = self.strategy.next(unit, rows, step)
        return row[: place + 1], rows

    def _buffered(
        self, block: CorrelatedState, names: list[str], like: list[Tensor], step: int
    ) -> tuple[list[Tensor], dict[str, Memory]]:
        memory = block.memory
        if memory is None:  # after a resume
            memory = {}
            for past, attempt in block.drawn:
                again = block.streams.standard_normals(like, past, attempt, again=True)
                _, memory = self._advanced(memory, names, again, past)
        drawn = block.streams.standard_normals(like, step, block.attempt)
        return self._advanced(memory, names, drawn, step)

    def _advanced(
        self,
        memory: Mapping[str, Memory],
        names: list[str],
        drawn: list[Tensor],
        step: int,
    ) -> tuple[list[Tensor], dict[str, Memory]]:
        noise, following = [], {}
        for name, z in zip(names, drawn, strict=True):
            x, following[name] = self.strategy.next(z, memory.get(name, ()), step)
            noise.append(x.clone() if x is z else x)
        return noise, following

    def _regenerated(
        self, block: CorrelatedState, like: list[Tensor], row: Any, step: int
    ) -> list[Tensor]:
        fresh = block.streams.standard_normals(like, step, block.attempt)
        noise = [z * float(row[-1]) for z in fresh]
        for (past, attempt), weight in zip(block.drawn, row, strict=False):
            again = block.streams.standard_normals(like, past, attempt, again=True)
            for x, z in zip(noise, again, strict=True):
                x.add_(z, alpha=float(weight))
        return noise

    def event(self, sample_rate: float) -> Event:
        """Of one participation of an example, not of every step."""
        return PoissonGaussianEvent(
            noise_multiplier=self.noise_multiplier, sample_rate=sample_rate
        )
