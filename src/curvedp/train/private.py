"""Hand-written loops: ``make_private`` and the ``Private`` object it returns.

    private = make_private(model, optimizer, dataset, loss=nn.CrossEntropyLoss(),
                           epsilon=2.0, delta=1e-5, batch_size=64, epochs=10)
    for epoch in range(10):
        for x, y in private.loader:
            private.optimizer.zero_grad()
            loss = private.loss(private.model(x), y)
            loss.backward()
            private.optimizer.step()
    print(private.statement())

The loop keeps its shape. ``private.loader`` yields physical batches of one fixed size;
``private.optimizer.step()`` accumulates them and makes one private step per logical
batch. The user's model and optimiser objects stay what they are.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvedp.accounting import MemoryLedger
from curvedp.barrier import Provenance
from curvedp.errors import (
    CheckpointError,
    ConfigurationError,
    LoopError,
    NotPrivateError,
    withheld,
)
from curvedp.layers import PerExampleLoss, Synthesiser, as_call
from curvedp.plan import Plan
from curvedp.recipes import Recipe
from curvedp.storage import clear_leftovers
from curvedp.train.checkpoint import (
    Checkpoint,
    checkpoint_folders,
    load_checkpoint,
    save_checkpoint,
)
from curvedp.train.compiled import CompiledPass
from curvedp.train.datasets import moved
from curvedp.train.engine import Engine
from curvedp.train.explained import StepPlan
from curvedp.train.graph import GraphedPass
from curvedp.train.ledgers import (
    note_lost_releases,
    refuse_lost_payments,
    refuse_other_facts,
)
from curvedp.train.optimizer import LogicalScheduler, PrivateOptimizer
from curvedp.train.rehearsal import Rehearsed, rehearse_folder
from curvedp.train.statement import Statement, make_statement
from curvedp.train.wrapped import PrivateLoader, PrivateModel
from curvedp.values import is_whole

__all__ = ["Private"]

_FOLLOWED = "the learning rate follows a metric that is declared public"


class Private:
    """A model under a privacy plan: loader, optimiser, ledger and statement.

    Made by :func:`curvedp.make_private`.

    Attributes:
        model: call this in the loop.
        optimizer: step with this.
        loader: iterate over this.
        plan: everything the guarantee depends on.
    """

    def __init__(
        self,
        engine: Engine,
        recipe: Recipe,
        *,
        loss: PerExampleLoss | None,
        loss_reduction: str | None = None,
        run_dir: Path | None = None,
        passed: GraphedPass | CompiledPass | None = None,
        synthetic: Synthesiser | None = None,
        tried: Rehearsed | None = None,
    ) -> None:
        if loss is not None and loss_reduction is not None:
            raise ConfigurationError(
                "loss_reduction is about a loss of the loop's own, and loss= was given",
                "leave one of the two out",
            )
        if loss_reduction not in (None, "mean", "sum"):
            raise ConfigurationError(
                f"loss_reduction must be 'mean' or 'sum', not {loss_reduction!r}",
                "say how the loss in your loop adds up the examples of a batch",
            )
        self._engine = engine
        self._recipe = recipe
        self._loss = loss
        self._loss_used = False
        self._reduction = loss_reduction or "mean"
        self._run_dir = run_dir
        self._passed = passed
        self._synthetic = synthetic
        self._tried = tried or Rehearsed("nothing")
        self.plan: Plan = engine.plan
        self.model = PrivateModel(engine)
        engine.set_scale(self._scale)
        self.optimizer = PrivateOptimizer(engine)
        self.loader = PrivateLoader(engine)

    # -- in the loop ------------------------------------------------------------------

    def loss(self, output: Any, targets: Any) -> Tensor:
        """Mean of the per-example losses that were checked. Its value is private.

        Where it is trained on, the output must be the model's and the targets rows of
        the loader.
        """
        if self._loss is None:
            raise ConfigurationError(
                "make_private was not given a loss",
                "pass loss=..., or use your own loss in the loop",
            )
        if self.model.training and torch.is_grad_enabled():
            self._engine.require_rows("private.loss", {"targets": targets})
            self._engine.require_made(output)
            self._loss_used = True
        with withheld("private.loss"):
            return self._loss(output, targets).mean()

    def train_on(self, batch: Any) -> Tensor:
        """All that a loop does with a batch of the loader, in one call.

        Forward pass, ``loss``, backward pass and ``optimizer.step()``: compiled or as
        one CUDA graph if :func:`curvedp.make_private` was given ``compile=True`` or
        ``cuda_graph=True``. Needs ``loss``.

        Args:
            batch: a pair (inputs, targets), on any device.

        Returns:
            The mean loss, which is private.
        """
        if not self.model.training:
            raise LoopError(
                "private.model is in eval mode", "call private.model.train() before"
            )
        if any(p.grad is not None for p in self._engine.parameters.values()):
            self.optimizer.zero_grad()
        passed = self._passed
        if passed is not None:
            if isinstance(passed, GraphedPass):
                accumulate = partial(self._engine.accumulate_graphed, passed, batch)
            else:
                accumulate = partial(self._engine.accumulate_compiled, passed, batch)
            self.optimizer.advance(accumulate)
            assert passed.loss is not None
            return passed.loss
        device = next(self.model.parameters()).device
        inputs, targets = moved(tuple(batch), device)
        args, kwargs = as_call(inputs)
        loss = self.loss(self.model(*args, **kwargs), targets)
        self._engine.forget_output()
        with withheld("the backward pass"):
            torch.autograd.backward(loss)
        self.optimizer.step()
        return loss.detach()

    def _scale(self) -> float:
        """What makes the gradients those of the per-example losses."""
        if self._loss is not None and not self._loss_used:
            raise LoopError(
                "the backward pass did not come from private.loss, whose examples were "
                "checked to be independent",
                "use loss = private.loss(output, targets), or leave loss= out of "
                "make_private to take responsibility for your own",
            )
        self._loss_used = False
        mean = self._reduction == "mean"
        return float(self._engine.physical_batch_size) if mean else 1.0

    @property
    def batch_is_whole(self) -> bool:
        """Whether the batch in hand completes its logical batch.

        For loops that accumulate: ``if private.batch_is_whole: optimizer.step()``. How
        many portions a logical batch has is private; do not log it.
        """
        return self._engine.batch_is_whole

    def schedule(
        self, scheduler: Any, *, public_metric: bool = False
    ) -> LogicalScheduler:
        """Make a torch scheduler count logical steps instead of physical batches.

        Args:
            scheduler: any of torch's.
            public_metric: declares that the metric which ``ReduceLROnPlateau`` is given
                is not of private data; the ledger notes it.
        """
        made = LogicalScheduler(scheduler, self.optimizer, public_metric)
        if public_metric and _FOLLOWED not in self._engine.ledger.notes():
            self.note(_FOLLOWED)
        return made

    # -- the account ------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Logical steps made so far."""
        return self._engine.step

    def epsilon(self) -> float:
        """Epsilon of what was paid so far; the planned one is ``plan.epsilon()``.

        Raises:
            NotPrivateError: curvature was taken from private data; nothing holds then.
        """
        if self._oracle:
            raise NotPrivateError(
                "this run takes curvature from the private data, so no epsilon holds",
                'use probe="synthetic" or public data for a run with a guarantee',
            )
        ledger = self._engine.ledger
        return ledger.epsilon() if ledger.count() else 0.0

    def steps_left(self) -> int:
        """Steps that the budget still allows."""
        return self._engine.steps_left

    def statement(self) -> Statement:
        """What is promised, about what, and what is not."""
        coupling = self._engine.coupling
        return make_statement(
            self.plan,
            self._engine.ledger,
            unsafe=self._engine.streams.is_unsafe,
            trusted_loss=self._loss is None,
            oracle=self._oracle,
            public_probe=self._engine.whiteners.provenance is Provenance.PUBLIC,
            views=self._engine.views,
            pretrained=self._recipe.pretrains,
            tried=self._tried.how,
            unchecked=() if coupling is None else coupling.limits(),
        )

    @property
    def _oracle(self) -> bool:
        """Now, or in an earlier sitting of the same run: nothing takes it back."""
        now = not self._engine.whiteners.provenance.is_public
        return now or self._engine.ledger.is_oracle

    def explain(self) -> StepPlan:
        """What the next step does with each layer and what it takes; print it.

        Layer, shape, how norms are computed, where it whitens and in which form, and
        estimated work. All of it follows from shapes, settings and the public map.
        """
        self._refuse_half_step()
        assert self._synthetic is not None  # make_private gives one
        return self._engine.explain(self._synthetic)

    def averaged_parameters(self) -> dict[str, Tensor] | None:
        """The average of the iterates, if the recipe keeps one; post-processing.

        ``torch.func.functional_call(model, private.averaged_parameters(), x)`` uses it.
        """
        return self._engine.averaged()

    def note(self, text: str) -> None:
        """Put a remark into the ledger and thereby into every statement."""
        self._engine.ledger.note(text)

    # -- state ------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on, without secrets. Only between logical steps."""
        self._refuse_half_step()
        ledger = self._engine.ledger
        state = self._state()
        state["model"] = self._engine.model.state_dict()
        state["facts"] = self._facts()
        if isinstance(ledger, MemoryLedger):
            state["ledger"] = ledger.to_text()
        state["run"] = {"id": ledger.header.run_id, "payments": ledger.count()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a stored state. What was paid since then stays paid."""
        refuse_other_facts(state["facts"], self._facts(), "the state")
        ledger = self._engine.ledger
        if isinstance(ledger, MemoryLedger) and "ledger" in state:
            ledger.absorb(state["ledger"])
        else:
            refuse_lost_payments(ledger, state.get("run", {}))
        self._load(state, state["model"])
        if self._engine.journal is not None:
            # they were made from other parameters; a crash must not bring them back
            self._engine.journal.drop_from(self.step)
        self._engine.noise.rejoin(self.step)

    def save(self, extra: dict[str, Any] | None = None) -> None:
        """Write a checkpoint into the run folder, with states of your own (extra).

        Raises:
            LedgerError: the run is closed, and the folder may be another process's.
            LoopError: a logical batch is half done.
            StorageError: it could not be written; the older checkpoints are untouched.
        """
        folder = self._folder()
        self._engine.ledger.require_open()
        self._refuse_half_step()
        clear_leftovers(folder, "ledger.jsonl.*")
        oldest = save_checkpoint(folder / "checkpoints", self._checkpoint(extra or {}))
        if self._engine.journal is not None:
            self._engine.journal.drop_before(oldest)

    def _checkpoint(self, extra: dict[str, Any]) -> Checkpoint:
        whole = self._engine.model.state_dict()
        return Checkpoint(
            step=self.step,
            run_id=self._engine.ledger.header.run_id,
            facts=self._facts(),
            model={n: v for n, v in whole.items() if isinstance(v, Tensor)},
            state={**self._state(), "extra": extra, **self._spoken()},
            ledger=self._engine.ledger.head(),
        )

    def rehearsed(self) -> Private:
        """After what is to be written into the run's folder was tried."""
        if self._run_dir is not None:
            now = self._checkpoint({})
            rehearse_folder(self._run_dir, self._engine, now, self._tried)
        return self

    def resume(self) -> dict[str, Any]:
        """Go on from the last checkpoint and the journal; returns what ``save`` added.

        Steps whose release is in the journal are repeated from there: no data is
        touched and nothing is paid again. That they fit the ledger was checked when
        it was opened.

        Raises:
            CheckpointError: the newest checkpoint, or a release that others follow, is
                damaged; names the file and what it costs to do without it.
        """
        ledger, journal = self._engine.ledger, self._engine.journal
        ledger.require_open()
        folders = checkpoint_folders(self._folder() / "checkpoints")
        extra: dict[str, Any] = {}
        if folders:
            checkpoint = load_checkpoint(folders[-1])
            refuse_other_facts(checkpoint.facts, self._facts(), str(folders[-1]))
            self._load(
                checkpoint.state, checkpoint.model, f"{folders[-1]}", checkpoint.step
            )
            extra = checkpoint.state["extra"]
        self._engine.recover()
        if journal is not None:
            note_lost_releases(ledger, journal, self.step)
        return extra

    def close(self) -> None:
        """Release the ledger's file and lock; what a pass had begun is given up."""
        self._engine.ledger.close()
        self._engine.attached.state.give_up()

    def __enter__(self) -> Private:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "optimizer": self._engine.optimizer.state_dict(),
            "chain": self._engine.chain_state,
            "threshold": self._engine.threshold,
            "whiteners": self._engine.whiteners.state(),
            "noise": self._engine.noise.stored(),
        }

    def _spoken(self) -> dict[str, Any]:
        """What modules say of themselves (``get_extra_state``) that is no tensor."""
        whole = self._engine.model.state_dict()
        said = {name: v for name, v in whole.items() if not isinstance(v, Tensor)}
        return {"spoken": said} if said else {}

    def _load(
        self,
        state: dict[str, Any],
        model: dict[str, Any],
        what: str = "the stored state",
        step: int | None = None,
    ) -> None:
        self._engine.attached.state.give_up()  # a pass that was given up
        try:
            self._engine.require_paid(state["step"], what)
            spoken = state.get("spoken", {})
            self._engine.model.load_state_dict({**model, **spoken})
            self._engine.optimizer.load_state_dict(state["optimizer"])
            if not is_whole(state["step"]) or step not in (None, state["step"]):
                raise ValueError("its step is not that of its state")
            self._engine.chain_state = state["chain"]
            self._engine.threshold = state["threshold"]
            self._engine.step = state["step"]
            self._engine.whiteners.load(state.get("whiteners", {}))
            self._engine.noise.load(state.get("noise", {}))
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{what} does not fit this model or optimiser: {error}",
                "build both as they were when it was stored",
            ) from error

    def _facts(self) -> dict[str, Any]:
        views = self._engine.views
        return {
            **self.plan.facts(),
            "recipe": self._recipe.name,
            **self._recipe.facts_of_parts(),
            "transforms": self._recipe.chain.facts(),
            "views": None if views is None else f"{views.count} {views.name}",
            "optimiser": type(self._engine.optimizer).__name__,
        }

    def _folder(self) -> Path:
        if self._run_dir is None:
            raise ConfigurationError(
                "there is no run folder to write to", "give make_private a run_dir"
            )
        return self._run_dir

    def _refuse_half_step(self) -> None:
        if not self._engine.between_steps:
            raise LoopError(
                "a logical batch is half done, and its pending sum is private",
                "store states after optimizer.step() has completed a logical step "
                "(private.step has moved)",
            )
