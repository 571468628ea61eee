"""Hand-written loops: schedules, stored states, statements."""

from __future__ import annotations

import copy

import pytest
import torch

from curvedp.errors import CheckpointError, LoopError

from ..faults.cases import attach, examples, linear, parameters, train
from .loops import small_net, steps_of


def test_schedulers_count_logical_steps():
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    private = attach(
        examples(), model, optimizer=optimizer, rate=0.9, steps=4, physical_batch_size=2
    )
    scheduler = private.schedule(
        torch.optim.lr_scheduler.StepLR(private.optimizer, step_size=1, gamma=0.1)
    )
    for x, y in private.loader:
        private.loss(private.model(x), y).backward()
        private.optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)
    assert scheduler.get_last_lr() == [pytest.approx(1e-4)]
    restored = private.schedule(
        torch.optim.lr_scheduler.StepLR(private.optimizer, step_size=1, gamma=0.1)
    )
    restored.load_state_dict(scheduler.state_dict())
    assert restored.state_dict() == scheduler.state_dict()


def test_a_scheduler_that_counts_physical_batches_is_refused():
    private = attach(examples(), rate=0.9, steps=4, physical_batch_size=2)
    scheduler = torch.optim.lr_scheduler.StepLR(private.optimizer, step_size=1)

    def loop():
        for x, y in private.loader:
            private.loss(private.model(x), y).backward()
            private.optimizer.step()
            scheduler.step()

    with pytest.raises(LoopError, match=r"private\.schedule"):
        loop()


def scheduled_run(folder, stop_at=None, crash_at=None):
    """Six steps with a schedule; resumes what is in the folder."""
    torch.manual_seed(1)
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    with attach(
        examples(), model, optimizer=optimizer, steps=6, run_dir=folder
    ) as private:
        scheduler = private.schedule(
            torch.optim.lr_scheduler.StepLR(private.optimizer, step_size=1, gamma=0.5)
        )
        extra = private.resume()
        if extra:
            scheduler.load_state_dict(extra["scheduler"])
        while private.steps_left() and private.step != crash_at:
            for x, y in private.loader:
                private.loss(private.model(x), y).backward()
                private.optimizer.step()
                scheduler.step()
                if private.step == stop_at and private._engine.between_steps:
                    private.save({"scheduler": scheduler.state_dict()})
                    stop_at = None
                if private.step == crash_at and private._engine.between_steps:
                    break
    return parameters(model), optimizer.param_groups[0]["lr"]


def test_schedules_survive_a_crash(tmp_path):
    expected, rate = scheduled_run(tmp_path / "whole")
    folder = tmp_path / "broken"
    scheduled_run(folder, stop_at=2, crash_at=5)  # steps 3 to 5 are in the journal
    result, resumed_rate = scheduled_run(folder)
    assert resumed_rate == rate
    assert torch.equal(result, expected)


def test_state_dict_goes_on_where_it_was():
    whole = train(attach(examples(), small_net(), steps=6))

    def momentum(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    model = small_net()
    first = attach(examples(), model, optimizer=momentum(model), steps=6)
    for x, y in first.loader:
        first.loss(first.model(x), y).backward()
        first.optimizer.step()
        if first.step == 3 and first._engine.between_steps:
            break
    state = copy.deepcopy(first.state_dict())

    other = small_net()
    second = attach(examples(), other, optimizer=momentum(other), steps=6)
    second.load_state_dict(state)
    assert second.step == 3
    assert second.steps_left() == 3
    assert second.epsilon() == first.epsilon() > 0
    assert torch.equal(train(second), whole)


def test_a_rewind_gives_no_money_back():
    private = attach(examples(), steps=4)
    state = copy.deepcopy(private.state_dict())
    iterator = steps_of(private)
    for _ in iterator:
        if private.step == 2:
            break
    private.load_state_dict(state)
    assert private.step == 0
    assert private.steps_left() == 2  # the two steps stay paid
    train(private)
    assert private._engine.ledger.count() == 4


def test_no_state_in_the_middle_of_a_logical_batch():
    private = attach(examples(), rate=1.0, physical_batch_size=4)
    for x, y in private.loader:
        private.loss(private.model(x), y).backward()
        private.optimizer.step()
        break
    with pytest.raises(LoopError, match="half done"):
        private.state_dict()


def test_a_state_of_other_settings_is_refused():
    state = attach(examples(), steps=4).state_dict()
    with pytest.raises(CheckpointError, match="noise_multiplier"):
        attach(examples(), steps=4, noise_multiplier=2.0).load_state_dict(state)


def test_states_hold_no_secret():
    private = attach(examples(), unsafe_reproducible_noise=987654321)
    train(private)
    assert "987654321" not in repr(private.state_dict())


def test_statement_says_what_holds():
    private = attach(examples(), unsafe_reproducible_noise=None)
    text = str(private.statement())
    for words in ("add-remove", "one example", "Poisson", "Not covered", "rate 0.5"):
        assert words in text
    assert private.epsilon() == 0.0
    unsafe = attach(examples()).statement()
    assert "NO PRIVACY GUARANTEE" in str(unsafe)
    assert unsafe.facts["private"] is False


def test_public_size_is_said():
    private = attach(
        examples(),
        sample_rate=None,
        steps=None,
        expected_batch_size=None,
        batch_size=6,
        epochs=1,
        delta=1e-3,
    )
    text = str(private.statement())
    assert "zero-out" in text
    assert "the number of examples, 24, is public" in text
