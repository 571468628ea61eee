"""Small models, data and loops that the fault tests run."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from curvedp import make_private

SEED = 7


def examples(n=24, features=4, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, features, generator=generator)
    return TensorDataset(x, torch.randint(0, classes, (n,), generator=generator))


def linear(features=4, classes=3):
    torch.manual_seed(1)
    return nn.Linear(features, classes)


def attach(dataset, model=None, *, steps=4, rate=0.5, **options):
    model = model or linear()
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(
        model.parameters(), lr=0.1
    )
    settings = {
        "noise_multiplier": 1.0,
        "sample_rate": rate,
        "steps": steps,
        "expected_batch_size": 10,
        "unsafe_reproducible_noise": SEED,
        "loss": "cross-entropy",
        "physical_batch_size": 8,
    }
    return make_private(model, optimizer, dataset, **{**settings, **options})


def train(private):
    """Run all steps of a private loop; returns the flattened parameters."""
    for x, y in private.loader:
        private.optimizer.zero_grad()
        private.loss(private.model(x), y).backward()
        private.optimizer.step()
    return parameters(private.model)


def parameters(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class TimeFirst(nn.Module):
    """Reads [B, T, p] as [T, B, p]: right for the batch, wrong for its examples."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.inner(x.transpose(0, 1)).transpose(0, 1).mean(1))


class CountsBatches(nn.Module):
    """Keeps a running mean of what it sees in a buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return self.layer(x)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.forgotten = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.used(x)


class FunctionalWeight(nn.Module):
    """Uses the embedding's table a second time, past its module."""

    def __init__(self):
        super().__init__()
        self.table, self.mix = nn.Embedding(11, 8), nn.Linear(8, 8)

    def forward(self, x):
        return F.linear(self.mix(self.table(x)), self.table.weight)


def coupled_loss(output, targets):
    """Divides by a count over the batch, as a token mean does."""
    losses = F.cross_entropy(output, targets, reduction="none")
    return losses / (targets != 0).sum().clamp_min(1)


class Positions(nn.Module):
    """Position embeddings in three spellings, none of which has a batch dimension."""

    def __init__(self, length, width=4, classes=3):
        super().__init__()
        self.looked_up = nn.Embedding(length, width)
        self.flat = nn.Parameter(torch.randn(length, width))
        self.leading = nn.Parameter(torch.randn(1, length, width))
        self.mix, self.head = nn.Linear(width, 5), nn.Linear(5, classes)

    def forward(self, x):  # [B, T, p]
        places = self.looked_up(torch.arange(x.shape[1]))
        h = x + places + self.flat + self.leading
        return self.head(torch.tanh(self.mix(h)).mean(1))


class Twice(nn.Module):
    """Calls one layer on two things, as a siamese net or a loop over depth does."""

    def __init__(self):
        super().__init__()
        self.shared, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.shared(torch.tanh(self.shared(x)))))


class LoraLinear(nn.Linear):
    """A frozen linear layer with a trained low-rank correction, as a subclass."""

    def __init__(self, inputs, outputs, rank=2):
        super().__init__(inputs, outputs)
        self.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, inputs))
        self.lora_b = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x):
        return super().forward(x) + x @ self.lora_a.T @ self.lora_b.T


class Adapted(nn.Module):
    """LoRA from two linear layers beside a frozen one; ``way`` says how it is used."""

    def __init__(self, way="used"):
        super().__init__()
        torch.manual_seed(2)
        self.base = nn.Linear(4, 6).requires_grad_(False)
        self.lora_a = nn.Linear(4, 2, bias=False)
        self.lora_b = nn.Linear(2, 6, bias=False)
        nn.init.zeros_(self.lora_b.weight)
        self.inner, self.head = LoraLinear(6, 6), nn.Linear(6, 3)
        self.way = way

    def forward(self, x):
        h = self.base(x)
        if self.way != "forgotten":
            scale = 0.0 if self.way == "scaled by zero" else 1.0
            correction = scale * self.lora_b(self.lora_a(x))
            h = h + (correction.detach() if self.way == "detached" else correction)
        return self.head(torch.tanh(self.inner(torch.tanh(h))))


def trained(model):
    """An optimiser over what is not frozen."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
