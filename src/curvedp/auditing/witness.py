"""The attacker of a white-box audit: sees every release of a run, and knows the rest.

Known to it: the model, the recipe, all parameters at every step, the other examples and
which of them were drawn. Unknown: which canaries are in the dataset, when they were
drawn, and the noise. Poisson sampling draws every example by itself, so knowing the
other draws takes nothing from the guarantee, and a bound from what such an attacker
sees is a bound on the guarantee.

It takes the run as it is. The sampler, the clipped sums, the noise and the update are
the engine's own; the witness only notes what passes and computes beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from curvedp.accounting import Event
from curvedp.auditing.correlated import SeenStep, joint_ratios
from curvedp.auditing.directions import Directions
from curvedp.auditing.evidence import disentangled_ratio, likelihood_ratio
from curvedp.barrier import ClippedSum, Release
from curvedp.errors import ConfigurationError, withheld
from curvedp.layers import Batch, LayerIO, Recording, as_call
from curvedp.layers.precision import exact
from curvedp.noise import CorrelatedMechanism, Mechanism, NoiseState, RandomStreams
from curvedp.sampling import PhysicalBatch, Sampler
from curvedp.train.datasets import moved
from curvedp.train.engine import Engine
from curvedp.train.private import Private

__all__ = ["Witness", "next_sum"]

#: Elements of the canaries' gradients that are written down at a time.
_CHUNK_ELEMENTS = 2**24
#: Where all of them together have more, canaries are told apart less well.
_ALL_ELEMENTS = 2**26

Scores = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _NotedDraws:
    """The run's own sampler; what it draws is noted."""

    inner: Sampler
    drawn: dict[int, npt.NDArray[np.int64]] = field(default_factory=dict, repr=False)

    def draw(self, step: int, population: int) -> npt.NDArray[np.int64]:
        rows = self.inner.draw(step, population)
        self.drawn[step] = rows
        return rows


@dataclass
class _NotedReleases:
    """The run's own mechanism; the last release is noted."""

    inner: Mechanism
    last: Release | None = None

    def init(self, streams: RandomStreams) -> NoiseState:
        return self.inner.init(streams)

    def update(
        self, clipped: ClippedSum, state: NoiseState
    ) -> tuple[Release, NoiseState]:
        release, state = self.inner.update(clipped, state)
        self.last = release
        return release, state

    def event(self, sample_rate: float) -> Event:
        return self.inner.event(sample_rate)


