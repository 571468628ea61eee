"""Hand-written loops: what users do with make_private."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from curvedp import make_private

from ..faults.cases import attach, examples, linear, parameters, train
from .loops import SAME_BUT_FOR_ROUNDING, small_net, steps_of


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
    seen = sum(1 for _ in steps_of(private))
    assert len(private.loader) == 5
    assert private.step == 5
    assert seen > 5  # several physical batches a step


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

    def beside_generated(batch):
        x, y = batch
        return torch.stack([x, generator(torch.randn(len(x), 2))], 1), y

    private = make_private(
        critic,
        critic_optimizer,
        examples(),
        loss=loss,
        prepare=beside_generated,
        noise_multiplier=1.0,
        sample_rate=0.5,
        steps=5,
        expected_batch_size=12,
        physical_batch_size=24,
    )
    before = parameters(generator), parameters(critic)
    for both, targets in private.loader:
        private.optimizer.zero_grad()
        private.loss(private.model(both), targets).backward()
        private.optimizer.step()

        generator_optimizer.zero_grad()
        fake = generator(torch.randn(16, 2))
        F.softplus(-critic.net(fake)).mean().backward()
        generator_optimizer.step()
    assert private.step == 5
    assert not torch.equal(before[0], parameters(generator))
    assert not torch.equal(before[1], parameters(critic))


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
