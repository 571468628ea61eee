"""Nets that private steps are timed on: which, with which batch, on which device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from curvedp import models
from curvedp.models.vit import _Block

__all__ = ["CELLS", "Net", "TokenTransformer"]

COLOUR = (3, 32, 32)


@dataclass(frozen=True)
class Net:
    """A model with the shape of its inputs and its batch size.

    Attributes:
        name: as results call it.
        shape: of one input.
        batch: rows of a step.
        built_in: name in ``curvedp.models``; None for a net of tokens here.
        options: of the built-in model, or of the transformer.
        vocabulary: of a net of tokens.
    """

    name: str
    shape: tuple[int, ...]
    batch: int
    built_in: str | None
    options: dict[str, Any] = field(default_factory=dict)
    vocabulary: int = 100

    def data(self, device):
        random = torch.Generator().manual_seed(1)
        if self.built_in is None:
            x = torch.randint(
                0, self.vocabulary, (self.batch, *self.shape), generator=random
            )
        else:
            x = torch.randn(self.batch, *self.shape, generator=random)
        y = torch.randint(0, 10, (self.batch,), generator=random)
        return x.to(device), y.to(device)

    def model(self, *, for_opacus=False):
        torch.manual_seed(0)
        if self.built_in is None and self.options:
            return TokenTransformer(self.vocabulary, self.shape[0], **self.options)
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


class TokenTransformer(nn.Module):
    """An encoder of the shape of BERT: tokens, positions, blocks, a head on the first.

    Blocks normalise before they act, as those of the vision transformer here do.
    """

    def __init__(self, vocabulary, length, *, dim, depth, heads):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Embedding(length, dim)
        self.blocks = nn.Sequential(
            *(_Block(dim, heads, 4 * dim) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 10)

    def forward(self, ids):
        # a row of places for each example: Opacus takes no lookup without a batch
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        hidden = self.blocks(self.tokens(ids) + self.positions(places))
        return self.head(self.norm(hidden[:, 0]))


_BERT = {"dim": 768, "depth": 12, "heads": 12}
_VIT_B = {"patch": 16, "dim": 768, "depth": 12, "heads": 12}
_VIT_6 = {"dim": 384, "heads": 6}
_PHOTO = (3, 224, 224)


def _by_name(*nets):
    return {net.name: net for net in nets}


#: A CPU takes small batches: its times are proportional to them, and it has few cores.
CELLS = {
    "cpu": _by_name(
        Net("dpkfc-mnist", (1, 28, 28), 256, "dpkfc-mnist"),
        Net("lstm", (32,), 64, None),
        Net("vit", COLOUR, 32, "vit"),
        Net("wrn-16-4", COLOUR, 16, "wrn-16-4"),
        Net("resnet-20", COLOUR, 64, "resnet-20"),
        Net("vit-6x384", COLOUR, 16, "vit", _VIT_6),
        Net("vit-b", _PHOTO, 2, "vit", _VIT_B),
        Net("bert-base", (128,), 2, None, _BERT, 30522),
    ),
    "cuda": _by_name(
        Net("dpkfc-mnist", (1, 28, 28), 256, "dpkfc-mnist"),
        Net("wrn-16-4", COLOUR, 1024, "wrn-16-4"),
        Net("vit-6x384", COLOUR, 1024, "vit", _VIT_6),
        Net("resnet-20", COLOUR, 1024, "resnet-20"),
        Net("vit-b", _PHOTO, 64, "vit", _VIT_B),
        Net("bert-base", (128,), 64, None, _BERT, 30522),
        Net("lstm", (32,), 1024, None),
    ),
}
