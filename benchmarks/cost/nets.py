"""Nets that private steps are timed on: which, with which batch, on which device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from curvedp import models

__all__ = ["CELLS", "Net"]

COLOUR = (3, 32, 32)


@dataclass(frozen=True)
class Net:
    """A model with the shape of its inputs and its batch size.

    Attributes:
        name: as results call it.
        shape: of one input.
        batch: rows of a step.
        built_in: name in ``curvedp.models``; None for the LSTM here.
        options: of the built-in model.
    """

    name: str
    shape: tuple[int, ...]
    batch: int
    built_in: str | None
    options: dict[str, Any] = field(default_factory=dict)

    def data(self, device):
        random = torch.Generator().manual_seed(1)
        if self.built_in is None:
            x = torch.randint(0, 100, (self.batch, *self.shape), generator=random)
        else:
            x = torch.randn(self.batch, *self.shape, generator=random)
        y = torch.randint(0, 10, (self.batch,), generator=random)
        return x.to(device), y.to(device)

    def model(self, *, for_opacus=False):
        torch.manual_seed(0)
        if self.built_in is None:
            return Classifier(for_opacus)
        return models.build(self.built_in, self.shape, 10, **self.options)


class Classifier(nn.Module):
    """Tokens, an LSTM, a head on its last output."""

    def __init__(self, for_opacus):
        super().__init__()
        if for_opacus:
            from opacus.layers import DPLSTM as LSTM
        else:
            from torch.nn import LSTM
        self.table = nn.Embedding(100, 32)
        self.lstm = LSTM(32, 64, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, ids):
        return self.head(self.lstm(self.table(ids))[0][:, -1])


def _by_name(*nets):
    return {net.name: net for net in nets}


#: A CPU takes small batches: its times are proportional to them, and it has few cores.
CELLS = {
    "cpu": _by_name(
        Net("dpkfc-mnist", (1, 28, 28), 256, "dpkfc-mnist"),
        Net("lstm", (32,), 64, None),
        Net("vit", COLOUR, 32, "vit"),
        Net("wrn-16-4", COLOUR, 16, "wrn-16-4"),
    ),
    "cuda": _by_name(
        Net("dpkfc-mnist", (1, 28, 28), 256, "dpkfc-mnist"),
        Net("wrn-16-4", COLOUR, 1024, "wrn-16-4"),
        Net("vit-6x384", COLOUR, 1024, "vit", {"dim": 384, "heads": 6}),
        Net("resnet-20", COLOUR, 1024, "resnet-20"),
    ),
}
