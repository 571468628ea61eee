"""The second half of a private step: from a whole clipped sum to moved parameters.

In this order and no other:

1. the budget is checked (again: the loader checked before it drew);
2. the payment is written to the ledger and forced to disk;
3. noise is drawn and added: the pending sum becomes a release;
4. the release is written to the journal;
5. the optimiser moves the parameters.

A crash between 2 and 4 costs the payment: the step runs again with fresh noise and pays
again. A crash after 4 costs nothing: the journal repeats the update.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from curvedp.accounting import Ledger, MemoryLedger
from curvedp.barrier import ClippedSum, Release
from curvedp.clipping import ClippingRule
from curvedp.errors import BudgetError, CheckpointError, ConfigurationError
from curvedp.noise import RandomStreams
from curvedp.plan import Plan
from curvedp.train.journal import Journal, group_settings, restore_group_settings
from curvedp.train.noise import RunNoise
from curvedp.train.secret import RunSecret, drawing_device
from curvedp.train.whitened import WhitenerSource
from curvedp.update import BackMap, Chain, apply_release
from curvedp.values import is_whole
from curvedp.whitening import IdentityWhitener, Whitener

__all__ = ["Releasing"]

_AS_IT_IS = IdentityWhitener()


class Releasing:
    """Where a run stands, and how a clipped sum moves it on.

    Args:
        parameters: trained ones, by name.
        optimizer: the torch optimiser that moves them.
        plan: sampling, clipping, noise and accounting.
        whiteners: gives the map before clipping, at each step.
        back_map: how a release leaves the whitener's coordinates. With "forward" it was
            never in them: gradients are clipped and get noise as they are.
        chain: transforms on the released mean gradient.
        streams: all randomness.
        ledger: where steps are paid.
        journal: where releases are kept, or None.
        secret: of a run with correlated noise.

    Attributes:
        step: logical steps made.
        threshold: of an adaptive clip rule; None for others.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        *,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        whiteners: WhitenerSource,
        back_map: str,
        chain: Chain,
        streams: RandomStreams,
        ledger: Ledger | MemoryLedger,
        journal: Journal | None,
        secret: RunSecret | None,
    ) -> None:
        self.parameters = parameters
        self.optimizer = optimizer
        self.plan = plan
        self.whiteners = whiteners
        self.streams = streams
        self.ledger = ledger
        self.journal = journal
        self.step = 0
        self._back = BackMap(back_map)
        self._chain = chain
        device = drawing_device(next(iter(parameters.values())).device)
        self.noise = RunNoise(plan, streams, ledger, secret, device)
        self.chain_state = chain.init(parameters, look_ahead=True)
        self._require_one_gradient()
        self.threshold = plan.clipping.first_threshold()

    def _require_one_gradient(self) -> None:
        ahead = self._chain.look_ahead(self.chain_state)
        if ahead is not None and ahead.weight != 1.0:
            raise ConfigurationError(
                "the transform combines two gradients of every example, one of them "
                f"ahead (with weight {ahead.weight:g}), and one is taken",
                "for DiSK set gamma = 0, which stands for (1 - kappa) / kappa: there "
                "one gradient is enough",
            )

    @property
    def steps_left(self) -> int:
        """Steps that the budget still allows."""
        return self.noise.steps_left(self.step)

    def _rule(self) -> ClippingRule:
        """The clip rule as releases so far have made it."""
        return self.plan.clipping.at(self.threshold)

    def _clip_map(self, step: int) -> Whitener:
        """The map in whose coordinates gradients are clipped and get their noise."""
        return _AS_IT_IS if self._back.kind == "forward" else self.whiteners.at(step)

    def _point(self) -> dict[str, Tensor] | None:
        """Where the gradient is taken, if not at the parameters. Public."""
        ahead = self._chain.look_ahead(self.chain_state)
        if ahead is None:
            return None
        return {
            name: (p.detach() + ahead.offsets[name].to(p.device)).to(p.dtype)
            for name, p in self.parameters.items()
        }

    def carry_out(self, pending: ClippedSum, drawn: Callable[[], None]) -> None:
        """Pay, add noise, keep the release, move the parameters.

        ``drawn`` is called when noise was added: the sum is never released again, also
        if what follows fails.
        """
        if self.steps_left == 0:
            raise self.exhausted()
        attempt = self.ledger.next_attempt(self.step)
        self.ledger.pay(self.step, attempt, self.noise.event(self.step))
        release = self.noise.release(pending, attempt)
        drawn()
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

    def averaged(self) -> dict[str, Tensor] | None:
        """An average of the iterates, where a transform keeps one; copies."""
        found = self._chain.averaged(self.chain_state)
        if found is None:
            return None
        return {name: value.detach().clone() for name, value in found.items()}

    def recover(self) -> int:
        """Repeat the updates that the journal has beyond this step; how many."""
        recovered = 0
        if self.journal is not None:
            while (entry := self.journal.read(self.step)) is not None:
                release, settings = entry
                self.require_paid(self.step + 1, "the journal")
                restore_group_settings(self.optimizer, settings)
                self.noise.replayed(release)
                self.apply(release)
                recovered += 1
        self.noise.rejoin(self.step)
        return recovered

    def require_paid(self, step: Any, what: str) -> None:
        """Refuse to stand at a step to which the ledger has not paid the way.

        Raises:
            CheckpointError: steps before it are missing from the ledger.
        """
        paid = sum(1 for s in self.ledger.paid_steps() if is_whole(step) and s < step)
        if is_whole(step) and paid < step:
            raise CheckpointError(
                f"{what} stands at step {step}, and its ledger has paid for {paid} "
                "of the steps before: the others would be had for nothing",
                "put the ledger back that belongs to it, or go on from an older state",
            )

    def exhausted(self) -> BudgetError:
        """The error for a step beyond the budget."""
        return BudgetError(
            f"all {self.plan.sampling.steps} planned steps are paid for: another one "
            "would exceed the budget",
            "stop here, or plan a new run with more steps (more noise in each)",
        )
