"""Models that cannot be followed, or only once they are fixed; each with inputs."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.diagnostics.shapes import VOCABULARY, WIDTH, tokens


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        h = self.shared(torch.tanh(self.first(x)))
        return self.head(F.linear(h, self.shared.weight.mT))


def functional():
    """A weight that is used past its module."""
    return Functional(), torch.zeros(2, 5)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(5, 4), nn.Linear(5, 4)

    def forward(self, x):
        return self.used(x)


def unused():
    """A layer that is never called."""
    return Unused(), torch.zeros(2, 5)


class Mixed(nn.Module):
    """Problems of every kind at once, some of which can be repaired."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH, max_norm=1.0)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.instance = nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True)
        self.relu = nn.ReLU(inplace=True)
        self.head, self.spare = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)

    def forward(self, ids):
        x = self.norm(self.instance(self.conv(self.words(ids).mT))).mT
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.relu(x).mean(1))


def mixed():
    return Mixed(), tokens()


def repairable():
    model, inputs = mixed()
    del model.spare
    return model, inputs


class Overwriting(nn.Module):
    """Changes a layer's input after the layer used it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(5, 4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        x = x - 0.5
        return self.first(x) + self.second(self.relu(x))


def overwriting():
    return Overwriting(), torch.zeros(2, 5)


class Centred(nn.Module):
    """Subtracts the mean of the batch."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 4)

    def forward(self, x):
        return self.linear(x - x.mean(0))


def centred():
    return Centred(), torch.zeros(2, 5)


def flat_batch_norm():
    """BatchNorm1d on [B, C]: a group of one channel would be constant."""
    model = nn.Sequential(nn.Linear(5, 24), nn.BatchNorm1d(24), nn.Linear(24, 4))
    return model, torch.zeros(2, 5)
