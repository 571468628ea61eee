r"""A physical batch's pass as one CUDA graph: forward, backward, norms, clipped sum.

A small net on a large GPU waits for the CPU that launches its kernels, a few hundred a
step. A graph is recorded once and launched as one. Inside it everything has a fixed
place in memory: batches are copied to where the recorded one stood, parameters move
where they are, and the sum is copied out. What was not recorded does not happen, so a
graph is recorded again whenever something that it took for granted is another:

- shapes, dtypes and constants of the batch; train or eval mode of any module;
- where parameters and buffers lie in memory;
- the clip rule; the whitener, unless only its numbers are others (at a refresh): those
  are copied to where the recorded ones stood.

Payment, noise, journal and optimiser are outside: their order on the disk is what the
guarantee rests on (:mod:`curvedp.train.releasing`). The noise has a graph of its own
(:mod:`curvedp.noise.graphed`), and so has the way back from the whitened frame.

A graph cannot look whether an example is non-finite and has to be replaced. Replacing
always copies all that the layers have written down: nothing in a small net, a twentieth
of the step in a large one. There the sum is made in the hope that nothing has to be
replaced, and the CPU looks whether that was so before the sum is used. If not, it is
thrown away, and another graph makes it with replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from curvedp.barrier import ClippedSum
from curvedp.clipping import ClippingRule, clipped_sum, own_copy
from curvedp.cuda import fill, own_values, record
from curvedp.errors import ConfigurationError, private_text_shown
from curvedp.layers import Coverage
from curvedp.layers.precision import NormPrecision
from curvedp.train.compiled import CompiledPass
from curvedp.train.guard import each_module
from curvedp.train.passes import RecordedPass
from curvedp.update import mapped_back
from curvedp.whitening import Whitener, own_map, refill

__all__ = ["HOPED_BYTES", "Capture", "CudaCapture", "GraphedPass", "GraphedReadOut"]

T = TypeVar("T")

#: A pass: the bounded sum of a batch, its mean loss, and whether all was finite.
Pass = Callable[[], tuple[ClippedSum, Tensor, Tensor]]


class Capture(Protocol):
    """From work to a function that repeats it, with what its inputs then hold.

    What that returns is overwritten by the next call, of it or of any other function
    from the same capture.
    """

    def __call__(
        self, work: Callable[[], T], device: torch.device
    ) -> Callable[[], T]: ...


#: Graphs kept at a time; a run has one, or a few where the batches differ in shape.
MOST_GRAPHS = 8

#: Bytes that the layers write down, from which on copying them takes longer than to let
#: the CPU look at one number.
HOPED_BYTES = 2**30


class GraphedPass:
    """From a physical batch to its clipped sum, recorded and replayed.

    Args:
        recorded: the pass up to the layers' values, eager or compiled.
        model: the user's model, on a CUDA device.
        coverage: its verified sites.
        slots: rows of one unit.
        views: of an example, whose mean gradient is clipped.
        norms: precision of the norms.
        expected: declared batch size of a step.
        capture: how a pass is recorded; its slow twin runs the pass again.
        hoped_bytes: from how many on nothing is replaced before the CPU has looked.

    Attributes:
        loss: mean over the rows of the last batch, padding included; private.
        ran: whether the model's Python ran in the last pass, which was recorded.
    """

    def __init__(
        self,
        recorded: RecordedPass | CompiledPass,
        model: nn.Module,
        coverage: Coverage,
        *,
        slots: int = 1,
        views: int = 1,
        norms: NormPrecision = NormPrecision.WIDE,
        expected: float = 0.0,
        capture: Capture | None = None,
        hoped_bytes: int = HOPED_BYTES,
    ) -> None:
        self._recorded = recorded
        self._model = model
        self._coverage = coverage
        self._slots = slots
        self._views = views
        self._norms = norms
        self._expected = expected
        self._capture = capture or CudaCapture()
        self._graphs: dict[Hashable, tuple[list[Any], Pass]] = {}
        self._map = _PlacedMap()
        self._recorded_map: Whitener | None = None
        self._hopes = coverage.activation_bytes * recorded.rows >= hoped_bytes
        self.loss: Tensor | None = None
        self.ran = True

    def __call__(
        self,
        inputs: Any,
        targets: Any,
        present: Tensor,
        *,
        rule: ClippingRule,
        whitener: Whitener,
        step: int,
        point: Mapping[str, Tensor] | None = None,
    ) -> ClippedSum:
        """The clipped sum over the rows that are present; the loss stays in ``loss``.

        ``point`` is where gradients are taken, if not at the parameters. With the
        guarantees of :func:`curvedp.clipping.clipped_sum`.
        """
        leaves, spec = tree_flatten((inputs, targets, present, point))
        key = (_signature(leaves), str(spec), _state(self._model), rule)
        device = next(self._model.parameters()).device
        own = self._map.holding(whitener, device)
        self.ran = False
        for careful in (False, True) if self._hopes else (True,):
            work = partial(self._pass, rule=rule, whitener=own, careful=careful)
            replay = self._replay_of((key, careful), leaves, spec, own, work)
            part, loss, finite = replay()
            if careful or bool(finite):
                break
        self.loss = loss.clone()
        return own_copy(part, step, whitener.frame)

    def _replay_of(
        self,
        key: Hashable,
        leaves: list[Any],
        spec: TreeSpec,
        own: Whitener,
        work: Callable[..., tuple[ClippedSum, Tensor, Tensor]],
    ) -> Pass:
        """A graph of the work, and the batch copied to where it reads."""
        stale = own is not self._recorded_map
        if stale or key not in self._graphs:
            device = next(self._model.parameters()).device
            places = [
                x.to(device, copy=True) if isinstance(x, Tensor) else x for x in leaves
            ]
            batch = tree_unflatten(places, spec)
            self.ran = True
            new = places, self._capture(partial(work, *batch), device)
            # after it was recorded: its memory is theirs
            if stale or len(self._graphs) == MOST_GRAPHS:
                self._graphs.clear()
            self._graphs[key], self._recorded_map = new, own
        places, replay = self._graphs[key]
        for place, leaf in zip(places, leaves, strict=True):
            if isinstance(place, Tensor):
                place.copy_(leaf, non_blocking=True)
        return replay

    def _pass(
        self,
        inputs: Any,
        targets: Any,
        present: Tensor,
        point: Mapping[str, Tensor] | None,
        *,
        rule: ClippingRule,
        whitener: Whitener,
        careful: bool,
    ) -> tuple[ClippedSum, Tensor, Tensor]:
        named = dict(self._model.named_parameters())
        ios, loss = self._recorded(
            inputs, targets, point=point, keep_inputs=rule.measured_sites
        )
        replacing = _Decided(careful)
        part = clipped_sum(
            ios,
            rule,
            whitener,
            parameters={name: named[name] for name in self._coverage.parameters},
            present=present,
            step=0,
            scale=self._recorded.rows / self._views,
            slots=self._slots,
            replacing=replacing,
            norms=self._norms,
            expected=self._expected,
        )
        return part, loss, replacing.all_finite


class _Decided:
    """Replaces or not, whatever the values are, and keeps whether it was needed."""

    def __init__(self, answer: bool) -> None:
        self._answer = answer
        self.all_finite: Tensor

    def __call__(self, finite: Tensor) -> bool:
        self.all_finite = finite.all()
        return self._answer


def _signature(leaves: list[Any]) -> Hashable:
    return tuple(
        (x.shape, x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves
    )


def _state(model: nn.Module) -> Hashable:
    """Modes, and where everything lies that a replay will read."""
    found: list[Hashable] = []
    for module in each_module(model):
        found.append(module.training)
        for held in (module._parameters, module._buffers):
            for x in held.values():
                if x is not None:
                    found += (x.data_ptr(), x.requires_grad)
    return tuple(found)


class _PlacedMap:
    """A whitener whose numbers are replaced where they lie, as long as they fit."""

    def __init__(self) -> None:
        self._own: Whitener | None = None
        self._last: Whitener | None = None

    def holding(self, whitener: Whitener, device: torch.device) -> Whitener:
        """The map with these numbers; another object where they do not fit."""
        if whitener is self._last and self._own is not None:
            return self._own
        if self._own is None or not refill(self._own, whitener, device):
            self._own = own_map(whitener)
        self._last = whitener
        return self._own


class GraphedReadOut:
    """:func:`curvedp.update.mapped_back`, recorded for the present whitener.

    Args:
        capture: how it is recorded.
    """

    def __init__(self, capture: Capture | None = None) -> None:
        self._capture = capture or CudaCapture()
        self._key: Hashable = None
        self._map = _PlacedMap()
        self._recorded_map: Whitener | None = None
        self._places: dict[str, Tensor] = {}
        self._replay: Callable[[], Mapping[str, Tensor]] = dict

    def __call__(
        self, values: Mapping[str, Tensor], whitener: Whitener, back_map: str
    ) -> dict[str, Tensor]:
        """Values in the parameters' own coordinates, in memory of their own."""
        key = (tuple(values), _signature(list(values.values())), back_map)
        device = next(iter(values.values())).device
        own = self._map.holding(whitener, device)
        if own is not self._recorded_map or key != self._key:
            self._places = own_values(values)
            work = partial(mapped_back, self._places, own, back_map)
            self._replay = self._capture(work, device)
            self._key, self._recorded_map = key, own
        fill(self._places, values)
        return own_values(self._replay())


class CudaCapture:
    """Records work as CUDA graphs that share their memory, one replayed at a time.

    A graph that takes another's place finds the same memory again.
    """

    def __init__(self) -> None:
        self._pool: Any = None
        self._last: Any = None

    def __call__(self, work: Callable[[], T], device: torch.device) -> Callable[[], T]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            replay = record(work, device, pool=self._pool)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise _not_recordable(error) from error
        self._last = replay  # a pool that no graph is left of cannot be used again
        return replay


def _not_recordable(error: Exception) -> ConfigurationError:
    # what was recorded is a pass over a private batch
    said = str(error) if private_text_shown() else type(error).__name__
    return ConfigurationError(
        f"this model's step cannot be recorded as a CUDA graph: {said}",
        "leave cuda_graph out; a model that looks at values (.item(), if on a tensor, "
        "boolean indexing) needs the CPU in every step",
    )
