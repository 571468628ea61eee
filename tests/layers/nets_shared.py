"""Models with layers that are called once for all examples, without a batch.

They have seven tokens, and the tests run batches of seven too: shapes alone do not tell
a table of positions from a batch.
"""

import torch
import torch.nn.functional as F
from nets_base import TOKENS, Net
from torch import nn

LENGTH, WIDTH, HEADS = 7, 6, 2


class BiasedAttention(nn.Module):
    """Adds a bias to its scores: by hand, in place, or inside torch's own attention."""

    def __init__(self, way):
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.way = way

    def forward(self, x, bias):
        parts = self.qkv(x).chunk(3, 2)
        q, k, v = (t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in parts)
        if self.way == "fused":
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            scores = q @ k.mT
            if self.way == "in-place":
                scores += bias
            else:
                scores = bias + scores
            mixed = scores.softmax(-1) @ v
        return x + self.proj(mixed.transpose(1, 2).flatten(2))


class RelativeBias(nn.Module):
    """Looked up once as ``[T, T, H]``, masked, and used by all layers."""

    def __init__(self, way):
        super().__init__()
        self.words = nn.Embedding(TOKENS, WIDTH)
        self.bias = nn.Embedding(2 * LENGTH, HEADS)
        self.layers = nn.ModuleList([BiasedAttention(way), BiasedAttention(way)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids):
        steps = torch.arange(ids.shape[1])
        bias = self.bias(steps[None, :] - steps[:, None] + LENGTH)
        bias = bias.permute(2, 0, 1).unsqueeze(0)[:, :, : len(steps)]
        later = torch.ones(1, 1, len(steps), len(steps), dtype=torch.bool).triu(1)
        bias = bias.masked_fill(later, -20.0)
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x, bias)
        return self.head(x.mean(1))


class PaddedBias(RelativeBias):
    """The bias meets the batch in the padding mask, before the scores."""

    def forward(self, ids):
        steps = torch.arange(ids.shape[1])
        bias = self.bias(steps[None, :] - steps[:, None] + LENGTH)
        padding = (ids == 1).to(bias.dtype)[:, None, None, :]
        bias = bias.permute(2, 0, 1) - 20 * padding
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x, bias)
        return self.head(x.mean(1))


class ComputedBias(nn.Module):
    """A small net of the distances gives the bias, as in the second Swin."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(1, 5), nn.ReLU(), nn.Linear(5, HEADS))
        steps = torch.arange(LENGTH)
        self.register_buffer("ids", (steps[None, :] - steps[:, None] + LENGTH - 1))
        self.register_buffer("table", torch.linspace(-1, 1, 2 * LENGTH - 1)[None, :])
        self.words = nn.Embedding(TOKENS, WIDTH)
        self.layer, self.head = BiasedAttention("by-hand"), nn.Linear(WIDTH, 3)

    def forward(self, ids):
        table = self.inner(self.table.unsqueeze(2)).view(-1, HEADS)
        bias = table[self.ids.view(-1)].view(LENGTH, LENGTH, -1).permute(2, 0, 1)
        x = self.layer(self.words(ids), 4 * bias.contiguous().sigmoid())
        return self.head(x.mean(1))


class Prefix(nn.Module):
    """Trained tokens in front of every example, through a small net."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(TOKENS, WIDTH)
        self.prefix = nn.Embedding(2, WIDTH)
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mix, self.head = nn.Linear(LENGTH + 2, 4), nn.Linear(4 * WIDTH, 3)

    def forward(self, ids):
        prefix = self.inner(self.norm(self.prefix(torch.arange(2)))).tanh()
        prefix = prefix.unsqueeze(0).expand(len(ids), -1, -1)
        x = torch.cat([prefix, self.words(ids)], 1)
        return self.head(self.mix(x.mT).tanh().flatten(1))


class Gpt(nn.Module):
    """Positions by ``arange``, dropout on the sum, the head tied to the words."""

    def __init__(self, dropout):
        super().__init__()
        self.words = nn.Embedding(TOKENS, WIDTH)
        self.positions = nn.Embedding(2 * LENGTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.norm, self.layer = nn.LayerNorm(WIDTH), BiasedAttention("by-hand")
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        x = self.words(ids) + self.positions(torch.arange(ids.shape[1]))
        later = torch.ones(ids.shape[1], ids.shape[1]).triu(1) * -20
        return self.head(self.layer(self.norm(self.dropout(x)), later.to(x.dtype)))


class Centre(nn.Module):
    """The mean of a table: no position is left when it meets the batch."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(TOKENS, WIDTH)
        self.table, self.head = nn.Embedding(9, 8), nn.Linear(WIDTH, 3)

    def forward(self, ids):
        centre = self.table(torch.arange(9))[:, :WIDTH].mean(0)
        return self.head((self.words(ids) * centre).tanh().mean(1))


def shared():
    def tokens(size, generator):
        return torch.randint(0, TOKENS, (size, LENGTH), generator=generator)

    return [
        Net("relative-bias", lambda: RelativeBias("by-hand"), tokens),
        Net("relative-bias-in-place", lambda: RelativeBias("in-place"), tokens),
        Net("relative-bias-fused", lambda: RelativeBias("fused"), tokens),
        Net("relative-bias-padded", lambda: PaddedBias("by-hand"), tokens),
        Net("computed-bias", ComputedBias, tokens),
        Net("prefix", Prefix, tokens),
        Net("gpt", lambda: Gpt(0.0), tokens),
        Net("gpt-dropout", lambda: Gpt(0.3), tokens, random=True),
        Net("centre", Centre, tokens),
    ]
