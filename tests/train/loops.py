"""What the tests of hand-written loops share."""

from __future__ import annotations

import torch
from torch import nn

#: Sums over other portions are added in another order: rounding of float32.
SAME_BUT_FOR_ROUNDING = {"rtol": 1e-5, "atol": 1e-6}


def small_net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def steps_of(private):
    for x, y in private.loader:
        private.loss(private.model(x), y).backward()
        private.optimizer.step()
        yield
