"""Learning rates that follow steps, and those that follow a metric."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    ReduceLROnPlateau,
    StepLR,
)

from curvedp.errors import ConfigurationError, LoopError
from curvedp.train import optimizer as module

from ..faults.cases import attach, examples
from .loops import small_net

WHOLE = {"physical_batch_size": 24, "steps": 6}


def attached(**options):
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = attach(examples(), model, optimizer=optimizer, **{**WHOLE, **options})
    return private, optimizer


def run(private, after_step):
    for x, y in private.loader:
        loss = private.loss(private.model(x), y)
        loss.backward()
        private.optimizer.step()
        after_step(loss)


@pytest.mark.parametrize("when", ["before attaching", "of the inner one", "afterwards"])
def test_a_plateau_of_the_private_loss_is_refused(when):
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if when == "before attaching":
        plateau = ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
    private = attach(examples(), model, optimizer=optimizer, **WHOLE)
    if when != "before attaching":
        own = optimizer if when == "of the inner one" else private.optimizer
        plateau = ReduceLROnPlateau(own, patience=0, threshold=10.0)
    with pytest.raises(LoopError, match=r"ReduceLROnPlateau.*\n.*public_metric=True"):
        run(private, lambda loss: plateau.step(loss.item()))
    # the rate that follows from a private number was never used
    assert private.step == private._engine.ledger.count() == 1


def test_a_plateau_is_found_among_changes_of_another_schedule(monkeypatch):
    private, optimizer = attached(steps=12)
    other = LambdaLR(optimizer, lambda step: 0.99**step)
    plateau = ReduceLROnPlateau(optimizer, patience=6, threshold=10.0)
    clock = iter(range(10**6))  # a second passes at each look
    monkeypatch.setattr(module, "monotonic", lambda: float(next(clock)) * 1000)

    def after(loss):
        other.step()
        plateau.step(loss.item())

    with pytest.raises(LoopError, match="ReduceLROnPlateau"):
        run(private, after)
    assert private._engine.ledger.count() < 12


def test_a_plateau_is_not_wrapped_without_a_word():
    private, _ = attached()
    plateau = ReduceLROnPlateau(private.optimizer)
    with pytest.raises(ConfigurationError, match="public_metric=True"):
        private.schedule(plateau)


def test_a_plateau_of_a_metric_declared_public_moves_the_rate():
    private, _ = attached()
    plateau = ReduceLROnPlateau(private.optimizer, patience=0, factor=0.5)
    scheduler = private.schedule(plateau, public_metric=True)
    run(private, lambda _: scheduler.step(1.0))
    assert private.step == 6
    assert scheduler.get_last_lr() == [0.1 * 0.5**5]
    assert any("declared public" in n for n in private.statement().facts["notes"])
    with pytest.raises(LoopError, match="metric"):
        scheduler.step()
    again = private.schedule(plateau, public_metric=True)
    again.load_state_dict(scheduler.state_dict())
    notes = private.statement().facts["notes"]
    assert sum("declared public" in n for n in notes) == 1


def test_a_schedule_of_steps_takes_no_metric():
    private, _ = attached()
    scheduler = private.schedule(StepLR(private.optimizer, 1))
    with pytest.raises(LoopError, match="takes no metric"):
        scheduler.step(0.3)


@pytest.mark.parametrize("make", [
    lambda o: StepLR(o, 2),
    lambda o: CosineAnnealingLR(o, 6),
])  # fmt: skip
@pytest.mark.parametrize("inner", [True, False])
def test_a_scheduler_made_after_attaching_works(make, inner):
    private, optimizer = attached()
    scheduler = make(optimizer if inner else private.optimizer)
    idle = ReduceLROnPlateau(optimizer)  # never fed
    run(private, lambda _: scheduler.step())
    assert private.step == 6 and idle.last_epoch == 0
    assert private.optimizer.param_groups[0]["lr"] < 0.1
