"""Small nets of every kind of layer, and data in which some examples are hostile."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

CLASSES = 3
#: Examples that are drawn, and examples that may join them or take their place.
DRAWN, SPARE = 10, 14
TOKENS = 11


class Tokens(nn.Module):
    """A tied table: looked up at the bottom, a linear layer at the top."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, 5)
        self.mix, self.head = nn.Linear(5, 5), nn.Linear(TOKENS, CLASSES)

    def forward(self, ids):
        h = torch.tanh(self.mix(self.table(ids)))
        return self.head(F.linear(h, self.table.weight).mean(1))


class Untied(nn.Module):
    """Tokens, looked up, mixed along the sequence, averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, 5)
        self.mix, self.head = nn.Linear(5, 6), nn.Linear(6, CLASSES)

    def forward(self, ids):
        return self.head(torch.tanh(self.mix(self.table(ids))).mean(1))


class Rows(nn.Module):
    """Wide layers on several positions: gradients are never written down."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, CLASSES)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)).sum(1))


def mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def conv():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.GELU(), nn.Conv2d(4, 4, 3),
        nn.Flatten(), nn.Linear(8, CLASSES),
    )  # fmt: skip


#: Name to (how it is made, shape of an input; None for tokens).
def normed():
    """The input of its second convolution can be made again."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 2, 2),
        nn.Flatten(), nn.Linear(12, CLASSES),
    )  # fmt: skip


NETS = {
    "mlp": (mlp, (4,)),
    "conv": (conv, (1, 6, 5)),
    "rows": (Rows, (3, 24)),
    "tokens": (Untied, None),
}


#: Nets that show one thing.
SPECIAL = {"normed": (normed, (1, 6, 5))}


def make(net, seed=1):
    torch.manual_seed(seed)
    return (NETS | SPECIAL)[net][0]()


def data(net, seed=0):
    """Drawn examples first, then spare ones, most of them hostile."""
    shape = (NETS | SPECIAL)[net][1]
    generator = torch.Generator().manual_seed(seed)
    n = DRAWN + SPARE
    y = torch.randint(0, CLASSES, (n,), generator=generator)
    if shape is None:
        ids = torch.randint(0, TOKENS, (n, 7), generator=generator)
        ids[DRAWN] = 0  # one token, again and again
        ids[DRAWN + 1] = ids[0]
        return TensorDataset(ids, y)
    x = torch.randn(n, *shape, generator=generator)
    spare = x[DRAWN:]
    spare[0], spare[1] = float("nan"), float("inf")
    spare[2] *= 1e30
    spare[3], spare[4] = 1e-42, 0.0
    spare[5] *= 1e4
    spare[6] = x[0]  # duplicates
    spare[7] = -x[1]
    spare[8], y[DRAWN + 8] = x[2], (y[2] + 1) % CLASSES
    spare[9].view(-1)[0] = float("-inf")  # one coordinate of many
    spare[10] *= 1e8
    spare[11] = 3e38 * torch.sign(spare[11])
    return TensorDataset(x, y)
