"""What is found before a payment, and what a payment has to be there for."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from curvedp.accounting import (
    read_ledger,
)
from curvedp.errors import (
    CheckpointError,
    ConfigurationError,
    LoopError,
)
from curvedp.federated import Client
from curvedp.noise import restore_release
from curvedp.recipes import Recipe, get_recipe
from curvedp.train import guard, ledgers, rehearsal
from curvedp.train.optimizer import LogicalScheduler, PrivateOptimizer
from curvedp.train.private import Private
from curvedp.train.releasing import Releasing

from ..federated.worlds import World
from .cases import attach, examples, linear, train
from .checking import refused
from .mutate import Fault, Patch


def _attached(kind, model=None, **options):
    model = model or linear()
    return attach(examples(), model, optimizer=kind(model.parameters()), **options)


def closures_are_refused_at_attach():
    refused(ConfigurationError, "LBFGS", lambda: _attached(torch.optim.LBFGS))


def a_step_that_fails_is_found_at_attach():
    refused(ConfigurationError, "SparseAdam", lambda: _attached(torch.optim.SparseAdam))


class _Idle(torch.optim.SGD):
    def step(self, closure=None):
        pass


def an_optimiser_that_moves_nothing_is_refused():
    refused(ConfigurationError, "moves nothing", lambda: _attached(_Idle))


class _Bursting(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.fill_(torch.inf)


def an_optimiser_that_bursts_is_refused():
    refused(ConfigurationError, "not finite", lambda: _attached(_Bursting))


class _Drawing(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        torch.rand(1)


def the_trial_draws_from_its_own_generator():
    optimizer = _Drawing(linear().parameters())
    state = torch.get_rng_state()
    rehearsal.rehearse(optimizer, get_recipe("dp-sgd"))
    assert torch.equal(torch.get_rng_state(), state), "the global generator moved"


class _Untold(nn.Linear):
    def get_extra_state(self):
        return {1, 2}

    def set_extra_state(self, state):
        pass


def what_no_checkpoint_holds_is_refused_before_a_payment():
    with tempfile.TemporaryDirectory() as folder:
        refused(
            CheckpointError,
            "stored",
            lambda: attach(examples(), _Untold(4, 3), run_dir=folder),
        )
        assert read_ledger(Path(folder) / "ledger.jsonl").count() == 0


class _Naming(torch.optim.SGD):
    """Keeps in its groups what no journal can hold."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.param_groups[0]["names"] = {"a"}


def what_no_journal_holds_is_refused_before_a_payment():
    with tempfile.TemporaryDirectory() as folder:
        # without the trial of a checkpoint, which holds the groups too
        try:
            private = _attached(_Naming, run_dir=folder)
            train(private)
        except CheckpointError:
            pass
        assert read_ledger(Path(folder) / "ledger.jsonl").count() == 0


def another_optimiser_than_the_recipes_is_named():
    private = _attached(torch.optim.SGD, recipe="dp-adam")
    assert "optimiser: SGD" in str(private.statement()), "not named"


def a_method_that_rests_on_its_optimiser_refuses_others():
    refused(
        ConfigurationError,
        "rests on SGD",
        lambda: _attached(torch.optim.Adam, recipe="dp-adambc"),
    )


@contextmanager
def _launched():
    os.environ["WORLD_SIZE"] = "2"
    try:
        yield
    finally:
        del os.environ["WORLD_SIZE"]


def ranks_without_a_group_are_refused():
    with _launched():
        refused(ConfigurationError, "WORLD_SIZE", lambda: attach(examples()))


def independent_runs_say_so():
    with _launched():
        private = attach(examples(), independent_process=True)
    assert "epsilons add up" in str(private.statement()), "the statement is silent"


def a_client_of_a_launcher_has_a_folder():
    world = World()
    with _launched():
        refused(
            ConfigurationError,
            "run_dir",
            lambda: Client(0, world.together, world.data[0]),
        )


def a_plateau_of_the_private_loss_is_refused():
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = attach(examples(), model, optimizer=optimizer)
    plateau = ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)

    def loop():
        for x, y in private.loader:
            loss = private.loss(private.model(x), y)
            loss.backward()
            private.optimizer.step()
            if private.batch_is_whole or not private._engine.inside_logical_batch:
                plateau.step(loss.item())

    refused(LoopError, "ReduceLROnPlateau", loop)


