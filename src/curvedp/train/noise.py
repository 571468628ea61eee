"""The noise of a run as the engine sees it: one object from step to step.

Independent noise has no past. Correlated noise has a state, which is secret, and blocks
(:mod:`curvedp.noise.correlated`). What is stored of it in a checkpoint is public: where
the present block began, in which frame, on which model of device, by which strategy.
With the run's secret (:mod:`curvedp.train.secret`) a resumed run draws the noise of the
block again and goes on with it, if nothing at all speaks against it; otherwise it
begins a new block, which costs accuracy and never privacy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from curvedp.accounting import CyclicGaussianEvent, Event, Ledger, MemoryLedger
from curvedp.barrier import ClippedSum, Release
from curvedp.noise import CorrelatedMechanism, CorrelatedState, RandomStreams
from curvedp.plan import Plan
from curvedp.train.secret import RunSecret
from curvedp.values import is_whole

__all__ = ["RunNoise"]


class RunNoise:
    """Adds noise step by step, and knows how the present block began.

    Args:
        plan: which noise.
        streams: where it comes from.
        ledger: of what was paid.
        secret: of the run, if its noise is correlated.
        device: what draws noise, as :func:`curvedp.train.secret.drawing_device` says.

    Attributes:
        mechanism: what adds it.
    """

    def __init__(
        self,
        plan: Plan,
        streams: RandomStreams,
        ledger: Ledger | MemoryLedger,
        secret: RunSecret | None,
        device: str,
    ) -> None:
        self._plan = plan
        self._streams = streams
        self._ledger = ledger
        self._secret = secret
        self._device = device
        self.mechanism = plan.mechanism()
        self._state = self.mechanism.init(streams)
        self._digest = ""
        if isinstance(self.mechanism, CorrelatedMechanism):
            self._digest = self.mechanism.strategy.digest()
        self._assignment = "" if plan.correlation is None else streams.fingerprint()
        self._begin: tuple[int, str] | None = None  # first step and frame of the block
        self._left = (-1, -1, 0)

    def event(self, step: int) -> Event:
        """What a step has to pay for."""
        return self._plan.step_event(step, self._assignment)

    def steps_left(self, step: int) -> int:
        """Steps from ``step`` on that the budget still allows."""
        paid = self._ledger.count()
        if self._left[:2] != (paid, step):  # asked several times in a step
            left = self._plan.steps_left(self._ledger, step, self._assignment)
            self._left = paid, step, left
        return self._left[2]

    def release(self, pending: ClippedSum, attempt: int) -> Release:
        """Add noise. The payment must be on disk when this is called."""
        state = replace(self._state, attempt=attempt)
        release, self._state = self.mechanism.update(pending, state)
        if isinstance(self._state, CorrelatedState) and self._state.start is not None:
            self._begin = self._state.start, self._state.frame
        return release

    def finish(self, step: int) -> None:
        """Remove the run's secret when no further step will be made."""
        if self._secret is not None and self.steps_left(step) == 0:
            self._secret.forget()

    def replayed(self, release: Release) -> None:
        """A release was read from the journal: follow where blocks begin."""
        if self._begin is None or self._begin[1] != release.frame:
            self._begin = release.step, release.frame

    def stored(self) -> dict[str, Any]:
        """What a checkpoint holds. Public; never the noise."""
        if self._begin is None or self._plan.correlation is None:
            return {}
        start, frame = self._begin
        facts = {"device": self._device, "digest": self._digest}
        return {"start": start, "frame": frame, **facts}

    def load(self, stored: dict[str, Any]) -> None:
        """Go on from a checkpoint; call :meth:`rejoin` when the journal is read."""
        self._state = self.mechanism.init(self._streams)
        own = {"device": self._device, "digest": self._digest}
        same = bool(stored) and all(stored.get(k) == v for k, v in own.items())
        if not same:
            self._begin = None
            return
        start, frame = stored["start"], stored["frame"]
        if not is_whole(start) or not isinstance(frame, str):
            raise ValueError("its block of noise begins nowhere")
        self._begin = start, frame

    def rejoin(self, step: int) -> None:
        """Continue the block that steps before ``step`` belong to, if that is safe."""
        self.finish(step)
        if self._secret is not None and self.steps_left(step) == 0:
            return  # it is forgotten, and must not be written again
        mechanism, begin = self.mechanism, self._begin
        if not isinstance(mechanism, CorrelatedMechanism) or begin is None:
            return
        start, frame = begin
        if self._ledger.next_attempt(step) or not self._is_known(start, step):
            self._begin = None  # a release was lost, or its noise is not known
            return
        self._state = mechanism.resumed(self._streams, range(start, step), frame)
        if self._secret is not None:
            self._secret.joined()

    def _is_known(self, start: int, stop: int) -> bool:
        if self._secret is None or not self._secret.covers(start, stop):
            return False
        return all(
            isinstance(p.event, CyclicGaussianEvent)
            and p.event.assignment == self._assignment
            for p in self._ledger.payments()
            if start <= p.step < stop
        )
