"""Ten architectures, small, built from code; each with inputs and what is expected."""

import torch
import torch.nn.functional as F
from torch import nn

from curvedp import models

VOCABULARY, WIDTH, TOKENS = 13, 8, 6


def tokens():
    return torch.zeros(2, TOKENS, dtype=torch.long)


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
    def __init__(self, bias):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.over_tokens = nn.Sequential(
            nn.Linear(TOKENS, 10), nn.GELU(), nn.Linear(10, TOKENS, bias=bias)
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


def mixer(bias=False):
    """MLP-Mixer on tokens.

    A bias of a token would be the same for all channels, and LayerNorm takes it away:
    its gradient is zero up to rounding.
    """
    blocks = [MixerBlock(bias), MixerBlock(bias), nn.LayerNorm(WIDTH)]
    model = nn.Sequential(
        nn.Linear(5, WIDTH), *blocks, Mean(), nn.Dropout(0.1), nn.Linear(WIDTH, 4)
    )
    return model, torch.zeros(2, TOKENS, 5)


def mixer_with_dead_bias():
    return mixer(bias=True)


# -- text ------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, causal=False):
        super().__init__()
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH)
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
        self.encoder, self.decoder = Attention(), Attention(causal=True)
        self.cross = Attention()
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH) for _ in range(4)])
        self.expand, self.contract = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, source, target):
        steps = torch.arange(source.shape[1])
        ids = steps[None, :] - steps[:, None] + TOKENS  # [T, T]
        bias = self.bias(ids).permute(2, 0, 1).unsqueeze(0)
        x = self.words(source)
        x = x + self.encoder(self.norms[0](x), bias=bias)
        y = self.words(target)
        y = y + self.decoder(self.norms[1](y))
        y = y + self.cross(self.norms[2](y), memory=x)
        return self.head(y + self.contract(F.relu(self.expand(self.norms[3](y)))))


def t5():
    """T5-shaped encoder-decoder with a relative position bias."""
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


# -- what cannot be followed -----------------------------------------------------------


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


TEN = [resnet, vit, bert, gpt2, t5, lstm, unet, mixer, functional, unused]
MORE = [
    bert_without_pooler,
    mixer_with_dead_bias,
    mixed,
    repairable,
    overwriting,
    centred,
    flat_batch_norm,
]