def a_plateau_is_wrapped_with_a_word():
    private = attach(examples())
    plateau = ReduceLROnPlateau(private.optimizer)
    refused(ConfigurationError, "public_metric", lambda: private.schedule(plateau))


def a_state_stands_where_its_ledger_has_paid():
    private = attach(examples())
    state = {**private.state_dict(), "step": 4}
    refused(CheckpointError, "paid for 0", lambda: private.load_state_dict(state))


def a_release_has_been_paid_for():
    with (
        tempfile.TemporaryDirectory() as folder,
        attach(examples(), run_dir=folder) as private,
    ):
        engine = private._engine
        values = {n: torch.ones_like(p) for n, p in engine.parameters.items()}
        release = restore_release(values, "identity", 0, noise_std=1.0)
        engine.journal.write(release, [{"lr": 0.1}])
        refused(CheckpointError, "paid for 0", private.resume)


FAULTS = [
    Fault(
        "a rate that follows the private loss",
        a_plateau_of_the_private_loss_is_refused,
        (Patch(PrivateOptimizer.advance, "self._refuse_private_metrics(", "bool("),),
    ),
    Fault(
        "a rate that follows a metric, and nobody said of what",
        a_plateau_is_wrapped_with_a_word,
        (Patch(LogicalScheduler.__init__, "and not public_metric", "and False"),),
    ),
    Fault(
        "17 a state beyond its payments",
        a_state_stands_where_its_ledger_has_paid,
        (
            Patch(
                Private._load,
                'self._engine.require_paid(state["step"], what)',
                "pass",
            ),
        ),
    ),
    Fault(
        "17 a release that nobody paid for",
        a_release_has_been_paid_for,
        (
            Patch(
                Releasing.recover,
                'self.require_paid(self.step + 1, "the journal")',
                "pass",
            ),
        ),
    ),
    Fault(
        "19 a launcher without a group",
        ranks_without_a_group_are_refused,
        (Patch(guard.refuse_processes, "if launcher is not None:", "if False:"),),
    ),
    Fault(
        "19 runs whose epsilons nobody adds up",
        independent_runs_say_so,
        (Patch(ledgers.open_ledger, "if independent:", "if False:"),),
    ),
    Fault(
        "19 clients of a launcher that forget what they spent",
        a_client_of_a_launcher_has_a_folder,
        (Patch(Client.__init__, "if run_dir is None:", "if False:"),),
    ),
    Fault(
        "20 paid before it could work: a closure",
        closures_are_refused_at_attach,
        (
            Patch(rehearsal._refuse_arguments, "bind(optimizer)", "parameters"),
            Patch(rehearsal.rehearse, "state = _steps(copied)", "state = None"),
        ),
    ),
    Fault(
        "20 paid before it could work: sparse gradients",
        a_step_that_fails_is_found_at_attach,
        (Patch(rehearsal.rehearse, "state = _steps(copied)", "state = None"),),
    ),
    Fault(
        "20 paid before it could work: nothing moves",
        an_optimiser_that_moves_nothing_is_refused,
        (Patch(rehearsal._steps, "if all(", "if False and all("),),
    ),
    Fault(
        "20 paid before it could work: not finite",
        an_optimiser_that_bursts_is_refused,
        (Patch(rehearsal._steps, "if not torch", "if False and not torch"),),
    ),
    Fault(
        "a trial that draws from the run's generator",
        the_trial_draws_from_its_own_generator,
        (
            Patch(
                rehearsal._steps,
                "torch.random.fork_rng(devices=list(devices))",
                "torch.enable_grad()",
            ),
        ),
    ),
    Fault(
        "20 paid before it could be stored: a checkpoint",
        what_no_checkpoint_holds_is_refused_before_a_payment,
        (Patch(Private.rehearsed, "if self._run_dir is not None:", "if False:"),),
    ),
    Fault(
        "20 paid before it could be stored: a journal",
        what_no_journal_holds_is_refused_before_a_payment,
        (Patch(Private.rehearsed, "if self._run_dir is not None:", "if False:"),),
    ),
    Fault(
        "a recipe's name over another optimiser",
        another_optimiser_than_the_recipes_is_named,
        (Patch(Recipe.remark_on, "None if given == own else other", "None"),),
    ),
    Fault(
        "a recipe that rests on another optimiser",
        a_method_that_rests_on_its_optimiser_refuses_others,
        (Patch(Recipe.remark_on, "if given != own:", "if False:"),),
    ),
]
