"""The private step, in one place: every tier of the API goes through here.

A logical step is a sequence of physical batches. For each of them: forward, backward,
clip, add to the pending sum. After the last one, in this order and no other:

1. the budget is checked (again: the loader checked before it drew);
2. the payment is written to the ledger and forced to disk;
3. noise is drawn and added: the pending sum becomes a release;
4. the release is written to the journal;
5. the optimiser moves the parameters.

A crash between 2 and 4 costs the payment: the step runs again with fresh noise and pays
again. A crash after 4 costs nothing: the journal repeats the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from curvedp.accounting import Ledger, MemoryLedger
from curvedp.barrier import ClippedSum, Release
from curvedp.clipping import ClippingRule, clipped_sum
from curvedp.errors import BudgetError, ConfigurationError, LoopError
from curvedp.layers import Coverage, LayerIO, PerExampleLoss, Recording, Synthesiser
from curvedp.layers.precision import NormPrecision
from curvedp.noise import RandomStreams
from curvedp.plan import Plan
from curvedp.sampling import PhysicalBatch, PhysicalLoader, Views
from curvedp.train.compiled import CompiledPass
from curvedp.train.datasets import moved
from curvedp.train.explained import StepPlan, explain
from curvedp.train.graph import HOPED_BYTES, Capture, GraphedPass, GraphedReadOut
from curvedp.train.guard import Attached, refuse_processes
from curvedp.train.journal import Journal, group_settings, restore_group_settings
from curvedp.train.noise import RunNoise
from curvedp.train.passes import ForwardPrecision, RecordedPass
from curvedp.train.secret import RunSecret
from curvedp.train.whitened import WhitenerSource
from curvedp.update import BackMap, Chain, apply_release
from curvedp.whitening import IdentityWhitener, Whitener

__all__ = ["Engine"]

_AS_IT_IS = IdentityWhitener()
_NO_BATCH = (
    "optimizer.step() without a batch from private.loader",
    "iterate over private.loader; a private step takes no other data",
)


@dataclass
class _Open:
    """What exists between a batch leaving the loader and its release. Private."""

    batch: PhysicalBatch | None = None
    recording: Recording | None = None
    pending: ClippedSum | None = None


class Engine:
    """Runs private steps on a model.

    Args:
        model: the user's model.
        optimizer: the torch optimiser that moves it.
        plan: sampling, clipping, noise and accounting.
        coverage: verified sites of the model.
        whiteners: gives the map before clipping, at each step.
        back_map: how a release leaves the whitener's coordinates. With "forward" it was
            never in them: gradients are clipped and get noise as they are.
        chain: transforms on the released mean gradient.
        streams: all randomness.
        ledger: where steps are paid.
        loader: draws and cuts the batches.
        journal: where releases are kept, or None.
        precision: of the model's forward pass.
        norms: precision of the norms.
        secret: of a run with correlated noise.

    Attributes:
        step: logical steps made.
        threshold: of an adaptive clip rule; None for others.
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
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.plan = plan
        self.ledger = ledger
        self.streams = streams
        self.journal = journal
        self.physical_batch_size = loader.physical_batch_size
        self.step = 0
        self._coverage = coverage
        self.whiteners = whiteners
        self._back = BackMap(back_map)
        self._precision = precision or ForwardPrecision(None, model)
        self._norms = norms
        self._compiled: CompiledPass | None = None
        self._chain = chain
        self._loader = loader
        device = next(model.parameters()).device.type
        self.noise = RunNoise(plan, streams, ledger, secret, device)
        named = dict(model.named_parameters())
        self.parameters = {name: named[name] for name in coverage.parameters}
        self._attached = Attached(model, optimizer, self.parameters)
        self.chain_state = chain.init(self.parameters, look_ahead=True)
        self._require_one_gradient()
        self.threshold = plan.clipping.first_threshold()
        self._open = _Open()
        self._scale: Callable[[], float] = lambda: 1.0

    def set_scale(self, scale: Callable[[], float]) -> None:
        """What the loss's gradients are to be multiplied with, asked at each batch.

        So that they are those of the per-example losses.
        """
        self._scale = scale

    @property
    def steps_left(self) -> int:
        """Steps that the budget still allows."""
        return self.noise.steps_left(self.step)

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
        refuse_processes()  # they may have been started since it was attached
        self._open = _Open()  # a batch that an earlier loop left behind is not released
        stop = self.step + min(steps, self.steps_left)
        for batch in self._loader.steps(self.step, stop):
            self._take_in()
            self._open.batch = batch
            self._open.recording = None
            yield batch

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
        self._attached.refuse_changes()
        recording = Recording(
            self.model,
            self._coverage.covered,
            self.physical_batch_size,
            keep_inputs=self.plan.clipping.measured_sites,
        )
        self._open.recording = recording
        with self._precision.during_forward():
            output = recording.forward(args, kwargs, self._point())
        return self._precision.outputs(output)

    def _require_one_gradient(self) -> None:
        ahead = self._chain.look_ahead(self.chain_state)
        if ahead is not None and ahead.weight != 1.0:
            raise ConfigurationError(
                "the transform combines two gradients of every example, one of them "
                f"ahead (with weight {ahead.weight:g}), and one is taken",
                "for DiSK set gamma = 0, which stands for (1 - kappa) / kappa: there "
                "one gradient is enough",
            )

    def _point(self) -> dict[str, Tensor] | None:
        """Where the gradient is taken, if not at the parameters. Public."""
        ahead = self._chain.look_ahead(self.chain_state)
        if ahead is None:
            return None
        return {
            name: (p.detach() + ahead.offsets[name].to(p.device)).to(p.dtype)
            for name, p in self.parameters.items()
        }

    def averaged(self) -> dict[str, Tensor] | None:
        """An average of the iterates, where a transform keeps one; copies."""
        found = self._chain.averaged(self.chain_state)
        if found is None:
            return None
        return {name: value.detach().clone() for name, value in found.items()}

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
        self._attached.refuse_foreign_gradients()
        return batch, recording

    def accumulate(self) -> bool:
        """Clip what the backward pass brought; True when the logical batch is whole."""
        batch, recording = self.require_backward()
        return self._take(recording.layer_ios(), batch, self._scale())

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
        opened = self._unpassed()
        device = next(iter(self.parameters.values())).device
        ios, _ = compiled(
            *moved(batch, device),
            point=self._point(),
            keep_inputs=self.plan.clipping.measured_sites,
        )
        return self._take(ios, opened, float(self.physical_batch_size))

    def accumulate_graphed(self, graphed: GraphedPass, batch: tuple[Any, Any]) -> bool:
        """Pass over a batch and clip it, in one launch; as ``accumulate`` otherwise."""
        opened = self._unpassed()
        part = graphed(
            *batch,
            opened.present,
            rule=self._rule(),
            whitener=self._clip_map(opened.step),
            step=opened.step,
            point=self._point(),
        )
        return self._merge(part, opened)

    def _unpassed(self) -> PhysicalBatch:
        """The open batch, for a pass that is made here and not by the loop."""
        opened = self._open.batch
        if opened is None:
            raise LoopError(*_NO_BATCH)
        self._attached.refuse_changes()
        self._attached.refuse_foreign_gradients()
        return opened

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
        )

    def _merge(self, part: ClippedSum, batch: PhysicalBatch) -> bool:
        pending = self._open.pending
        merged = part if pending is None else pending.merge(part)
        self._open = _Open(pending=merged)
        return batch.completes

    def release(self) -> None:
        """Pay, add noise, keep the release, move the parameters."""
        pending = self._open.pending
        if pending is None or pending.step != self.step:
            raise LoopError("there is no whole logical batch to release")
        if self.steps_left == 0:
            raise self.exhausted()
        attempt = self.ledger.next_attempt(self.step)
        self.ledger.pay(self.step, attempt, self.noise.event(self.step))
        release = self.noise.release(pending, attempt)
        self._open = _Open()
        if self.journal is not None:
            self.journal.write(release, group_settings(self.optimizer))
        self.apply(release)
        self.noise.finish(self.step)

    def apply(self, release: Release) -> None:
        """Move the parameters by a release, fresh or read from the journal."""
        rule, divisor = self._rule(), self.plan.sampling.expected_batch_size
        self.chain_state, self.threshold = apply_release(
            release,
            self.parameters,
            self.optimizer,
            expected_batch_size=divisor,
            rule=rule,
            chain=self._chain,
            state=self.chain_state,
            back=partial(self._back, whitener=self.whiteners.at(release.step)),
        )
        self.whiteners.observe(release, rule, divisor)
        self.step = release.step + 1

    def _clip_map(self, step: int) -> Whitener:
        """The map in whose coordinates gradients are clipped and get their noise."""
        return _AS_IT_IS if self._back.kind == "forward" else self.whiteners.at(step)

    def _rule(self) -> ClippingRule:
        """The clip rule as releases so far have made it."""
        return self.plan.clipping.at(self.threshold)

    def recover(self) -> int:
        """Repeat the updates that the journal has beyond this step; how many."""
        recovered = 0
        if self.journal is not None:
            while (entry := self.journal.read(self.step)) is not None:
                release, settings = entry
                restore_group_settings(self.optimizer, settings)
                self.noise.replayed(release)
                self.apply(release)
                recovered += 1
        self.noise.rejoin(self.step)
        return recovered

    def exhausted(self) -> BudgetError:
        """The error for a step beyond the budget."""
        return BudgetError(
            f"all {self.plan.sampling.steps} planned steps are paid for: another one "
            "would exceed the budget",
            "stop here, or plan a new run with more steps (more noise in each)",
        )
