r"""Neighbouring datasets through one recorded step: how far do the sums move?

A guarantee rests on one inequality: for every pair of neighbours D and D', with the
same parameters and the same draws of everybody else,

    ``|| ClippedSum(D) - ClippedSum(D') ||  <=  sensitivity``,

and on a public side that is the same for both. :class:`Replay` takes a run, lets it do
its step on rows that are told and not drawn, and stops before the payment: the sum that
noise would be added to comes back, and the run is where it was. So thousands of
neighbours cost one attached run. :func:`try_neighbours` removes, adds and
replaces; a person is removed with all that belongs to it.

    replay = Replay(private)
    figures = try_neighbours(replay, drawn=range(12), spare=range(12, 20))
    assert figures.worst <= 1.000001

The run's own code is what runs: its loader, model, loss, layers, clipping. What is
replaced is the sampler (it says who was drawn) and the release (it is not made).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from curvedp.barrier import ClippedSum, Relation
from curvedp.noise import Stream
from curvedp.sampling import CyclicSampler, Sampler
from curvedp.train.private import Private

__all__ = ["Figures", "NeighbourError", "Replay", "WatchedData", "try_neighbours"]

#: Streams whose draws belong to the rows of a batch, and not to the run.
_OF_ROWS = (Stream.SAMPLING, Stream.GROUPS, Stream.VIEWS, Stream.FORWARD)


class NeighbourError(AssertionError):
    """Two neighbours differ where they must not."""


class WatchedData(Dataset[Any]):
    """A dataset that notes every access, by number of the example."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.accessed: list[int] = []

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        self.accessed.append(int(index))
        return self.inner[index]


@dataclass(frozen=True)
class _Told:
    """Draws what it is told to, if the run's own sampler could have drawn it."""

    own: Sampler
    units: list[int] = field(repr=False)

    def draw(self, step: int, population: int) -> npt.NDArray[np.int64]:
        strangers = set(self.units) - set(_drawable(self.own, step, population))
        if strangers:
            raise NeighbourError(f"{len(strangers)} units cannot be drawn in this step")
        return np.array(self.units, dtype=np.int64)


def _drawable(sampler: Sampler, step: int, population: int) -> list[int]:
    """Units that a step may draw: all, or those of the group whose turn it is."""
    if isinstance(sampler, CyclicSampler):
        return sorted(sampler.members(step, population).tolist())
    return list(range(population))


class Replay:
    """The next step of a run, on whatever units are said to have been drawn.

    Args:
        private: a run between two steps.
        tier: "loop" (forward, loss, backward and ``optimizer.step()`` as in a
            hand-written loop) or "train_on".
        data: what ``make_private`` was given, if it is a :class:`WatchedData`: each
            pass is then checked to have read the drawn units and nothing else.
    """

    def __init__(
        self, private: Private, *, tier: str = "loop", data: WatchedData | None = None
    ) -> None:
        self._private, self._engine = private, private._engine
        self._tier, self._data = tier, data
        self.drawn: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._note_draws()

    @property
    def plan(self) -> Any:
        """Of the run."""
        return self._private.plan

    @property
    def drawable(self) -> list[int]:
        """Units that the next step may draw; where groups take turns, one group."""
        loader = self._engine._loader
        return _drawable(loader._sampler, self._engine.step, loader._size)

    def _note_draws(self) -> None:
        streams = self._engine.streams
        for name in ("generator", "torch_seed"):
            inner = getattr(streams, name)

            def noted(
                stream: Stream,
                *address: int,
                inner: Callable[..., Any] = inner,
            ) -> Any:
                self.drawn[stream.name, address] += 1
                return inner(stream, *address)

            setattr(streams, name, noted)

    def sum_of(self, units: Iterable[int]) -> ClippedSum:
        """What noise would be added to, had these units been drawn. Nothing is paid."""
        found: list[ClippedSum] = []
        engine = self._engine

        def stop() -> None:
            pending = engine._open.pending
            assert pending is not None
            found.append(pending)

        engine.release = stop  # type: ignore[method-assign]
        try:
            self._pass(list(units))
        finally:
            del engine.release
            engine._open = type(engine._open)()
        (total,) = found
        return total

    def advance(self, units: Iterable[int]) -> None:
        """Make the step for good: it is paid, and the parameters move."""
        self._pass(list(units))

    def _pass(self, units: list[int]) -> None:
        loader = self._engine._loader
        own = loader._sampler
        loader._sampler = _Told(own, units)
        before = len(self._data.accessed) if self._data is not None else 0
        self._private.model.train()
        try:
            for batch in self._engine.batches(1):
                data = tuple(batch.data)
                if self._tier == "train_on":
                    self._private.train_on(data)
                    continue
                self._private.optimizer.zero_grad()
                inputs, targets = data
                loss = self._private.loss(self._private.model(inputs), targets)
                torch.autograd.backward(loss)
                self._private.optimizer.step()
        finally:
            loader._sampler = own
        if self._data is not None:
            read = self._data.accessed[before:]
            if sorted(read) != sorted(units):
                raise NeighbourError(
                    f"{len(units)} examples were drawn, and others were read"
                )

    def public(self) -> dict[str, Any]:
        """Everything that both neighbours must agree on before the step."""
        engine = self._engine
        rule = engine._rule()
        return {
            "step": engine.step,
            "frame": engine._clip_map(engine.step).frame,
            "threshold": engine.threshold,
            "rule": rule.to_json(),
            "bound": rule.bound,
            "divisor": engine.plan.sampling.expected_batch_size,
            "event": engine.noise.event(engine.step),
            "noise": repr(engine.noise.mechanism),
            "parameters": [
                float(p.detach().double().sum()) for p in engine.parameters.values()
            ],
            "draws": {
                key: count
                for key, count in self.drawn.items()
                if not any(key[0] == stream.name for stream in _OF_ROWS)
            },
        }


