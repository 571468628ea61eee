"""Who gives the engine its whitener: the identity, or curvature at declared steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from curvedp.barrier import Provenance, Release
from curvedp.clipping import ClippingRule
from curvedp.curvature import (
    Estimate,
    Factors,
    Refresh,
    estimate,
    factors_from_state,
    factors_state,
)
from curvedp.errors import CheckpointError
from curvedp.layers import Coverage, PerExampleLoss
from curvedp.noise import RandomStreams, Stream
from curvedp.whitening import (
    IdentityWhitener,
    JointWhitening,
    KroneckerWhitening,
    SubspaceWhitening,
    Whitener,
    step_by_step,
)

__all__ = [
    "CurvatureSource",
    "FixedWhitener",
    "WhitenerSource",
    "is_due",
    "on_device",
]


class WhitenerSource(Protocol):
    """Gives the whitener of a step from public and released values alone."""

    @property
    def provenance(self) -> Provenance:
        """Of all that its whiteners are made from."""

    def at(self, step: int) -> Whitener:
        """The whitener of a step; the model has the parameters of that step."""

    def observe(
        self, release: Release, rule: ClippingRule, expected_batch_size: float
    ) -> None:
        """Learn from a release, once it has moved the parameters; or do not."""

    def state(self) -> dict[str, Any]:
        """What is needed to go on, for a checkpoint. Public."""

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a stored state."""


class FixedWhitener:
    """The same map at every step."""

    def __init__(self, whitener: Whitener | None = None) -> None:
        self._whitener = whitener or IdentityWhitener()

    @property
    def provenance(self) -> Provenance:
        return Provenance.SYNTHETIC

    def at(self, step: int) -> Whitener:
        return self._whitener

    def observe(
        self, release: Release, rule: ClippingRule, expected_batch_size: float
    ) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        pass


class CurvatureSource:
    """Estimates curvature at declared steps and keeps it until the next one.

    A map is a function of the parameters at its refresh (released), of the step (a
    clamp's floor moves at each) and of the public probe stream. So a checkpoint holds
    those parameters, and the map is made again from them when a run is resumed. Of a
    moving average it holds the factors.

    Args:
        model: as it is at each step.
        coverage: its verified sites.
        loss: per-example loss, for the probes too.
        how: probe, labels and how many.
        whitening: from factors to a map.
        refresh: when.
        streams: the public probe stream is in them.
    """

    def __init__(
        self,
        model: nn.Module,
        coverage: Coverage,
        loss: PerExampleLoss,
        how: Estimate,
        whitening: KroneckerWhitening | JointWhitening | SubspaceWhitening,
        refresh: Refresh,
        streams: RandomStreams,
    ) -> None:
        self._model = model
        self._coverage = coverage
        self._loss = loss
        # a GPU waits for launches; a CPU does not
        on_gpu = next(model.parameters()).device.type == "cuda"
        self._how = how.joined(coverage.activation_bytes) if on_gpu else how
        self._whitening = whitening
        self._refresh = refresh
        self._streams = streams
        self._made_at: int | None = None
        self._map_of: Callable[[int], Whitener] = lambda _: IdentityWhitener()
        self._made_with: dict[str, Tensor] = {}
        self._factors: Factors | None = None

    @property
    def provenance(self) -> Provenance:
        return self._how.probe.provenance

    def at(self, step: int) -> Whitener:
        if is_due(self._refresh, self._made_at, step):
            self._make(step, self._parameters())
        return self._map_of(step)

    def observe(
        self, release: Release, rule: ClippingRule, expected_batch_size: float
    ) -> None:
        pass

    def _parameters(self) -> dict[str, Tensor]:
        named = dict(self._model.named_parameters())
        return {n: named[n].detach().clone() for n in self._coverage.parameters}

    def _make(self, step: int, parameters: Mapping[str, Tensor]) -> None:
        factors = estimate(
            self._model,
            self._coverage.covered,
            self._how,
            self._loss,
            self._generator(step),
            parameters,
        )
        decay = self._refresh.decay
        if decay and self._factors is not None:
            factors = self._factors.scaled(decay) + factors.scaled(1 - decay)
        self._build(step, factors, parameters)

    def _build(
        self, step: int, factors: Factors, parameters: Mapping[str, Tensor]
    ) -> None:
        self._map_of = step_by_step(self._whitening, factors, parameters, step)
        self._made_at = step
        averaged = self._refresh.decay > 0
        self._factors = factors if averaged else None
        self._made_with = {} if averaged else dict(parameters)

    def _generator(self, step: int) -> torch.Generator:
        seed = self._streams.torch_seed(Stream.PROBE, step)
        return torch.Generator().manual_seed(seed % 2**63)

    def state(self) -> dict[str, Any]:
        if self._made_at is None:
            return {}
        state: dict[str, Any] = {"step": self._made_at}
        if self._factors is not None:
            return state | {"factors": factors_state(self._factors)}
        return state | {"parameters": self._made_with}

    def load(self, state: dict[str, Any]) -> None:
        self._made_at, self._factors = None, None
        if not state:
            return
        placed = on_device(state, next(self._model.parameters()).device)
        if "factors" in placed:
            factors = factors_from_state(placed["factors"])
            self._build(placed["step"], factors, self._parameters())
        else:
            self._make(placed["step"], placed["parameters"])


def is_due(refresh: Refresh, made_at: int | None, step: int) -> bool:
    """Whether a map has to be made at a step, where the last one was made earlier.

    Raises:
        CheckpointError: it was due before, and what it is made of is gone.
    """
    due = refresh.last_due(step)
    if due not in (made_at, step):
        raise CheckpointError(
            f"the whitener of step {step} was made at step {due}, and what it was made "
            "of is not in the stored state",
            "resume from a checkpoint that this recipe has written",
        )
    return made_at != due


def on_device(state: Any, device: torch.device) -> Any:
    """A stored state with its tensors on a device."""
    return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, state)
