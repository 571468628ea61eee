"""A small network on the built-in digits, its study and its sources."""

import torch
from torch import nn

from curvedp.data import load
from curvedp.diagnostics.geometry import Study, sources_of
from curvedp.recipes import Curvature

SMALL = Curvature(probe_size=48, probe_batches=2)


def digits(n=300):
    train = load("digits").train
    return torch.utils.data.TensorDataset(train.inputs[:n], train.targets[:n])


def cnn():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.GroupNorm(2, 4), nn.Flatten(),
        nn.Linear(36, 12), nn.Tanh(), nn.Linear(12, 10),
    )  # fmt: skip


def study(model=None):
    return Study.of(model or cnn(), "cross-entropy", digits())


def sources(of, curvature=SMALL, **options):
    return sources_of(of, digits(), curvature=curvature, **options)