class Witness:
    """Watches one run and scores its canaries.

    Args:
        private: the run, not begun.
        canaries: batches of as many examples: the canaries and, under replacement,
            what stands in their place.
        first: number of the first canary in the dataset; all after it are canaries.
    """

    def __init__(self, private: Private, canaries: Sequence[Batch], first: int) -> None:
        engine: Engine = private._engine
        if private.step:
            raise ConfigurationError("the run has begun", "attach a new one")
        self._private, self._engine = private, engine
        self._canaries, self._first = canaries, first
        self._loader = engine._loader
        self._draws = _NotedDraws(self._loader._sampler)
        self._loader._sampler = self._draws
        self._releases = _NotedReleases(engine.noise.mechanism)
        engine.noise.mechanism = self._releases
        self._device = next(engine.model.parameters()).device

    def watch(self) -> Scores:
        """Make all steps of the run; the log likelihood ratio of every canary."""
        private, engine = self._private, self._engine
        count = _rows(self._canaries[0])
        totals = [np.zeros(count) for _ in self._canaries]
        seen: list[SeenStep] = []
        private.model.train()
        others: ClippedSum | None = None
        while private.steps_left():
            offset, directions = 0, None
            for data in private.loader:
                batch = engine._open.batch
                assert batch is not None
                if directions is None:
                    directions = [
                        self._directions(c, batch.step) for c in self._canaries
                    ]
                units = self._units(batch, offset)
                offset += self._loader._units
                part = self._others(data, batch, units)
                others = part if others is None else others.merge(part)
                private.train_on(tuple(data))
                if not batch.completes:
                    continue
                release = self._releases.last
                assert release is not None
                if private.plan.correlation is not None:
                    residual = self._residual(release, others)
                    seen.append(SeenStep(residual, directions, release.frame))
                else:
                    for total, chunks in zip(totals, directions, strict=True):
                        total += self._ratios(release, others, chunks)
                others, directions, offset = None, None, 0
        if private.plan.correlation is not None:
            totals = self._joint(seen)
        return totals[0] if len(totals) == 1 else totals[0] - totals[1]

    def losses(self) -> Scores:
        """Minus the canaries' losses now: what an outsider sees of the final model."""
        engine, loss = self._engine, self._private._loss
        assert loss is not None
        found = []
        engine.model.eval()
        with torch.no_grad():
            for batch in self._canaries:
                args, kwargs = as_call(batch.inputs)
                output = engine.model(*args, **kwargs)
                found.append(-loss(output, batch.targets).double().cpu().numpy())
        engine.model.train()
        return found[0] if len(found) == 1 else found[0] - found[1]

    def _units(self, batch: PhysicalBatch, offset: int) -> npt.NDArray[np.int64]:
        return self._draws.drawn[batch.step][offset : offset + self._loader._units]

    def _others(
        self, data: Any, batch: PhysicalBatch, units: npt.NDArray[np.int64]
    ) -> ClippedSum:
        """The clipped sum of the drawn examples that are no canaries."""
        slots = self._loader.slots
        own = torch.from_numpy(np.repeat(units < self._first, slots))
        present = batch.present.clone()
        present[: len(own)] &= own
        inputs, targets = moved(tuple(data), self._device)
        ios = _pass(self._private, Batch(inputs, targets))
        return self._engine.clip(ios, present, batch.step, scale=1.0)

    def _directions(self, batch: Batch, step: int) -> list[Directions]:
        size = sum(p.numel() for p in self._engine.parameters.values())
        chunk = max(1, _CHUNK_ELEMENTS // size)
        count = _rows(batch)
        found = []
        for start in range(0, count, chunk):
            ios = _pass(self._private, _cut(batch, slice(start, start + chunk)))
            found.append(
                Directions(ios, self._engine._clip_map(step), self._engine._rule())
            )
        return found

    def _joint(self, seen: list[SeenStep]) -> list[Scores]:
        plan, mechanism = self._private.plan, self._releases.inner
        assert plan.correlation is not None
        assert isinstance(mechanism, CorrelatedMechanism)
        with exact(self._device):
            return joint_ratios(
                seen, mechanism, plan.correlation.bands, plan.event_rate
            )

    def _residual(self, release: Release, others: ClippedSum) -> dict[str, Tensor]:
        return {
            n: release.values[n] - others.values[n] for n in self._engine.parameters
        }

    def _ratios(
        self, release: Release, others: ClippedSum, chunks: Sequence[Directions]
    ) -> Scores:
        residual = self._residual(release, others)
        rate, variance = self._private.plan.sampling.sample_rate, release.noise_std**2
        count = sum(chunk.ios[0].batch_size for chunk in chunks)
        size = sum(v.numel() for v in residual.values())
        with exact(self._device):
            if count > 1 and count * size <= _ALL_ELEMENTS:
                rows = torch.cat([chunk.written(residual) for chunk in chunks])
                flat = torch.cat([v.flatten() for v in residual.values()])
                projected, gram = rows @ flat.to(rows.dtype), rows @ rows.T
                return disentangled_ratio(
                    _array(projected), _array(gram), variance, rate
                )
            projected = torch.cat([c.projections(residual) for c in chunks])
            squared = torch.cat([c.sq_norms() for c in chunks])
        return likelihood_ratio(_array(projected), _array(squared), variance, rate)


def _array(x: Tensor) -> Scores:
    found: Scores = x.double().cpu().numpy()
    return found


def next_sum(private: Private) -> ClippedSum:
    """The pending clipped sum of a run's next step. Private; no step is made."""
    engine = private._engine
    for data in private.loader:
        inputs, targets = moved(tuple(data), next(engine.model.parameters()).device)
        args, kwargs = as_call(inputs)
        loss = private.loss(private.model(*args, **kwargs), targets)
        with withheld("the backward pass"):
            torch.autograd.backward(loss)
        if engine.accumulate():
            break
    pending = engine._open.pending
    assert pending is not None
    return pending


def _pass(private: Private, batch: Batch) -> list[LayerIO]:
    """A recorded pass over examples at the run's present parameters."""
    engine, loss = private._engine, private._loss
    assert loss is not None
    recording = Recording(
        engine.model,
        engine._coverage.covered,
        _rows(batch),
        keep_inputs=engine.plan.clipping.measured_sites,
    )
    args, kwargs = as_call(batch.inputs)
    with withheld("the model or its loss"):
        output = recording.forward(args, kwargs, engine._point())
        torch.autograd.backward(loss(output, batch.targets).sum())
        return recording.layer_ios()


def _rows(batch: Batch) -> int:
    return next(len(x) for x in tree_leaves(batch.inputs) if isinstance(x, Tensor))


def _cut(batch: Batch, part: slice) -> Batch:
    def take(x: Any) -> Any:
        return x[part] if isinstance(x, Tensor) else x

    return Batch(tree_map(take, batch.inputs), tree_map(take, batch.targets))