@dataclass(frozen=True)
class Figures:
    """What was tried and the worst that was seen.

    Attributes:
        neighbours: pairs whose sums were compared.
        worst: largest distance over the sensitivity that is declared for the pair.
        kinds: the worst of each kind of neighbour.
    """

    neighbours: int = 0
    worst: float = 0.0
    kinds: dict[str, float] = field(default_factory=dict)

    def __add__(self, other: Figures) -> Figures:
        kinds = {
            kind: max(self.kinds.get(kind, 0.0), other.kinds.get(kind, 0.0))
            for kind in (*self.kinds, *other.kinds)
        }
        total = self.neighbours + other.neighbours
        return Figures(total, max(self.worst, other.worst), kinds)


def distance(left: ClippedSum, right: ClippedSum) -> float:
    """L2 distance over all coordinates, in float64."""
    if left.values.keys() != right.values.keys():
        raise NeighbourError("two neighbours have sums of different parameters")
    total = 0.0
    for name, value in left.values.items():
        other = right.values[name]
        if (value.shape, value.dtype) != (other.shape, other.dtype):
            raise NeighbourError(f"{name} has another shape or dtype for a neighbour")
        total += float((value.double() - other.double()).square().sum())
    return math.sqrt(total)


def neighbours(
    drawn: Sequence[int], spare: Sequence[int], limit: int | None = None
) -> Iterator[tuple[str, list[int], Relation]]:
    """Draws of neighbouring datasets: one unit less, one more, another in its place.

    A unit that is zeroed out is absent from the sum, as a removed one is: those pairs
    are not tried twice.
    """
    made = 0
    for k in range(max(len(drawn), len(spare))):
        options: list[tuple[str, list[int], Relation]] = []
        if k < len(drawn):
            rest = [*drawn[:k], *drawn[k + 1 :]]
            options.append(("removed", rest, Relation.ADD_REMOVE))
        if k < len(spare):
            options.append(("added", [*drawn, spare[k]], Relation.ADD_REMOVE))
        if drawn and spare:
            i, other = k % len(drawn), spare[k % len(spare)]
            put = [*drawn[:i], other, *drawn[i + 1 :]]
            options.append(("replaced", put, Relation.REPLACE_ONE))
        for option in options:
            if limit is not None and made >= limit:
                return
            made += 1
            yield option


def try_neighbours(
    replay: Replay,
    drawn: Sequence[int],
    spare: Sequence[int] = (),
    *,
    limit: int | None = None,
) -> Figures:
    """Compare the sum of the drawn units with those of neighbouring datasets.

    Args:
        replay: the step.
        drawn: units of the step: numbers of examples, or of persons.
        spare: units of the dataset that are not drawn, and may be added.
        limit: most neighbours that are tried.

    Raises:
        NeighbourError: the public side of two neighbours is not the same, or a sum is
            not finite.
    """
    base, public = replay.sum_of(drawn), None
    tried = 0
    kinds: dict[str, float] = {}
    for kind, units, relation in neighbours(drawn, spare, limit):
        public = public or replay.public()
        other = replay.sum_of(units)
        if (now := replay.public()) != public:
            names = [name for name in public if public[name] != now[name]]
            raise NeighbourError(f"{', '.join(names)} differ for neighbours")
        if (base.bound, base.frame, base.step) != (
            other.bound,
            other.frame,
            other.step,
        ):
            raise NeighbourError("bound, frame or step differ for neighbours")
        ratio = distance(base, other) / base.sensitivity(relation)
        if not math.isfinite(ratio):
            raise NeighbourError(f"a sum is not finite ({kind})")
        kinds[kind] = max(kinds.get(kind, 0.0), ratio)
        tried += 1
    return Figures(tried, max(kinds.values(), default=0.0), kinds)
