"""A client: clips, adds its share of the noise, and sends nothing else.

One round is one gradient of all its records (or of a secret Poisson draw of them), in
physical batches, at the server's parameters. In this order and no other: the task is
checked; the budget is checked; the sum is made; the payment is on disk; noise is added;
the release is on disk; the update leaves.

**A round is released once.** Asked again for the same round with the same parameters
(the server restarted), the client sends what it sent before: no data is touched, no
noise drawn, nothing paid. Asked for it with others, it refuses. If it crashed after it
paid and before the release was stored, it sits the round out.

**A client without records answers like the others**, with noise: that it has none is
private. So is a draw of none.

**Under masks it is sent once.** Where updates are hidden in a sum, the same update in
two sums would show in their difference. It is not stored, and whoever asks for the
round again is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_map

from curvedp.accounting import repeated
from curvedp.barrier import ClippedSum, Release
from curvedp.clipping import clipped_sum
from curvedp.errors import BudgetError, ConfigurationError, RoundError, withheld
from curvedp.federated.common import Shared, checked_parameters, open_federated_ledger
from curvedp.federated.messages import Task, Update
from curvedp.federated.secure import SumGrid
from curvedp.federated.views import Unit
from curvedp.layers import Batch, synthesiser_like
from curvedp.layers.state import State
from curvedp.noise import (
    GaussianMechanism,
    LatticeShare,
    NoiseState,
    RandomStreams,
    Stream,
    scaled_release,
)
from curvedp.sampling import People, Sampler
from curvedp.train.datasets import TrainingData, moved
from curvedp.train.guard import refuse_processes
from curvedp.train.journal import Journal
from curvedp.train.passes import RecordedPass
from curvedp.train.rehearsal import rehearse_journal
from curvedp.values import is_whole

__all__ = ["Client"]


class Client:
    """One client of a federation. Free of any network.

    Args:
        number: which of the plan's clients it is.
        shared: model, recipe, plan and whitener.
        dataset: its private records, pairs of inputs and targets.
        run_dir: folder for its ledger and its last release. Without it both are in
            memory, and a client that restarts has forgotten what it spent.
        physical_batch_size: rows of a pass; bounds memory and changes nothing else.
        records_per_round: with the client as the unit: how many of its records it uses
            in a round, declared. Their gradients are added and clipped as one.
        unsafe_reproducible_noise: a number that makes its noise and draws reproducible,
            for tests. There is no guarantee then.

    Guarantees:
        What leaves is ``(sum + N(0, (C s)^2 / n I)) / declared size``, at most once a
        round, at most ``rounds`` times, and paid for before the noise is drawn.
    """

    def __init__(
        self,
        number: int,
        shared: Shared,
        dataset: Any,
        *,
        run_dir: str | Path | None = None,
        physical_batch_size: int | None = None,
        records_per_round: int | None = None,
        unsafe_reproducible_noise: int | None = None,
    ) -> None:
        if run_dir is None:  # a folder has a lock, and a ledger that stays
            refuse_processes(otherwise="give each client a run_dir of its own")
        plan = shared.plan
        if not 0 <= number < plan.federation.clients:
            raise ConfigurationError(
                f"client {number} is not among the plan's {plan.federation.clients}",
                "clients are numbered from 0",
            )
        self.number = number
        self.shared = shared
        self.grid = (
            SumGrid.of(plan, shared.coordinates) if plan.view.is_secure else None
        )
        self._mechanism: GaussianMechanism | LatticeShare = (
            GaussianMechanism(plan.share_multiplier, plan.bound)
            if self.grid is None
            else self.grid.share(number)
        )
        self._event = plan.round_event()
        unsafe = unsafe_reproducible_noise
        self._streams = RandomStreams(
            shared.probe_seed,
            # never the same noise in two clients
            unsafe_reproducible_noise=None
            if unsafe is None
            else unsafe * plan.federation.clients + number,
        )
        sampler: Sampler = self._streams.sampler(
            plan.federation.record_rate, lambda step: [step, self.number]
        )
        with withheld("len(dataset)"):
            is_empty = hasattr(dataset, "__len__") and len(dataset) == 0
        if is_empty:
            dataset, sampler = _stand_in(shared.template), _Nobody()
        people = _whole_client(plan.federation.unit, dataset, records_per_round)
        source = TrainingData.of(dataset, people=people)
        self._slots = source.slots(None)
        expected = float(self._slots if people else plan.divisors[number])
        self._loader = source.loader(
            sampler,
            expected,
            physical_batch_size,
            shared.coverage.activation_bytes,
            next(iter(shared.parameters.values())).device.type,
        )
        self._state = State(
            shared.model,
            shared.coverage.written_anew,
            synthesiser_like(shared.template, shared.model),
        )
        self._pass = RecordedPass(
            shared.model,
            shared.coverage,
            shared.loss,
            rows=self._loader.physical_batch_size,
            state=self._state,
        )
        shared.require_uncoupled(self._loader.physical_batch_size)
        folder = None if run_dir is None else Path(run_dir)
        self.ledger = open_federated_ledger(
            folder, shared, {"client": number}, unsafe=self._streams.is_unsafe
        )
        self._journal = (
            None
            if folder is None or self.grid is not None
            else Journal(folder / "journal", self.ledger)
        )
        if folder is not None and self._journal is not None:
            marks = [{"task": ""}]
            rehearse_journal(folder / "journal", self.ledger, shared.parameters, marks)
        self._last: tuple[str, Release] | None = None

    def answer(self, task: Task) -> Update:
        """The update of a round.

        Raises:
            RoundError: the task is of another plan or run, its parameters are unusable,
                or the round was released before at other parameters.
            BudgetError: all planned rounds are paid for.
        """
        if self.grid is not None:
            raise RoundError(
                "the plan is for sums, and this update would leave singly",
                "carry the messages by secure aggregation",
            )
        self._check(task)
        release = self._known(task) or self._made(task)
        divisor = self.shared.plan.divisors[self.number]
        return Update(
            self.number, task.run_id, task.agreement, scaled_release(release, divisor)
        )

    def masked_answer(self, task: Task) -> Update:
        """The share of a round, on the plan's grid, to be masked before it leaves.

        Once: the same share in two sums would show in their difference.

        Raises:
            RoundError: as :meth:`answer`; or the round was answered before.
            BudgetError: all planned rounds are paid for.
        """
        if self.grid is None:
            raise RoundError("the plan is not for sums under masks")
        self._check(task)
        if self.ledger.next_attempt(task.round):
            raise RoundError(
                f"client {self.number} has answered round {task.round} already",
                "the round is lost if its sum is; go on with the next one",
            )
        return Update(self.number, task.run_id, task.agreement, self._made(task))

    def close(self) -> None:
        """Release the ledger's lock."""
        self.ledger.close()

    def _check(self, task: Task) -> None:
        shared = self.shared
        if task.agreement != shared.agreement:
            raise RoundError(
                "the server has another plan, recipe, model or probe seed than this "
                "client",
                "start both with the same settings and the same frozen weights",
            )
        if not is_whole(task.round) or task.round >= shared.plan.federation.rounds:
            raise RoundError(f"round {task.round} is not in the plan")
        checked_parameters(task.parameters, shared.parameters, "the server's task")
        if task.whitened_at:
            checked_parameters(task.whitened_at, shared.parameters, "the server's task")

    def _known(self, task: Task) -> Release | None:
        """The release of this very task, if it was made before."""
        if self.ledger.next_attempt(task.round) == 0:
            return None
        if self._last is None and self._journal is not None:
            entry = self._journal.read(task.round)
            if entry is not None:
                release, (mark,) = entry
                self._last = (mark["task"], release)
        if self._last is None or self._last[1].step != task.round:
            raise RoundError(
                f"client {self.number} has paid for round {task.round}, and its "
                "release is gone",
                "it sits this round out; a second release would cost a second time",
            )
        if self._last[0] != task.digest():
            raise RoundError(
                f"client {self.number} has released round {task.round} at other "
                "parameters",
                "resume the server from its last checkpoint; a second release of a "
                "round is not paid for",
            )
        return self._last[1]

    def _made(self, task: Task) -> Release:
        rounds = self.shared.plan.federation.rounds
        if self.ledger.count() >= rounds:
            raise BudgetError(
                f"client {self.number} has paid for all {rounds} planned rounds",
                "plan a new run with more rounds (more noise in each)",
            )
        later = [r for r in self.ledger.paid_steps() if r > task.round]
        if later:
            raise RoundError(
                f"round {task.round} is asked for after round {later[-1]}",
                "resume the server from its last checkpoint",
            )
        pending = self._sum(task)
        self._pay(task.round)
        state = NoiseState(self._streams)
        release, _ = self._mechanism.update(pending, state)
        if self._journal is not None:
            self._journal.write(release, [{"task": task.digest()}])
            self._journal.drop_before(task.round)
        if self.grid is None:
            self._last = (task.digest(), release)
        return release

    def _pay(self, round_number: int) -> None:
        """Pay for a round; where a draw of clients is in the price, for the whole run.

        There a round costs what it does because the client might not have been in it.
        To pay for the rounds that it was in would be too little, and which ones those
        are is the draw. So the first answer pays for all of them, and later ones are
        entered at no cost.
        """
        plan, event = self.shared.plan, self._event
        if plan.federation.counts_the_draw(plan.view):
            first = self.ledger.count() == 0
            event = repeated(event, plan.federation.rounds if first else 0)
        self.ledger.pay(round_number, 0, event)

    def _sum(self, task: Task) -> ClippedSum:
        """The clipped sum at the task's parameters. Private."""
        shared = self.shared
        shared.load(task.parameters)
        shared.require_uncoupled(self._loader.physical_batch_size)
        whitener = shared.whitener_at(task.round, task.whitened_at)
        device = next(iter(shared.parameters.values())).device
        pending: ClippedSum | None = None
        self._state.end_step()
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            # dropout belongs to rows, and rows move where a record is missing: nobody
            # may know its draws, and the global generator may have a public seed
            secret = self._streams.torch_seed(Stream.FORWARD, task.round)
            torch.manual_seed(secret % 2**63)
            for batch in self._loader.steps(task.round, task.round + 1):
                with withheld("the model or its loss"):
                    ios, _ = self._pass(*moved(batch.data, device))
                part = clipped_sum(
                    ios,
                    shared.rule,
                    whitener,
                    parameters=shared.parameters,
                    present=batch.present,
                    step=batch.step,
                    scale=float(self._loader.physical_batch_size),
                    slots=self._slots,
                    expected=shared.plan.divisors[self.number],
                )
                pending = part if pending is None else pending.merge(part)
        assert pending is not None  # an empty draw is a batch of padding
        return pending


def _whole_client(unit: Unit, dataset: Any, records: int | None) -> People | None:
    """All records as those of one person, if the client is the unit."""
    if (unit is Unit.CLIENT) != (records is not None):
        raise ConfigurationError(
            "records_per_round belongs to the client as the unit",
            "declare it there, and leave it out where the unit is a record",
        )
    return None if records is None else People([0] * len(dataset), records)


def _stand_in(template: Batch) -> list[Any]:
    """One record of zeros, for shapes; it is never drawn."""
    return [tree_map(lambda x: x[0], (template.inputs, template.targets))]


class _Nobody:
    """Draws no record in any round."""

    def draw(self, step: int, population: int) -> npt.NDArray[np.int64]:
        return np.zeros(0, dtype=np.int64)
