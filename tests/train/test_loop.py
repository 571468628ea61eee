"""Hand-written loops: what users do with make_private, and what it answers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from curvedp import make_private
from curvedp.errors import (
    CheckpointError,
    ConfigurationError,
    CoverageError,
    DataError,
    LoopError,
    NotPrivateError,
)

from ..faults.cases import attach, examples, linear, parameters, train

#: Sums over other portions are added in another order: rounding of float32.
SAME_BUT_FOR_ROUNDING = {"rtol": 1e-5, "atol": 1e-6}


def small_net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize("physical", [1, 3, 8, 64])
def test_physical_batch_size_does_not_change_the_result(physical):
    reference = train(attach(examples(), small_net(), physical_batch_size=24))
    result = train(attach(examples(), small_net(), physical_batch_size=physical))
    torch.testing.assert_close(result, reference, **SAME_BUT_FOR_ROUNDING)


def test_own_loss_in_the_loop_gives_what_private_loss_gives():
    reference = train(attach(examples()))
    for reduction in ("mean", "sum"):
        private = attach(examples(), loss=None, loss_reduction=reduction)
        for x, y in private.loader:
            private.optimizer.zero_grad()
            loss = F.cross_entropy(private.model(x), y, reduction=reduction)
            loss.backward()
            private.optimizer.step()
        torch.testing.assert_close(
            parameters(private.model), reference, **SAME_BUT_FOR_ROUNDING
        )
        assert "loss of the training loop" in str(private.statement())


def test_a_checked_loss_must_be_used():
    private = attach(examples())
    for x, y in private.loader:
        F.cross_entropy(private.model(x), y).backward()
        with pytest.raises(LoopError, match=r"private\.loss"):
            private.optimizer.step()
        break


def test_the_bare_model_is_refused_and_its_gradients_are_not_used():
    model = linear()
    private = attach(examples(), model)
    for x, y in private.loader:
        F.cross_entropy(model(x), y).backward()
        with pytest.raises(LoopError, match=r"private\.model"):
            private.optimizer.step()
        break


def test_step_without_a_batch_is_refused():
    private = attach(examples())
    with pytest.raises(LoopError, match=r"private\.loader"):
        private.optimizer.step()


def test_closures_are_refused():
    private = attach(examples())
    with pytest.raises(LoopError, match="closure"):
        private.optimizer.step(lambda: 0.0)


def test_evaluation_is_not_recorded():
    private = attach(examples())
    x, _ = examples().tensors
    private.model.eval()
    assert private.model(x).shape == (24, 3)
    private.model.train()
    with torch.no_grad():
        assert private.model(x[:5]).shape == (5, 3)  # any size: nothing is recorded


def test_lengths_count_logical_steps():
    private = attach(examples(), rate=0.9, steps=5, physical_batch_size=2)
    seen = sum(1 for _ in _iterate(private))
    assert len(private.loader) == 5
    assert private.step == 5
    assert seen > 5  # several physical batches a step


def _iterate(private):
    for x, y in private.loader:
        private.loss(private.model(x), y).backward()
        private.optimizer.step()
        yield


def test_epochs_of_the_loader():
    private = attach(
        examples(),
        sample_rate=None,
        steps=None,
        expected_batch_size=None,
        batch_size=6,
        epochs=2,
        delta=1e-3,
    )
    for epoch in (1, 2):
        train(private)
        assert private.step == 4 * epoch == len(private.loader) * epoch
    assert private.steps_left() == 0


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


def test_two_passes_over_one_batch_are_refused():
    private = attach(examples())
    for x, _ in private.loader:
        private.model(x)
        with torch.no_grad():
            private.model(x)  # fine: nothing is recorded
        with pytest.raises(LoopError, match="called twice"):
            private.model(x)
        break


def test_gradient_accumulation_in_the_loop():
    expected = train(attach(examples(), small_net(), rate=0.9, physical_batch_size=4))
    private = attach(examples(), small_net(), rate=0.9, physical_batch_size=4)
    portions = 0
    for x, y in private.loader:
        private.loss(private.model(x), y).backward()
        portions += 1
        if private.batch_is_whole:
            private.optimizer.step()
            private.optimizer.zero_grad()
    assert portions > private.step == 4
    assert torch.equal(parameters(private.model), expected)


def test_a_whole_batch_must_be_stepped():
    private = attach(examples(), rate=0.9, physical_batch_size=4)

    def never_step():
        for x, y in private.loader:
            private.loss(private.model(x), y).backward()

    with pytest.raises(LoopError, match="is whole and never went"):
        never_step()


def test_private_discriminator_and_public_generator():
    """GAN-style: the generator sees private data only through released weights."""
    torch.manual_seed(0)

    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, both):  # [B, 2, 4]: a real example beside a generated one
            return self.net(both).squeeze(-1)

    def loss(scores, _):
        return F.softplus(-scores[:, 0]) + F.softplus(scores[:, 1])

    critic, generator = Critic(), nn.Linear(2, 4)
    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    generator_optimizer = torch.optim.SGD(generator.parameters(), lr=0.1)
    x, y = examples().tensors
    private = make_private(
        critic,
        critic_optimizer,
        TensorDataset(x[:, None].repeat(1, 2, 1), y),
        loss=loss,
        noise_multiplier=1.0,
        sample_rate=0.5,
        steps=5,
        expected_batch_size=12,
        physical_batch_size=24,
    )
    before = parameters(generator), parameters(critic)
    for both, targets in private.loader:
        private.optimizer.zero_grad()
        with torch.no_grad():
            fake = generator(torch.randn(len(both), 2))
        both = torch.stack([both[:, 0], fake], 1)
        private.loss(private.model(both), targets).backward()
        private.optimizer.step()

        generator_optimizer.zero_grad()
        fake = generator(torch.randn(16, 2))
        F.softplus(-critic.net(fake)).mean().backward()
        generator_optimizer.step()
    assert private.step == 5
    assert not torch.equal(before[0], parameters(generator))
    assert not torch.equal(before[1], parameters(critic))


def test_penalties_on_weights_are_refused_not_dropped():
    private = attach(examples())
    for x, y in private.loader:
        penalty = sum(p.square().sum() for p in private.model.parameters())
        (private.loss(private.model(x), y) + penalty).backward()
        with pytest.raises(LoopError, match="weight_decay"):
            private.optimizer.step()
        break


def test_sampling_is_not_for_loader_options():
    with pytest.raises(ConfigurationError, match="shuffle"):
        attach(examples(), loader_options={"shuffle": True})
    with pytest.raises(ConfigurationError, match="loss_reduction"):
        attach(examples(), loss_reduction="sum")


def test_parameter_groups_and_weight_decay():
    model = small_net()
    optimizer = torch.optim.SGD(
        [
            {"params": model[0].parameters(), "lr": 0.0},
            {"params": model[2].parameters(), "weight_decay": 0.1},
        ],
        lr=0.1,
    )
    before = copy.deepcopy(model.state_dict())
    private = attach(examples(), model, optimizer=optimizer)
    train(private)
    assert torch.equal(model[0].weight, before["0.weight"])
    assert not torch.equal(model[2].weight, before["2.weight"])
    assert private.optimizer.param_groups is optimizer.param_groups


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
def test_any_torch_optimiser(make):
    model = linear()
    private = attach(examples(), model, optimizer=make(model.parameters(), lr=0.01))
    before = parameters(model)
    assert not torch.equal(train(private), before)


def test_frozen_parameters_stay():
    model = small_net()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    before = model[0].weight.clone()
    train(attach(examples(), model, optimizer=optimizer))
    assert torch.equal(model[0].weight, before)


def test_optimiser_and_model_must_match():
    model = small_net()
    part = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(CoverageError, match=r"2\.weight"):
        attach(examples(), model, optimizer=part)
    more = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(CoverageError, match="not in the model"):
        attach(examples(), model, optimizer=more)
    private = attach(examples(), model)
    with pytest.raises(ConfigurationError, match="cannot be added"):
        private.optimizer.add_param_group({"params": []})


def test_a_data_loader_is_taken_over():
    def collate(items):
        return torch.stack([2 * x for x, _ in items]), torch.stack(
            [y for _, y in items]
        )

    loader = DataLoader(examples(), batch_size=4, collate_fn=collate, shuffle=True)
    doubled = train(attach(loader))
    x, y = examples().tensors
    expected = train(attach(TensorDataset(2 * x, y)))
    torch.testing.assert_close(doubled, expected, **SAME_BUT_FOR_ROUNDING)


def test_weighted_samplers_are_refused():
    sampler = WeightedRandomSampler([1.0] * 24, num_samples=24)
    with pytest.raises(ConfigurationError, match="WeightedRandomSampler"):
        attach(DataLoader(examples(), batch_size=4, sampler=sampler))


def test_datasets_without_length_are_refused():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(examples())

    with pytest.raises(DataError, match="length"):
        attach(Stream())
    with pytest.raises(DataError, match="empty"):
        attach(TensorDataset(torch.zeros(0, 4), torch.zeros(0).long()))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"noise_multiplier": None}, "either epsilon"),
        ({"noise_multiplier": None, "epsilon": -1.0}, "epsilon"),
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"sample_rate": 1.5}, "sample_rate"),
        ({"steps": 0}, "steps"),
        ({"steps": None}, "not declared in full"),
        ({"expected_batch_size": None}, "expected_batch_size is missing"),
        ({"batch_size": 4}, "cannot be combined"),
        ({"delta": 1.0}, "delta"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"clipping": "gentle"}, "gentle"),
        ({"relation": "friendly"}, "friendly"),
        ({"epsilom": 1.0}, "epsilom"),
        ({"physical_batch_size": 0}, "physical_batch_size"),
        ({"loss_reduction": "max", "loss": None}, "loss_reduction"),
        ({"loss": "hinge"}, "hinge"),
        ({"recipe": "dp-magic"}, "dp-magic"),
        ({"unsafe_reproducible_noise": -1}, "unsafe_reproducible_noise"),
    ],
)
def test_impossible_settings_are_named(settings, words):
    with pytest.raises(ConfigurationError, match=words):
        attach(examples(), **settings)


def test_a_batch_larger_than_the_data_is_refused():
    model = linear()
    with pytest.raises(ConfigurationError, match="larger than the dataset of 24"):
        make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            examples(),
            epsilon=1.0,
            delta=1e-3,
            batch_size=25,
            epochs=1,
        )


def test_the_non_private_recipe_has_no_place_here():
    with pytest.raises(NotPrivateError, match="non-private"):
        attach(examples(), recipe="non-private")


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
    iterator = _iterate(private)
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
