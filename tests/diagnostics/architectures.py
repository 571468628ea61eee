"""Ten architectures, small, built from code; each with inputs and what is expected."""

import torch
import torch.nn.functional as F
from torch import nn

from curvedp import models
from tests.diagnostics.problematic import (
    centred,
    flat_batch_norm,
    functional,
    mixed,
    overwriting,
    repairable,
    unused,
)
from tests.diagnostics.shapes import TOKENS, VOCABULARY, WIDTH, tokens

# -- images ----------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.short = nn.Sequential()
        if stride > 1:
            self.short = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False),
                nn.BatchNorm2d(outputs),
            )

    def forward(self, x):
        h = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(h + self.short(x))


def resnet():
    """ResNet with BatchNorm."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 1, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        Residual(8, 8, 1),
        Residual(8, 16, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )
    return model, torch.zeros(2, 3, 8, 8)


def vit():
    """The built-in vision transformer."""
    settings = {"patch": 4, "dim": 12, "depth": 2, "heads": 3}
    return models.build("vit", (3, 8, 8), 4, **settings), torch.zeros(2, 3, 8, 8)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1 = nn.Conv2d(1, 4, 3, padding=1)
        self.down2 = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        skip = F.relu(self.down1(x))
        h = self.up(F.relu(self.norm(self.down2(skip))))
        return self.out(torch.cat([h, skip], 1))


def unet():
    """U-Net with a transposed convolution."""
    return UNet(), torch.zeros(2, 1, 8, 8)


class MixerBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.over_tokens = nn.Sequential(
            nn.Linear(TOKENS, 10), nn.GELU(), nn.Linear(10, TOKENS)
        )
        self.over_channels = nn.Sequential(
            nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)
        )

    def forward(self, x):
        x = x + self.over_tokens(self.norm1(x).mT).mT
        return x + self.over_channels(self.norm2(x))


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


def mixer():
    """MLP-Mixer on tokens, with its standard biases.

    A bias of a token is the same for all channels, and LayerNorm takes it away: its
    gradient is zero up to rounding.
    """
    blocks = [MixerBlock(), MixerBlock(), nn.LayerNorm(WIDTH)]
    model = nn.Sequential(
        nn.Linear(5, WIDTH), *blocks, Mean(), nn.Dropout(0.1), nn.Linear(WIDTH, 4)
    )
    return model, torch.zeros(2, TOKENS, 5)


def dead_convolution():
    """A mean over what a norm has centred: whatever stands before it learns nothing."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.InstanceNorm2d(4, affine=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    )
    return model, torch.zeros(2, 3, 8, 8)


# -- text ------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, causal=False, bias=True):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias)
        self.key = nn.Linear(WIDTH, WIDTH, bias)
        self.value = nn.Linear(WIDTH, WIDTH, bias)
        self.proj = nn.Linear(WIDTH, WIDTH, bias)
        self.causal = causal

    def forward(self, x, memory=None, bias=None):
        memory = x if memory is None else memory

        def heads(t):
            return t.unflatten(2, (2, -1)).transpose(1, 2)

        q, k, v = heads(self.query(x)), heads(self.key(memory)), self.value(memory)
        scores = q @ k.mT / 2
        if bias is not None:
            scores = scores + bias
        if self.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -1e9)
        mixed = scores.softmax(-1) @ heads(v)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class BertLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.expand, self.contract = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        x = self.norm1(x + self.dropout(self.attention(x)))
        return self.norm2(x + self.dropout(self.contract(F.gelu(self.expand(x)))))


class Bert(nn.Module):
    def __init__(self, use_pooler):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.positions = nn.Embedding(TOKENS, WIDTH)
        self.register_buffer("position_ids", torch.arange(TOKENS).unsqueeze(0))
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList([BertLayer(), BertLayer()])
        self.pooler = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4)
        self.use_pooler = use_pooler

    def forward(self, ids):
        positions = self.positions(self.position_ids[:, : ids.shape[1]])
        x = self.norm(self.words(ids) + positions)
        for layer in self.layers:
            x = layer(x)
        first = x[:, 0]
        return self.head(torch.tanh(self.pooler(first)) if self.use_pooler else first)


def bert(use_pooler=True):
    """BERT-shaped encoder with position ids."""
    return Bert(use_pooler), tokens()


def bert_without_pooler():
    return bert(use_pooler=False)


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.wpe = nn.Embedding(TOKENS, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(causal=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        x = x + self.attention(self.norm1(x))
        return self.head(x + self.mlp(self.norm2(x)))


def gpt2():
    """GPT-2-shaped, its head tied to its embedding."""
    return Gpt(), tokens()


class T5(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.bias = nn.Embedding(2 * TOKENS, 2)
        self.encoder = nn.ModuleList([Attention(bias=False), Attention(bias=False)])
        self.decoder, self.cross = Attention(True, bias=False), Attention(bias=False)
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH) for _ in range(5)])
        self.expand = nn.Linear(WIDTH, 16, bias=False)
        self.contract = nn.Linear(16, WIDTH, bias=False)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, source, target):
        steps = torch.arange(source.shape[1])
        ids = steps[None, :] - steps[:, None] + TOKENS  # [T, T]
        bias = self.bias(ids).permute(2, 0, 1).unsqueeze(0)
        x = self.dropout(self.words(source))
        for layer, norm in zip(self.encoder, self.norms, strict=False):
            x = x + self.dropout(layer(norm(x), bias=bias))
        y = self.words(target)
        y = y + self.decoder(self.norms[2](y))
        y = y + self.cross(self.norms[3](y), memory=x)
        y = y + self.contract(F.relu(self.expand(self.norms[4](y))))
        return self.head(y)


def t5():
    """T5-shaped encoder-decoder; its layers share a relative position bias."""
    return T5(), {"source": tokens(), "target": tokens()}


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, 5, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 3)

    def forward(self, ids):
        return self.head(self.lstm(self.words(ids))[0])


def lstm():
    """LSTM tagger."""
    return Tagger(), tokens()


TEN = [resnet, vit, bert, gpt2, t5, lstm, unet, mixer, functional, unused]
MORE = [
    bert_without_pooler,
    dead_convolution,
    mixed,
    repairable,
    overwriting,
    centred,
    flat_batch_norm,
]
