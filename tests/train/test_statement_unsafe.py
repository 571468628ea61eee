"""Reproducible noise voids the guarantee for good, also after a resume without it."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from curvedp import make_private


def attach(run_dir, **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 4, generator=generator)
    y = torch.randint(0, 3, (24,), generator=generator)
    return make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        TensorDataset(x, y),
        loss="cross-entropy",
        noise_multiplier=1.0,
        sample_rate=0.5,
        steps=4,
        expected_batch_size=12,
        run_dir=run_dir,
        **options,
    )


def step(private):
    for x, y in private.loader:
        private.optimizer.zero_grad()
        private.loss(private.model(x), y).backward()
        private.optimizer.step()
        break


def test_a_resume_with_secret_noise_does_not_bring_the_guarantee_back(tmp_path):
    with attach(tmp_path / "run", unsafe_reproducible_noise=3) as private:
        step(private)
        private.save()
        assert not private.statement().facts["private"]
    with attach(tmp_path / "run") as private:
        private.resume()
        step(private)
        statement = private.statement()
        assert not statement.facts["private"]
        assert "NO PRIVACY GUARANTEE" in str(statement)


def test_without_it_there_is_one(tmp_path):
    with attach(tmp_path / "run") as private:
        step(private)
        assert private.statement().facts["private"]
