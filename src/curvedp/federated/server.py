"""The server: asks, checks what comes, takes the mean, and moves the parameters.

It sees releases alone, so all it does with them is post-processing: the mean, the map
back from the whitened frame, the recipe's transforms, the optimiser. It keeps O(d).

**A round is paid for once**, before anybody is asked. A server that was killed in a
round goes on with the same round: it asks the same question again, and clients who had
answered send the same release again (:mod:`curvedp.federated.client`). So nothing is
spent twice, and the ledger is never below the truth.

**A round is closed once.** Its mean is stored before it is used
(:mod:`curvedp.federated.folder`), and a trusted aggregator, who adds noise of its own,
first writes into the ledger that the round is closed: by the payment for the next one.
A round that was closed is repeated from what is stored, or moves nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvedp.accounting import Ledger, MemoryLedger
from curvedp.barrier import Release
from curvedp.errors import BudgetError, ConfigurationError, RoundError
from curvedp.federated.aggregation import (
    hides_participants,
    is_trusted,
    mean_of_updates,
    share_std,
)
from curvedp.federated.common import Shared, checked_parameters, open_federated_ledger
from curvedp.federated.folder import ServerFolder
from curvedp.federated.messages import Task, Update
from curvedp.federated.secure import SumGrid, Total
from curvedp.noise import RandomStreams, restore_release
from curvedp.train.checkpoint import Checkpoint
from curvedp.update import BackMap, apply_release

__all__ = ["RoundReport", "Server"]

_log = logging.getLogger(__name__)

#: In the ledger of a trusted aggregator, where no later payment says it.
_ALL_CLOSED = "all planned rounds are closed"


@dataclass(frozen=True)
class RoundReport:
    """What became of a round.

    Attributes:
        round: numbered from 0.
        accepted: clients whose updates are in the mean.
        refused: reasons by client, of updates that are not.
    """

    round: int
    accepted: tuple[int, ...]
    refused: dict[int, str]


class Server:
    """The server of a federation. Free of any network.

    Args:
        shared: model, recipe, plan and whitener.
        run_dir: folder for ledger and checkpoints; a folder with a run in it goes on
            with that run. Without it both are in memory.
        least_clients: a round with fewer usable updates is refused; it can be tried
            again.
        exact_frames: refuse an update whose whitener differs in the last bit. Turn it
            off where clients have different processors: maps then agree up to
            rounding, and privacy does not depend on it.
        sums_only: updates reach it in sums alone, by secure aggregation. What carries
            the messages must see to that (:mod:`curvedp.federated.secagg`).
        unsafe_reproducible_noise: a number that makes its draws and its noise (of a
            trusted aggregator) reproducible, for tests.

    Attributes:
        round: rounds made.
    """

    def __init__(
        self,
        shared: Shared,
        *,
        run_dir: str | Path | None = None,
        least_clients: int = 1,
        exact_frames: bool = True,
        sums_only: bool = False,
        unsafe_reproducible_noise: int | None = None,
    ) -> None:
        plan = shared.plan
        if plan.view.is_secure and not sums_only:
            raise ConfigurationError(
                "the view secure-aggregate holds if the server sees sums alone, and "
                "updates reach this one singly",
                "carry the messages by secure aggregation; or take the view "
                "each-client; or, if everybody trusts the server with every update, "
                "say so by the view trusted-aggregate",
            )
        self.grid = (
            SumGrid.of(plan, shared.coordinates) if plan.view.is_secure else None
        )
        if not 1 <= least_clients <= plan.federation.clients:
            raise ConfigurationError(
                f"a round shall have {least_clients} clients at least, and the plan "
                f"has {plan.federation.clients}",
                "lower least_clients; a round that has fewer is not made",
            )
        self.least_clients = least_clients
        self.shared = shared
        self.round = 0
        self._exact_frames = exact_frames
        self._streams = RandomStreams(
            shared.probe_seed, unsafe_reproducible_noise=unsafe_reproducible_noise
        )
        recipe = shared.recipe
        self._optimizer = recipe.make_optimiser(shared.parameters.values())
        self._chain = recipe.chain
        self._state = self._chain.init(shared.parameters)
        curvature = recipe.curvature
        self._back = BackMap("none" if curvature is None else curvature.read_out)
        folder = None if run_dir is None else Path(run_dir)
        self.ledger: Ledger | MemoryLedger = open_federated_ledger(
            folder, shared, {"role": "server"}, unsafe=self._streams.is_unsafe
        )
        self._files = ServerFolder(folder, self.ledger)
        try:
            self._resume()
        except BaseException:
            self.ledger.close()
            raise

    @property
    def run_id(self) -> str:
        """The run's name, the same after a restart."""
        return self.ledger.header.run_id

    @property
    def rounds_left(self) -> int:
        """Rounds that are still to be made."""
        return self.shared.plan.federation.rounds - self.round

    # -- a round ----------------------------------------------------------------------

    def open_round(self) -> Task:
        """Pay for the next round, unless it is paid for, and say what is asked.

        Raises:
            BudgetError: all rounds are made.
        """
        rounds = self.shared.plan.federation.rounds
        if self.round >= rounds:
            raise BudgetError(
                f"all {rounds} planned rounds are made",
                "plan a new run with more rounds (more noise in each)",
            )
        self._pay(self.round)
        made_of: dict[str, Tensor] = {}
        if self.shared.clients_whiten:
            self.shared.whiteners.at(self.round)  # made now, if it is due now
            if self.shared.whitener_due(self.round) != self.round:
                made_of = dict(self.shared.whiteners.state()["parameters"])
        return Task(
            self.run_id,
            self.round,
            self.shared.agreement,
            self.shared.copies(),
            made_of,
        )

    def participants(self) -> list[int]:
        """Clients that are asked in this round: all, or a Poisson draw of them.

        The draw is stored before anybody is asked, so that a restart does not draw
        again. Under the view trusted-aggregate it is the server's secret.
        """
        facts = self.shared.plan.federation
        everybody = list(range(facts.clients))
        if facts.client_rate == 1:
            return everybody
        stored = self._files.drawn(self.round)
        if stored is not None:
            return stored
        sampler = self._streams.sampler(facts.client_rate, lambda step: [step])
        drawn = sorted(sampler.draw(self.round, facts.clients).tolist())
        self._files.keep_drawn(self.round, drawn)
        return drawn

    def reason_against(self, update: Update) -> str | None:
        """Why an update cannot be part of this round; None if it can."""
        release, shared = update.release, self.shared
        if update.run_id != self.run_id:
            return "it is of another run"
        if update.agreement != shared.agreement:
            return "it was made with another plan, recipe, model or probe seed"
        if not 0 <= update.client < shared.plan.federation.clients:
            return f"there is no client {update.client} in the plan"
        if release.step != self.round:
            return f"it is of round {release.step}, and this is round {self.round}"
        if self._exact_frames and release.frame != self._frame():
            return "it was whitened with another map"
        due = self._sent_std(update.client)
        if not math.isclose(release.noise_std, due, rel_tol=1e-6):
            return f"its noise is {release.noise_std:.4g}, and {due:.4g} is due"
        if self.grid is not None:
            return None  # its values are in the sum
        try:
            values = checked_parameters(release.values, shared.parameters, "its values")
        except RoundError as error:
            return error.problem
        clients = shared.plan.federation.clients
        for name, value in values.items():
            # so many of them must not add up to infinity
            most = torch.finfo(value.dtype).max / (2 * clients)
            if bool((value.abs() > most).any()):  # also of a tensor without elements
                return f"its values: {name!r} is too large to be added up"
        return None

    def close_round(self, updates: Sequence[Update]) -> RoundReport:
        """Take the mean of the usable updates and move the parameters.

        Raises:
            RoundError: too few are usable. The round stays open: ask again.
        """
        if self.grid is not None:
            raise RoundError(
                "the plan is for sums, and updates came singly",
                "carry the messages by secure aggregation",
            )
        accepted: dict[int, Update] = {}
        refused: dict[int, str] = {}
        asked = self.participants()
        for update in updates:
            reason = self.reason_against(update)
            if reason is None and update.client not in asked:
                reason = "it was not drawn for this round"
            if reason is None and update.client in accepted:
                reason = "it has sent an update already"
            if reason is None:
                accepted[update.client] = update
            else:
                refused[update.client] = reason
        # a small draw is no fault: asked again, it would be the same
        least = min(self.least_clients, len(asked))
        if len(accepted) < least and self.hides_participants:
            # to refuse it would tell who was drawn; its operator may know
            _log.warning(
                "round %s is made of fewer clients than it should have", self.round
            )
        elif len(accepted) < least:
            reasons = "; ".join(f"client {c}: {why}" for c, why in refused.items())
            raise RoundError(
                f"round {self.round} has {len(accepted)} usable updates, and "
                f"{least} are needed{': ' if reasons else ''}{reasons}",
                "wait for more clients and ask again: clients that have answered send "
                "the same update, and nothing is spent twice",
            )
        self._apply(self._mean(accepted))
        return RoundReport(self.round - 1, tuple(sorted(accepted)), refused)

    def close_sum(self, total: Total) -> RoundReport:
        """Move the parameters by a sum of shares that came under masks.

        A sum that is lost, or that a wrong share is in, cannot be had again: no client
        answers a round twice. The round is paid for and moves nothing.

        Returns:
            The report; nobody is accepted in a round that is lost.
        """
        least = max(self._sums.threshold, self.least_clients)
        found = {u.client: self.reason_against(u) for u in total.senders}
        refused = {client: why for client, why in found.items() if why is not None}
        senders = set(found)
        values, reason = total.values, total.reason
        if values is not None:
            if refused or len(senders) != len(total.senders):
                reason = "a share that does not belong is in the sum"
            elif len(senders) < least:
                reason = f"{len(senders)} clients are in the sum"
            else:
                try:
                    checked_parameters(values, self.shared.parameters, "the sum")
                except RoundError as error:
                    reason = error.problem
                else:
                    if not self._sums.could_be(values, len(senders)):
                        reason = "the masks of the shares did not cancel"
        if values is None or reason:
            lost = {i: reason or "lost" for i in senders} | refused
            self._end_round()
            return RoundReport(self.round - 1, (), lost)
        mean, std = self._sums.mean(values, senders, self.shared.parameters)
        self._apply(restore_release(mean, self._frame(), self.round, noise_std=std))
        return RoundReport(self.round - 1, tuple(sorted(senders)), {})

    @property
    def _sums(self) -> SumGrid:
        if self.grid is None:
            raise RoundError(
                "this server takes updates singly",
                "sums are for a plan with the view secure-aggregate",
            )
        return self.grid

    # -- aggregation ------------------------------------------------------------------

    def _sent_std(self, client: int) -> float:
        """Noise in what a client sends."""
        if self.grid is not None:
            return self.grid.share(client).noise_std
        return share_std(self.shared.plan, client)

    def _frame(self) -> str:
        return self.shared.whitener_at(self.round, {}).frame

    @property
    def hides_participants(self) -> bool:
        """Whether who was drawn is a secret that the guarantee rests on."""
        return hides_participants(self.shared.plan)

    def _mean(self, accepted: dict[int, Update]) -> Release:
        return mean_of_updates(
            self.shared.plan,
            {client: update.release for client, update in accepted.items()},
            self._nothing,
            self._streams,
            at=(self.round, self.ledger.next_attempt(self.round)),
        )

    def _nothing(self) -> Release:
        zeros = {n: torch.zeros_like(p) for n, p in self.shared.parameters.items()}
        return restore_release(zeros, self._frame(), self.round, noise_std=0.0)

    def _apply(self, mean: Release) -> None:
        """Move the parameters by the mean of a round, which is stored before."""
        if is_trusted(self.shared.plan):
            self._say_closed()
        self._files.keep(mean)
        self._move(mean)
        self._end_round()

    def _say_closed(self) -> None:
        """Let the ledger say that this round is closed, before its mean is stored."""
        if self.rounds_left > 1:
            self._pay(self.round + 1)
        elif _ALL_CLOSED not in self.ledger.notes():
            self.ledger.note(_ALL_CLOSED)

    def _pay(self, round_number: int) -> None:
        if self.ledger.next_attempt(round_number) == 0:
            self.ledger.pay(round_number, 0, self.shared.plan.round_event())

    def _move(self, mean: Release) -> None:
        whitener = self.shared.whiteners.at(self.round)
        self._state, _ = apply_release(
            mean,
            self.shared.parameters,
            self._optimizer,
            expected_batch_size=1.0,
            rule=self.shared.rule,
            chain=self._chain,
            state=self._state,
            back=lambda gradient: self._back(gradient, whitener),
        )

    def _end_round(self) -> None:
        self._keep_map()
        self.round += 1
        self._save()
        self._files.forget_drawn()

    def _keep_map(self) -> None:
        """Make the map that is due in a round, also in one that moves nothing.

        Later rounds use it, and of a round that is over it could not be made.
        """
        self.shared.whiteners.at(self.round)

    # -- files ------------------------------------------------------------------------

    def _facts(self) -> dict[str, Any]:
        return {"agreement": self.shared.agreement, "recipe": self.shared.recipe.name}

    def _save(self) -> None:
        checkpoint = Checkpoint(
            step=self.round,
            run_id=self.run_id,
            facts=self._facts(),
            model={n: v.detach() for n, v in self.shared.model.state_dict().items()},
            state={
                "chain": self._state,
                "optimizer": self._optimizer.state_dict(),
                "whiteners": self.shared.whiteners.state(),
            },
            ledger=self.ledger.head(),
        )
        self._files.save(checkpoint)

    def _resume(self) -> None:
        """Go on where the folder's last checkpoint and the stored means end."""
        stored = self._files.newest(self._facts())
        if stored is None:
            self._save()  # the parameters of round 0, for a restart within it
            return
        self.shared.model.load_state_dict(stored.model)
        self._state = stored.state["chain"]
        self._optimizer.load_state_dict(stored.state["optimizer"])
        self.shared.whiteners.load(stored.state["whiteners"])
        self.round = stored.step
        for mean in self._files.kept(self.round):
            self._move(mean)
            self.round += 1
        if self.round < self._closed():
            self._files.give_up(self.round, self._closed())
            while self.round < self._closed():
                self._keep_map()
                self.round += 1
        if self.round > stored.step:
            self._save()
        if not self.rounds_left:
            self._files.forget_drawn()

    def _closed(self) -> int:
        """Rounds that are closed, by the ledger."""
        if _ALL_CLOSED in self.ledger.notes():
            return self.shared.plan.federation.rounds
        return max(self.ledger.paid_steps(), default=0)

    def close(self) -> None:
        """Release the ledger's lock."""
        self.ledger.close()
