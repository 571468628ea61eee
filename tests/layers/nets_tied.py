"""Weights that several modules of a block on ``[B, T, D]`` share."""

import torch
from nets_base import frozen
from nets_recurrent import Unrolled
from torch import nn


class Transposed(nn.Module):
    """Features before positions, as convolutions and channel norms have them."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Mixer(nn.Module):
    """Weights over positions and features at once, which no rule knows."""

    def __init__(self, t, d):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(t, t, d) / t)

    def forward(self, x):
        return torch.einsum("tsd,bsd->btd", self.mix, x).tanh()


def tied(*modules, names=("weight",)):
    """Modules one after the other, each with the first one's parameters."""
    for other in modules[1:]:
        for name in names:
            setattr(other, name, getattr(modules[0], name))
    return nn.Sequential(*(m for one in modules for m in (one, nn.Tanh())))


class SharedModule(nn.Module):
    """One module under two names, called under both."""

    def __init__(self, d):
        super().__init__()
        self.first = nn.Linear(d, d)
        self.second = nn.Sequential(self.first, nn.Tanh())

    def forward(self, x):
        return self.second(self.first(x))


class Doubled(nn.Module):
    """A weight that no rule knows the use of, tied to that of a Linear."""

    def __init__(self, linear):
        super().__init__()
        self.linear, self.weight = linear, linear.weight

    def forward(self, x):
        return self.linear(x).tanh() @ self.weight.square()


def tied_rnn_linear(d):
    block = Unrolled(nn.RNN, d)
    block.back.weight = block.layer.weight_hh_l0
    return block


class Uncalled(nn.Module):
    """A table that only lends its weight, as some language models have it."""

    def __init__(self, d):
        super().__init__()
        self.shared = nn.Linear(d, d, bias=False)
        self.used = nn.Linear(d, d, bias=False)
        self.used.weight = self.shared.weight

    def forward(self, x):
        return self.used(x)


def tied_blocks(t, d):
    def linear(**options):
        return nn.Linear(d, d, **options)

    return {
        "tied-linear": lambda: tied(linear(), linear(), linear(bias=False)),
        "tied-both": lambda: tied(linear(), linear(), names=("weight", "bias")),
        "tied-norm": lambda: tied(nn.LayerNorm(d), nn.LayerNorm(d)),
        "tied-norms": lambda: tied(nn.LayerNorm(d), nn.RMSNorm(d)),
        "tied-frozen": lambda: tied(frozen(linear(), "weight"), linear()),
        "tied-mixer": lambda: tied(Mixer(t, d), Mixer(t, d), names=("mix",)),
        "tied-module": lambda: SharedModule(d),
        "tied-doubled": lambda: Doubled(linear()),
        "tied-rnn": lambda: tied_rnn_linear(d),
        "tied-uncalled": lambda: Uncalled(d),
        "tied-conv1d": lambda: Transposed(
            tied(
                nn.Conv1d(d, d, 3, padding=1),
                nn.Conv1d(d, d, 3, padding=2, dilation=2, padding_mode="circular"),
            )
        ),
    }
