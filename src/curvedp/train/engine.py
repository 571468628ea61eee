"""The private step, in one place: every tier of the API goes through here.

A logical step is a sequence of physical batches. For each of them: forward, backward,
clip, add to the pending sum. When the last one is in, the sum is released and the
parameters move (:mod:`curvedp.train.releasing`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from curvedp.accounting import Ledger, MemoryLedger
from curvedp.accounting.records import INDEPENDENT_NOTE
from curvedp.barrier import ClippedSum
from curvedp.clipping import clipped_sum
from curvedp.errors import LoopError
from curvedp.layers import Coverage, LayerIO, PerExampleLoss, Recording, Synthesiser
from curvedp.layers.bits import Flag, any_of
from curvedp.layers.precision import NormPrecision
from curvedp.layers.state import State
from curvedp.noise import RandomStreams
from curvedp.plan import Plan
from curvedp.sampling import PhysicalBatch, PhysicalLoader, Views
from curvedp.train.compiled import CompiledPass
from curvedp.train.coupling import CouplingCheck
from curvedp.train.datasets import moved
from curvedp.train.explained import StepPlan, explain
from curvedp.train.graph import HOPED_BYTES, Capture, GraphedPass, GraphedReadOut
from curvedp.train.guard import Attached, refuse_processes
from curvedp.train.journal import Journal
from curvedp.train.passes import ForwardPrecision, RecordedPass
from curvedp.train.releasing import Releasing
from curvedp.train.rows import GivenRows, LoopRows
from curvedp.train.secret import RunSecret
from curvedp.train.whitened import WhitenerSource
from curvedp.update import BackMap, Chain

__all__ = ["Engine"]

_NO_BATCH = (
    "optimizer.step() without a batch from private.loader",
    "iterate over private.loader; a private step takes no other data",
)


@dataclass
class _Open:
    """What exists between a batch leaving the loader and its release. Private."""

    batch: PhysicalBatch | None = None
    given: GivenRows | None = None
    recording: Recording | None = None
    pending: ClippedSum | None = None
    flags: list[Flag] = field(default_factory=list)  # whether the pass wrote to memory


class Engine(Releasing):
    """Runs private steps on a model.

    Args:
        model: the user's model.
        coverage: verified sites of the model.
        loader: draws and cuts the batches.
        precision: of the model's forward pass.
        norms: precision of the norms.
        synthetic: makes rows of the model's shapes.
        kept: finds weights of the last checkpoint by name.
        coupling: looks again in a mode that it has not seen.

    The other arguments, and what is known of where the run stands, are those of
    :class:`curvedp.train.releasing.Releasing`.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        coverage: Coverage,
        whiteners: WhitenerSource,
        chain: Chain,
        streams: RandomStreams,
        ledger: Ledger | MemoryLedger,
        loader: PhysicalLoader,
        journal: Journal | None = None,
        back_map: str = "none",
        precision: ForwardPrecision | None = None,
        norms: NormPrecision = NormPrecision.WIDE,
        secret: RunSecret | None = None,
        synthetic: Synthesiser | None = None,
        kept: Callable[[str], Tensor | None] | None = None,
        coupling: CouplingCheck | None = None,
    ) -> None:
        named = dict(model.named_parameters())
        super().__init__(
            {name: named[name] for name in coverage.parameters},
            optimizer=optimizer,
            plan=plan,
            whiteners=whiteners,
            back_map=back_map,
            chain=chain,
            streams=streams,
            ledger=ledger,
            journal=journal,
            secret=secret,
        )
        self.model = model
        self.physical_batch_size = loader.physical_batch_size
        self._coverage = coverage
        self._precision = precision or ForwardPrecision(None, model)
        self._norms = norms
        self._compiled: CompiledPass | None = None
        self.coupling = coupling
        self._loader = loader
        self.attached = Attached(
            model,
            optimizer,
            self.parameters,
            State(model, coverage.written_anew, synthetic, kept),
            ledger.close,
        )
        self._open = _Open()
        self._walk: object = None
        self._rows = LoopRows(self.physical_batch_size)
        self._scale: Callable[[], float] = lambda: 1.0

    def set_scale(self, scale: Callable[[], float]) -> None:
        """What the loss's gradients are to be multiplied with, asked at each batch.

        So that they are those of the per-example losses.
        """
        self._scale = scale

    @property
    def views(self) -> Views | None:
        """Views of each example that are averaged before clipping."""
        return self._loader.shown

    @property
    def between_steps(self) -> bool:
        """Whether no logical batch is half done."""
        return self._open.pending is None and self._open.batch is None

    @property
    def inside_logical_batch(self) -> bool:
        """Whether some physical batches of the current step are clipped already."""
        return self._open.pending is not None

    def batches(self, steps: int) -> Iterator[PhysicalBatch]:
        """Physical batches of the next steps, at most as many as the budget allows."""
        # they may have been started since it was attached
        refuse_processes(INDEPENDENT_NOTE in self.ledger.notes())
        self._open = _Open()  # a batch that an earlier loop left behind is not released
        self._walk = walk = object()
        stop = self.step + min(steps, self.steps_left)
        try:
            for batch in self._loader.steps(self.step, stop):
                if self._walk is not walk:
                    raise LoopError(
                        "another pass over private.loader has begun since: both would "
                        "give the same portions, and the step would hold each of them "
                        "twice",
                        "take batches from one iterator of private.loader at a time",
                    )
                self._take_in()
                self._open.batch = batch
                self._open.given = self._rows.given(batch.data)
                self._open.recording = None
                yield batch
        finally:
            if self._walk is walk:
                self.attached.state.give_up()

    def _take_in(self) -> None:
        """Accumulate a portion that the loop left without ``optimizer.step()``.

        Gradient accumulation: the step may wait until the logical batch is whole, but
        no longer, and no portion may be left out.
        """
        batch, recording = self._open.batch, self._open.recording
        if batch is None:
            return
        if recording is None or not recording.reached:
            raise LoopError(
                f"a batch of step {batch.step} was taken from the loader and never "
                "went through loss.backward(): skipping a batch for what is in it is a "
                "release that nobody paid for",
                "call loss.backward() for every batch",
            )
        if batch.completes:
            raise LoopError(
                f"the logical batch of step {batch.step} is whole and never went "
                "through optimizer.step()",
                "call optimizer.step() for every batch, or when private.batch_is_whole",
            )
        self.accumulate()

    @property
    def batch_is_whole(self) -> bool:
        """Whether the batch in hand is the last portion of its logical batch."""
        return self._open.batch is not None and self._open.batch.completes

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A recorded forward pass over the open batch."""
        if self._open.batch is not None and self._open.recording is not None:
            raise LoopError(
                "the model was called twice for one batch: each example would be "
                "clipped and counted twice, or one of the passes lost",
                "compute the whole loss from one call of the model; wrap other passes "
                "in torch.no_grad()",
            )
        if self._compiled is not None:
            raise LoopError(
                "compile=True makes forward, loss and backward one program, and the "
                "loop calls the model itself",
                "use private.train_on(batch) in the loop, or leave compile out",
            )
        named = {f"argument {i}": x for i, x in enumerate(args, 1)}
        self.require_rows("private.model", named | kwargs)
        self._begin()
        recording = self._precision.recording(
            self.model,
            self._coverage,
            self.physical_batch_size,
            self.plan.clipping.measured_sites,
        )
        point = self._point()
        with self.attached.unbroken(), self._precision.during_forward():
            output = recording.forward(args, kwargs, point)
            self.attached.state.after_forward(args, kwargs, point)
        self._open.recording = recording
        output = self._precision.outputs(output)
        if self._open.given is not None:
            self._open.given.outputs.made(output)
        return output

    def require_rows(self, where: str, values: Mapping[str, Any]) -> None:
        """Refuse what are not the rows of the open batch, if there is one."""
        if self._open.given is not None:
            self._open.given.require(where, values)

    def unrecorded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A pass without gradients; between two batches it is the user's alone."""
        between = self._open.batch is None and not self.attached.state.is_open
        return (self.model if between else self.attached.watched)(*args, **kwargs)

    def require_made(self, output: Any) -> None:
        """Refuse what is not the model's output for the open batch, if there is one."""
        if self._open.given is not None:
            self._open.given.outputs.require(output)

    def forget_output(self) -> None:
        """Let go of what is kept for :meth:`require_made`: it may be large.

        After a last look, whether it was written to since the loss got it.
        """
        if self._open.given is not None:
            self._open.given.outputs.close()
            self._open.given.outputs.forget()

    def require_backward(self) -> tuple[PhysicalBatch, Recording]:
        """The open batch and its recorded pass, or an error naming what is missing."""
        batch, recording = self._open.batch, self._open.recording
        if batch is None:
            raise LoopError(*_NO_BATCH)
        if recording is None or not recording.reached:
            raise LoopError(
                "optimizer.step() before a backward pass through private.model",
                "call private.model(inputs) (not the bare model), then loss.backward()",
            )
        self.attached.refuse_foreign_gradients()
        return batch, recording

    def accumulate(self) -> bool:
        """Clip what the backward pass brought; True when the logical batch is whole."""
        batch, recording = self.require_backward()
        self.forget_output()
        with self.attached.unbroken():
            ios = recording.layer_ios()
            self._open.flags = self.attached.state.close_later()
            return self._take(ios, batch, self._scale())

    def _take(self, ios: Sequence[LayerIO], batch: PhysicalBatch, scale: float) -> bool:
        return self._merge(self.clip(ios, batch.present, batch.step, scale), batch)

    def clip(
        self, ios: Sequence[LayerIO], present: Tensor, step: int, scale: float
    ) -> ClippedSum:
        """The clipped sum of a physical batch, as this run clips. Private.

        ``scale`` makes its gradients those of the per-example losses.
        """
        return clipped_sum(
            ios,
            self._rule(),
            self._clip_map(step),
            parameters=self.parameters,
            present=present,
            step=step,
            scale=scale / self._loader.views,
            slots=self._loader.slots,
            norms=self._norms,
            expected=self.plan.sampling.expected_batch_size,
        )

    def accumulate_compiled(
        self, compiled: CompiledPass, batch: tuple[Any, Any]
    ) -> bool:
        """Pass over a batch by a program, and clip it as ``accumulate`` does."""
        opened = self._unpassed(batch)
        device = next(iter(self.parameters.values())).device
        with self.attached.unbroken():
            ios, _ = compiled(
                *moved(batch, device),
                point=self._point(),
                keep_inputs=self.plan.clipping.measured_sites,
            )
            self._open.flags = self.attached.state.close_later(quietly=True)
            return self._take(ios, opened, float(self.physical_batch_size))

    def accumulate_graphed(self, graphed: GraphedPass, batch: tuple[Any, Any]) -> bool:
        """Pass over a batch and clip it, in one launch; as ``accumulate`` otherwise."""
        opened = self._unpassed(batch)
        with self.attached.unbroken():
            part = graphed(
                *batch,
                opened.present,
                rule=self._rule(),
                whitener=self._clip_map(opened.step),
                step=opened.step,
                point=self._point(),
            )
            state = self.attached.state
            self._open.flags = state.close_later(quietly=True, ran=graphed.ran)
            return self._merge(part, opened)

    def _unpassed(self, batch: tuple[Any, Any]) -> PhysicalBatch:
        """The open batch, for a pass that is made here and not by the loop."""
        opened = self._open.batch
        if opened is None:
            raise LoopError(*_NO_BATCH)
        self.attached.refuse_foreign_gradients()
        inputs, targets = batch
        values = {"inputs": inputs, "targets": targets}
        self.require_rows("private.train_on", values)
        self._begin(runs=False)
        return opened

    def _begin(self, *, runs: bool = True) -> None:
        """What was checked is still so, in this mode too; the model is watched."""
        self.attached.begin(runs=runs)
        if self.coupling is not None:
            with self.attached.unbroken():
                self.coupling.require_mode()

    def compiled(
        self,
        loss: PerExampleLoss,
        synthetic: Synthesiser | None = None,
        backend: str = "inductor",
    ) -> CompiledPass:
        """The pass as a program, from now on the only way; see ``train.compiled``."""
        self._compiled = CompiledPass(self._recorded(loss), synthetic, backend)
        return self._compiled

    def _recorded(self, loss: PerExampleLoss) -> RecordedPass:
        return RecordedPass(
            self.model,
            self._coverage,
            loss,
            rows=self.physical_batch_size,
            precision=self._precision,
        )

    def graphed(
        self,
        loss: PerExampleLoss,
        capture: Capture | None = None,
        hoped_bytes: int = HOPED_BYTES,
    ) -> GraphedPass:
        """The pass over a batch as a graph; see :mod:`curvedp.train.graph`.

        The way back from the whitened frame is recorded too from then on.
        """
        self._back = BackMap(self._back.kind, GraphedReadOut(capture))
        return GraphedPass(
            self._compiled or self._recorded(loss),
            self.model,
            self._coverage,
            slots=self._loader.slots,
            views=self._loader.views,
            norms=self._norms,
            expected=self.plan.sampling.expected_batch_size,
            capture=capture,
            hoped_bytes=hoped_bytes,
        )

    def explain(self, synthesise: Synthesiser) -> StepPlan:
        """How every layer is served at the next step, and what it takes."""
        return explain(
            self.model,
            self._coverage,
            synthesise,
            self._clip_map(self.step),
            physical_batch_size=self.physical_batch_size,
            slots=self._loader.slots,
            keep_inputs=tuple(self.plan.clipping.measured_sites),
            precision=self._precision,
        )

    def _merge(self, part: ClippedSum, batch: PhysicalBatch) -> bool:
        """Add a portion up, once it is known that nothing was written or moved.

        Where a GPU looked, the CPU waits for it here, once.
        """
        given, written = self._open.given, self._open.flags
        differs = any_of([*written, *([] if given is None else given.flags())])
        self.attached.state.settle(differs and any_of(written))
        if differs and given is not None:
            given.confirm()
        pending = self._open.pending
        merged = part if pending is None else pending.merge(part)
        self._open = _Open(pending=merged)
        return batch.completes

    def release(self) -> None:
        """Pay, add noise, keep the release, move the parameters."""
        pending = self._open.pending
        if pending is None or pending.step != self.step:
            raise LoopError("there is no whole logical batch to release")
        self.carry_out(pending, self._forget)

    def _forget(self) -> None:
        self._open = _Open()
        self.attached.state.end_step()
