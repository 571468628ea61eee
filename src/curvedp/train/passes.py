r"""A pass over a physical batch: forward, loss, backward; what is left are ``LayerIO``.

In which precision the model computes is said here. ``precision="bf16"`` runs its
forward pass under torch's bfloat16 autocast: products and convolutions in bfloat16,
what needs more digits (softmax, norms of layers) in float32. The backward pass follows.
Outputs are float32 again before the loss sees them.

The clip bound does not rest on any of that. Inputs ``a`` and output gradients ``d`` are
rounded to bfloat16 when they are captured, and *these* rounded values have the norms
that are measured and the sum that is released: both are computed from the same tensors,
in float32 or float64 (:mod:`curvedp.layers.precision`). What an example contributes
after clipping is at most C, whatever rounding made of its gradient.

``precision="bf16-kept"`` computes in the model's own float32 and keeps in bfloat16:
what waits for the backward pass and for the clipped sum takes half the memory
(:mod:`curvedp.layers.kept`). The bound holds for the same reason: the rounded ``a`` and
``d`` are the tensors whose norms are measured and whose sum is released, and rounding
one example never looks at another.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from curvedp.errors import ConfigurationError
from curvedp.layers import Coverage, LayerIO, PerExampleLoss, Recording, as_call
from curvedp.layers.kept import Keeper
from curvedp.layers.precision import NormPrecision
from curvedp.layers.remade import Remaker
from curvedp.layers.state import State

__all__ = ["KEPT", "PRECISIONS", "ForwardPrecision", "RecordedPass", "chosen_norms"]

#: Bytes that a pass holds for its backward pass, from which on inputs that are cheap to
#: compute again are let go; by device. Small passes have more to lose than to gain, and
#: those that a CPU makes by default are smaller than this.
REMADE_FROM = {"cpu": 2**25, "cuda": 2**30}

#: Keeps in bfloat16 what is computed in the model's own precision.
KEPT = "bf16-kept"

#: By name, the dtype that autocast runs a forward pass in; None leaves the model's own.
PRECISIONS = {"bf16": torch.bfloat16, KEPT: None}


class ForwardPrecision:
    """In which precision a model's forward pass is computed, and what it keeps.

    Args:
        name: "bf16", "bf16-kept", or None for the model's own.
        model: whose parameters stay what they are.

    Attributes:
        keeps_short: whether what waits is kept in bfloat16.
        remade_from: bytes that a pass holds, from which on what is cheap to compute
            again is not kept (:mod:`curvedp.layers.remade`).
    """

    def __init__(self, name: str | None, model: nn.Module) -> None:
        if name is not None and name not in PRECISIONS:
            raise ConfigurationError(
                f"precision must be one of {', '.join(PRECISIONS)}, not {name!r}",
                "leave it out for the model's own precision",
            )
        found = {p.dtype for p in model.parameters()}
        if name is not None and torch.float64 in found:
            raise ConfigurationError(
                f"precision={name!r} is for float32 models, and this one has float64 "
                "parameters, which stay as they are",
                "call model.float() before, or leave precision out",
            )
        self._named = name is not None
        self.keeps_short = name == KEPT
        self._dtype = None if name is None else PRECISIONS[name]
        self._device = next(model.parameters()).device.type
        self.remade_from: float = REMADE_FROM.get(self._device, math.inf)

    def dtypes(self) -> set[torch.dtype]:
        """That a pass rounds to, besides the model's own."""
        return {self._dtype or torch.bfloat16} if self._named else set()

    def as_of_large_passes(self) -> ForwardPrecision:
        """The same, keeping of every pass no more than a large one would."""
        found = copy.copy(self)
        found.remade_from = 0.0 if math.isfinite(self.remade_from) else math.inf
        return found

    def recording(
        self,
        model: nn.Module,
        coverage: Coverage,
        rows: int,
        keep: bool | Collection[str],
    ) -> Recording:
        """Of one pass, with who keeps its tensors if they are not kept as they are.

        Args:
            model: the user's.
            coverage: its verified sites.
            rows: of the physical batch.
            keep: sites whose inputs are asked for besides gradients; or all of them.
        """
        held = coverage.activation_bytes * rows
        remakes = self._dtype is None and held >= self.remade_from
        return Recording(
            model,
            coverage.covered,
            rows,
            keep_inputs=keep,
            keeper=Keeper() if self.keeps_short else None,
            remaker=Remaker() if remakes else None,
        )

    @contextmanager
    def during_forward(self) -> Iterator[None]:
        """Around the forward pass of the model."""
        if self._dtype is None:
            yield
            return
        # weights differ at every step, and a cache of casts would outlive a recording
        with torch.autocast(self._device, self._dtype, cache_enabled=False):
            yield

    def outputs(self, output: Any) -> Any:
        """Outputs as the loss sees them: float32 where autocast made them shorter."""
        if self._dtype is None:
            return output
        return tree_map(self._widened, output)

    def _widened(self, x: Any) -> Any:
        return x.float() if isinstance(x, Tensor) and x.dtype == self._dtype else x


def chosen_norms(name: str | None) -> NormPrecision:
    """How precisely norms are computed, by name; None for the device's best."""
    try:
        return NormPrecision.WIDE if name is None else NormPrecision(name)
    except ValueError:
        names = ", ".join(precision.value for precision in NormPrecision)
        raise ConfigurationError(
            f"norm_precision must be one of {names}, not {name!r}",
            "leave it out for float64 where the device is not much slower at that",
        ) from None


class RecordedPass:
    """From a batch to what its layers saw of it.

    Args:
        model: the user's model.
        coverage: its verified sites.
        loss: per-example loss.
        rows: of every physical batch.
        precision: of the forward pass.
        state: what the model holds, if nobody else looks at it around the pass.
    """

    def __init__(
        self,
        model: nn.Module,
        coverage: Coverage,
        loss: PerExampleLoss,
        *,
        rows: int,
        precision: ForwardPrecision | None = None,
        state: State | None = None,
    ) -> None:
        self.model = model
        self.rows = rows
        self._coverage = coverage
        self._loss = loss
        self._state = state
        self.precision = precision or ForwardPrecision(None, model)

    def __call__(
        self,
        inputs: Any,
        targets: Any,
        *,
        point: Mapping[str, Tensor] | None = None,
        keep_inputs: Collection[str] = (),
    ) -> tuple[list[LayerIO], Tensor]:
        """A LayerIO for each layer, of the mean loss, and that loss. All private.

        Args:
            inputs: of the model, on its device.
            targets: of the loss, likewise.
            point: where gradients are taken, if not at the parameters.
            keep_inputs: sites whose inputs are asked for besides gradients.
        """
        recording = self.precision.recording(
            self.model, self._coverage, self.rows, keep_inputs
        )
        args, kwargs = as_call(inputs)
        state = self._state
        if state is not None:
            state.open()
        try:
            with self.precision.during_forward():
                output = recording.forward(args, kwargs, point)
                if state is not None:
                    state.after_forward(args, kwargs, point)
            loss = self._loss(self.precision.outputs(output), targets).mean()
            torch.autograd.backward(loss)
            ios = recording.layer_ios()
            if state is not None:
                state.close()
        finally:
            if state is not None:
                state.give_up()  # what is closed already stays as it is
        return ios, loss.detach()
