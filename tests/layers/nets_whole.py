"""Whole models with a structure of their own."""

import torch
from nets_base import TOKENS, Net
from nets_sequence import Attention
from torch import nn


class TokenModel(nn.Module):
    """Tokens that repeat, some of them padding; inputs by keyword."""

    def __init__(self, padding):
        super().__init__()
        self.table = nn.Embedding(TOKENS, 6, padding_idx=padding)
        self.block = Attention(6)
        self.head = nn.Linear(6, 3)

    def forward(self, ids, mask):
        x = self.block(self.table(ids))
        weights = mask / mask.sum(1, keepdim=True)
        return {"logits": self.head((x * weights.unsqueeze(2)).sum(1)), "ids": ids}


class TwoTowers(nn.Module):
    """Positional inputs of different kinds, one table called twice, nested outputs."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(TOKENS, 5)
        self.features = nn.Linear(4, 5)

    def forward(self, left, right, features):
        a, b = self.table(left).mean(1), self.table(right).mean(1)
        c = self.features(features)
        return [(a * c, {"sum": a + b}), (b * c).sum(1)]


class SmallTransformer(nn.Module):
    """Class token and position embedding as parameters of the model itself."""

    def __init__(self, shape):
        super().__init__()
        self.patches = nn.Conv2d(1, 6, 2, 2)
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.positions = nn.Parameter(torch.randn(shape))
        self.block = Attention(6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.patches(x).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.block(x))[:, 0])


class LanguageModel(nn.Module):
    """The head has the table's weight, and a bias of its own."""

    def __init__(self, padding=None, between=True, other=None):
        super().__init__()
        self.table = nn.Embedding(TOKENS, 6, padding_idx=padding)
        self.between = Attention(6) if between else nn.Tanh()
        self.other = nn.Embedding(TOKENS, 6, padding_idx=other)
        self.head = nn.Linear(6, TOKENS)
        self.head.weight = self.other.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids) + self.other(ids.roll(1, 1)).tanh()
        return self.head(self.between(x))


class Bags(nn.Module):
    def __init__(self, weighted, **options):
        super().__init__()
        self.table = nn.EmbeddingBag(TOKENS, 6, **options)
        self.head, self.weighted = nn.Linear(6, 3), weighted

    def forward(self, ids):
        if not self.weighted:
            return self.head(self.table(ids).tanh())
        weights = (1 + ids).to(self.head.weight.dtype).reciprocal()
        return self.head(self.table(ids, per_sample_weights=weights).tanh())


class Heads(nn.Module):
    """Nested inputs, and a dictionary of heads of which the loss takes all."""

    def __init__(self):
        super().__init__()
        self.table, self.body = nn.Embedding(TOKENS, 5), nn.Linear(4, 5)
        self.heads = nn.ModuleDict({"mean": nn.Linear(5, 2), "last": nn.Linear(5, 3)})
        self.value = nn.Linear(5, 1)

    def forward(self, inputs, scale):
        h = self.body(inputs["features"]) + self.table(inputs["ids"][0]).mean(1)
        h = h.tanh() * scale.unsqueeze(1)
        logits = {name: head(h) for name, head in self.heads.items()}
        return logits, self.value(h).squeeze(1)


def tagger():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(TOKENS, 6)
            self.lstm = nn.LSTM(
                6, 5, 2, batch_first=True, dropout=0.4, bidirectional=True
            )
            self.head = nn.Linear(10, 3)

        def forward(self, ids):
            return self.head(self.lstm(self.table(ids))[0])

    return Tagger()


def structured():
    def tokens(size, generator):
        ids = torch.randint(0, TOKENS, (size, 7), generator=generator)
        ids[:, 3] = ids[:, 0]  # every example repeats a token
        return ids

    def masked(size, generator):
        return {"ids": tokens(size, generator), "mask": torch.ones(size, 7)}

    def nested(size, generator):
        features = torch.rand(size, 4, generator=generator)
        ids = tokens(size, generator)
        scale = torch.rand(size, generator=generator)
        return {"inputs": {"features": features, "ids": [ids]}, "scale": scale}

    def towers(size, generator):
        features = torch.rand(size, 4, generator=generator)
        return tokens(size, generator), tokens(size, generator), features

    def image(size, generator):
        return torch.rand(size, 1, 4, 6, generator=generator)

    def vectors(size, generator):
        return torch.randn(size, 9, generator=generator)

    def dropout():
        layers = nn.Linear(9, 8), nn.Dropout(0.4), nn.GELU(), nn.Linear(8, 3)
        return nn.Sequential(*layers)

    return [
        Net("tokens", lambda: TokenModel(None), masked),
        Net("tokens-padding", lambda: TokenModel(2), masked),
        Net("language-model", LanguageModel, tokens),
        Net("language-model-padding", lambda: LanguageModel(2, True, 3), tokens),
        Net("language-model-short", lambda: LanguageModel(None, False), tokens),
        Net("tagger-dropout", tagger, tokens, random=True),
        Net("bag-mean", lambda: Bags(False, mode="mean", padding_idx=2), tokens),
        Net("bag-sum", lambda: Bags(False, mode="sum"), tokens),
        Net("bag-weighted", lambda: Bags(True, mode="sum", padding_idx=1), tokens),
        Net("heads", Heads, nested),
        Net("two-towers", TwoTowers, towers),
        Net("vit-1td", lambda: SmallTransformer((1, 7, 6)), image),
        Net("vit-td", lambda: SmallTransformer((7, 6)), image),
        Net(
            "vector", lambda: nn.Sequential(nn.Linear(9, 40), nn.Linear(40, 3)), vectors
        ),
        Net("dropout", dropout, vectors, random=True),
    ]
