"""The optimiser of a hand-written loop: ``step()`` is where privacy happens.

It is a ``torch.optim.Optimizer`` for everything that looks at one, as schedulers do:
its ``param_groups`` and ``state`` *are* those of the user's optimiser.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import monotonic
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from curvedp.errors import ConfigurationError, LoopError, withheld
from curvedp.train.engine import Engine

__all__ = ["LogicalScheduler", "PrivateOptimizer"]


class PrivateOptimizer(torch.optim.Optimizer):
    """Wraps the user's optimiser; ``step()`` counts logical steps.

    Called after each physical batch. Until the logical batch is whole it only
    accumulates; then it releases and lets the user's optimiser step.
    """

    def __init__(self, engine: Engine) -> None:
        # Deliberately without Optimizer.__init__: it would make parameter groups of its
        # own, and they would part from those that the inner optimiser uses.
        self._engine = engine
        self._learning_rates = self._current_rates()
        self._metrics = WeakSet[ReduceLROnPlateau]()  # whose metric is declared public
        self._look, self._next_look = False, 0.0

    @property
    def _inner(self) -> torch.optim.Optimizer:
        return self._engine.optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self._inner.defaults

    @property
    def steps_done(self) -> int:
        """Logical steps so far."""
        return self._engine.step

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Clip the batch; when its logical batch is whole, release and update."""
        if closure is not None:
            raise LoopError(
                "optimizer.step(closure) would look at the batch several times",
                "call loss.backward() and then optimizer.step()",
            )
        self._engine.require_backward()
        self.advance(self._engine.accumulate)

    def advance(self, accumulate: Callable[[], bool]) -> None:
        """Take in a portion; if that makes the logical batch whole, release it."""
        rates = self._current_rates()
        if self._engine.inside_logical_batch and self._learning_rates != rates:
            raise LoopError(
                "a learning rate changed in the middle of a logical batch: a scheduler "
                "counts physical batches",
                "wrap it: scheduler = private.schedule(scheduler); its step() then "
                "counts logical steps",
            )
        if not self._engine.inside_logical_batch:
            self._refuse_private_metrics(rates != self._learning_rates)
        with withheld("private.optimizer.step()"):  # runs modules of the model again
            is_whole = accumulate()
        if is_whole:
            self._engine.release()
        self._learning_rates = rates

    def declare_public(self, scheduler: ReduceLROnPlateau) -> None:
        """Let a scheduler change rates by its metric: the user says it is public."""
        self._metrics.add(scheduler)

    def _refuse_private_metrics(self, changed: bool) -> None:
        """Refuse rates that follow a metric nobody has declared public.

        Whoever changed a rate leaves no trace in it, and a scheduler may hold either
        optimiser. So those in memory are looked through, if a rate has changed, and for
        at most a hundredth of the time.
        """
        self._look |= changed
        began = monotonic()
        if not self._look or began < self._next_look:
            return
        for scheduler in gc.get_objects():
            if (
                issubclass(type(scheduler), ReduceLROnPlateau)
                and getattr(scheduler, "optimizer", None) in (self, self._inner)
                and scheduler.last_epoch > 0
                and scheduler not in self._metrics
            ):
                raise LoopError(
                    "ReduceLROnPlateau has changed a learning rate by a metric: that "
                    "of training data is private, and nobody paid for it",
                    "for a metric of public data, say so: scheduler = private.schedule("
                    "scheduler, public_metric=True); or take one that counts steps",
                )
        self._look = False
        self._next_look = monotonic() + 100 * (monotonic() - began)

    def mark_called(self) -> None:
        """Tell schedulers that steps were made, if some were before a restart."""
        self._opt_called = self.steps_done > 0

    def _current_rates(self) -> list[Any]:
        return [group.get("lr") for group in self._engine.optimizer.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``.grad``; pending private sums are elsewhere and stay."""
        self._inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ConfigurationError(
            "parameters cannot be added to a private optimiser: they were not covered "
            "when it was attached",
            "build the optimiser with all its groups, then call make_private",
        )

    def __repr__(self) -> str:
        return f"PrivateOptimizer({self._inner!r})"


class LogicalScheduler:
    """A torch scheduler whose ``step()`` acts once for each logical step.

    One that follows a metric acts once for each call, if its metric is public.
    """

    def __init__(
        self, scheduler: Any, optimizer: PrivateOptimizer, public_metric: bool = False
    ) -> None:
        self._follows = isinstance(scheduler, ReduceLROnPlateau)
        if self._follows and not public_metric:
            raise ConfigurationError(
                "ReduceLROnPlateau follows a metric, and one of training data is "
                "private: nobody has paid for it",
                "for a metric of public data, say private.schedule(scheduler, "
                "public_metric=True); or take a scheduler that counts steps",
            )
        if self._follows:
            optimizer.declare_public(scheduler)
        self._scheduler = scheduler
        self._optimizer = optimizer
        self._seen = optimizer.steps_done

    def step(self, metric: float | None = None) -> None:
        """Move the schedule by the logical steps that were made since the last call.

        Args:
            metric: of a scheduler that follows one, and of no other.
        """
        if (metric is not None) != self._follows:
            raise LoopError(
                "the scheduler follows a metric, and step() was given none"
                if self._follows
                else "the scheduler counts steps and takes no metric",
                "call step(metric) for one that follows a public metric, and step() "
                "for others",
            )
        if self._follows:
            self._scheduler.step(metric)
        else:
            self._catch_up()

    def _catch_up(self) -> None:
        behind = self._optimizer.steps_done - self._seen
        if behind > 1:  # a journal brought steps back, with learning rates of its own
            self._restore_rates()
        for _ in range(behind):
            self._scheduler.step()
        self._seen = self._optimizer.steps_done

    def _restore_rates(self) -> None:
        """The rates at which the scheduler left off; it may go on from the last one."""
        groups, rates = self._optimizer.param_groups, self._scheduler.get_last_lr()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def get_last_lr(self) -> list[Any]:
        """As the wrapped scheduler's."""
        return list(self._scheduler.get_last_lr())

    def state_dict(self) -> dict[str, Any]:
        """The wrapped scheduler's state and the step it was at."""
        return {"scheduler": self._scheduler.state_dict(), "seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore both, and catch up with steps that a journal has brought back."""
        self._scheduler.load_state_dict(state["scheduler"])
        self._seen = state["seen"]
        self._optimizer.mark_called()
        self._restore_rates()
        if not self._follows:
            self._catch_up()
