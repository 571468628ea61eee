"""Random nets that cover every rule, with batches and a per-example loss for each.

A net is a stem, a few blocks that keep the shape, and a head. Net number i of a family
contains block number i, so that a family covers all of its blocks; the other blocks,
the sizes and the weights are random.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from curvedp.layers import Batch
from curvedp.layers.direct import float_tensors
from curvedp.models import StandardisedConv2d, build

TOKENS = 11


@dataclass(frozen=True)
class Net:
    """A model with what is needed to run it.

    Attributes:
        name: for people.
        make: a fresh model; weights from torch's global generator.
        inputs: ``(size, generator) -> inputs``.
        random: whether the forward pass draws random numbers.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], Any]
    random: bool = False

    def __str__(self):
        return self.name

    def batch(self, size, generator, dtype=torch.float32):
        """Inputs, and targets that spread the gradient norms over some decades."""

        def cast(x):
            return x.to(dtype) if x.is_floating_point() else x

        inputs = torch.utils._pytree.tree_map(cast, self.inputs(size, generator))
        exponents = 2.5 * torch.rand(size, generator=generator) - 1.5
        return Batch(inputs, (10**exponents).to(dtype))

    def synthesiser(self, dtype=torch.float32):
        return lambda size, generator: self.batch(size, generator, dtype)


def loss(output, targets):
    """Weighted squares of all outputs, an example on its own; smooth everywhere."""
    total = 0.0
    for t in float_tensors(output):
        t = t.flatten(1) if t.dim() > 1 else t.unsqueeze(1)
        pattern = torch.linspace(-1, 1, t.shape[1], dtype=t.dtype, device=t.device)
        total = total + ((t + pattern).square() * (1 + pattern / 2)).mean(1)
    return total * targets


# -- blocks on sequences [B, T, D] -----------------------------------------------------


def frozen(module, name):
    getattr(module, name).requires_grad_(False)
    return module


class Residual(nn.Module):
    def __init__(self, *inner):
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x):
        return x + self.inner(x)


class Transposed(nn.Module):
    """Features before positions, as convolutions and channel norms have them."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Wide(nn.Module):
    """Linear on [B, T, 2, D / 2]: more than one dimension of positions."""

    def __init__(self, d):
        super().__init__()
        self.linear = nn.Linear(d // 2, d // 2)

    def forward(self, x):
        return self.linear(x.unflatten(2, (2, -1))).flatten(2)


class Attention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.query, self.key = nn.Linear(d, d), nn.Linear(d, d, bias=False)
        self.value, self.proj = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        def heads(t):
            return t.unflatten(2, (2, -1)).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(
            heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        )
        return x + self.proj(mixed.transpose(1, 2).flatten(2))


class TorchAttention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.attention = nn.MultiheadAttention(d, 2, batch_first=True)

    def forward(self, x):
        return x + self.attention(x, x, x, need_weights=False)[0]


class Product(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.bilinear = nn.Bilinear(d, d, d)

    def forward(self, x):
        return x + self.bilinear(x, x.flip(1))


class Mixer(nn.Module):
    """Weights over positions and features at once, which no rule knows."""

    def __init__(self, t, d):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(t, t, d) / t)

    def forward(self, x):
        return torch.einsum("tsd,bsd->btd", self.mix, x).tanh()


class ClassToken(nn.Module):
    """A token in front, mixed into the others, and taken away again."""

    def __init__(self, d):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, d))

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return (x + x[:, :1].tanh() * x.mean(1, keepdim=True))[:, 1:]


class Added(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(shape) / 2)

    def forward(self, x):
        return x + self.shift


class Scaled(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.scale = nn.Parameter(1 + torch.rand(shape))

    def forward(self, x):
        return x * self.scale


class Positions(nn.Module):
    """A position embedding that is called without examples, and broadcast."""

    def __init__(self, t, d, leading):
        super().__init__()
        self.table = nn.Embedding(t, d)
        ids = torch.arange(t)
        self.register_buffer("ids", ids[None] if leading else ids)

    def forward(self, x):
        return x + self.table(self.ids)


class Recurrent(nn.Module):
    """One Linear, called several times, its inputs of different scale."""

    def __init__(self, d, calls=3):
        super().__init__()
        self.step = nn.Linear(d, d)
        self.calls = calls

    def forward(self, x):
        for _ in range(self.calls):
            x = self.step(x).tanh() + x / 2
        return x


class Adapted(nn.Module):
    """A low-rank adapter whose second factor starts at zero, on a frozen layer."""

    def __init__(self, d):
        super().__init__()
        self.base = nn.Linear(d, d).requires_grad_(False)
        self.down = nn.Linear(d, 2, bias=False)
        self.up = nn.Linear(2, d, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Unrolled(nn.Module):
    """A recurrent layer; ``begin`` makes its first states from the inputs."""

    def __init__(self, kind, d, begin=False, **options):
        super().__init__()
        options = {"batch_first": True, **options}
        self.layer = kind(d, d, **options)
        self.begin = begin
        self.back = nn.Linear(self.width(d), d, bias=False)

    def width(self, d):
        return (self.layer.proj_size or d) * (2 if self.layer.bidirectional else 1)

    def states(self, x):
        layer = self.layer
        count = layer.num_layers * (2 if layer.bidirectional else 1)
        x = x if layer.batch_first else x.transpose(0, 1)
        h = x.mean(1).expand(count, -1, -1)
        return (h, h * h) if isinstance(layer, nn.LSTM) else h

    def forward(self, x):
        first = self.layer.batch_first
        x = x if first else x.transpose(0, 1)
        states = (self.states(x),) if self.begin else ()
        y, last = self.layer(x, *states)
        y = self.back(y if first else y.transpose(0, 1))
        parts = last if isinstance(last, tuple) else (last,)
        return y + sum(part.mean((0, 2))[:, None, None] for part in parts)


class Cells(nn.Module):
    """A cell, called at every step."""

    def __init__(self, kind, d, **options):
        super().__init__()
        self.cell = kind(d, d, **options)

    def forward(self, x):
        state, outputs = None, []
        for step in x.unbind(1):
            state = self.cell(step, state) if outputs else self.cell(step)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs, 1)


def tied_recurrent(d):
    """Both layers of a stack with one recurrent weight; some others frozen."""
    block = Unrolled(nn.GRU, d, num_layers=2)
    block.layer.weight_hh_l1 = block.layer.weight_hh_l0
    block.layer.bias_ih_l0.requires_grad_(False)
    block.layer.weight_ih_l1.requires_grad_(False)
    return block


def recurrent_blocks(d):
    return {
        "rnn": lambda: Unrolled(nn.RNN, d),
        "rnn-relu": lambda: Unrolled(
            nn.RNN, d, nonlinearity="relu", num_layers=2, bias=False
        ),
        "rnn-bidirectional": lambda: Unrolled(nn.RNN, d, bidirectional=True),
        "lstm": lambda: Unrolled(nn.LSTM, d),
        "lstm-begin": lambda: Unrolled(nn.LSTM, d, begin=True, num_layers=2),
        "lstm-deep": lambda: Unrolled(nn.LSTM, d, num_layers=2, bidirectional=True),
        "lstm-projected": lambda: Unrolled(
            nn.LSTM, d, num_layers=2, proj_size=3, bidirectional=True
        ),
        "lstm-no-bias": lambda: Unrolled(nn.LSTM, d, bias=False),
        "lstm-time-first": lambda: Unrolled(nn.LSTM, d, batch_first=False),
        "gru": lambda: Unrolled(nn.GRU, d),
        "gru-begin": lambda: Unrolled(
            nn.GRU, d, begin=True, num_layers=2, bidirectional=True
        ),
        "gru-no-bias": lambda: Unrolled(nn.GRU, d, bias=False, batch_first=False),
        "gru-tied": lambda: tied_recurrent(d),
        "rnn-cell": lambda: Cells(nn.RNNCell, d, nonlinearity="relu"),
        "lstm-cell": lambda: Cells(nn.LSTMCell, d),
        "gru-cell": lambda: Cells(nn.GRUCell, d, bias=False),
    }


def tied(*modules, names=("weight",)):
    """Modules one after the other, each with the first one's parameters."""
    for other in modules[1:]:
        for name in names:
            setattr(other, name, getattr(modules[0], name))
    return nn.Sequential(*(m for one in modules for m in (one, nn.Tanh())))


class SharedModule(nn.Module):
    """One module under two names, called under both."""

    def __init__(self, d):
        super().__init__()
        self.first = nn.Linear(d, d)
        self.second = nn.Sequential(self.first, nn.Tanh())

    def forward(self, x):
        return self.second(self.first(x))


class Doubled(nn.Module):
    """A weight that no rule knows the use of, tied to that of a Linear."""

    def __init__(self, linear):
        super().__init__()
        self.linear, self.weight = linear, linear.weight

    def forward(self, x):
        return self.linear(x).tanh() @ self.weight.square()


def tied_rnn_linear(d):
    block = Unrolled(nn.RNN, d)
    block.back.weight = block.layer.weight_hh_l0
    return block


class Uncalled(nn.Module):
    """A table that only lends its weight, as some language models have it."""

    def __init__(self, d):
        super().__init__()
        self.shared = nn.Linear(d, d, bias=False)
        self.used = nn.Linear(d, d, bias=False)
        self.used.weight = self.shared.weight

    def forward(self, x):
        return self.used(x)


def tied_blocks(t, d):
    def linear(**options):
        return nn.Linear(d, d, **options)

    return {
        "tied-linear": lambda: tied(linear(), linear(), linear(bias=False)),
        "tied-both": lambda: tied(linear(), linear(), names=("weight", "bias")),
        "tied-norm": lambda: tied(nn.LayerNorm(d), nn.LayerNorm(d)),
        "tied-norms": lambda: tied(nn.LayerNorm(d), nn.RMSNorm(d)),
        "tied-frozen": lambda: tied(frozen(linear(), "weight"), linear()),
        "tied-mixer": lambda: tied(Mixer(t, d), Mixer(t, d), names=("mix",)),
        "tied-module": lambda: SharedModule(d),
        "tied-doubled": lambda: Doubled(linear()),
        "tied-rnn": lambda: tied_rnn_linear(d),
        "tied-uncalled": lambda: Uncalled(d),
        "tied-conv1d": lambda: Transposed(
            tied(
                nn.Conv1d(d, d, 3, padding=1),
                nn.Conv1d(d, d, 3, padding=2, dilation=2, padding_mode="circular"),
            )
        ),
    }


def sequence_blocks(t, d):
    return {
        **recurrent_blocks(d),
        **tied_blocks(t, d),
        "linear": lambda: nn.Linear(d, d),
        "no-bias": lambda: nn.Linear(d, d, bias=False),
        "frozen-weight": lambda: frozen(nn.Linear(d, d), "weight"),
        "frozen-bias": lambda: frozen(nn.Linear(d, d), "bias"),
        "wide": lambda: Wide(d),
        "layer-norm": lambda: nn.LayerNorm(d),
        "layer-norm-2d": lambda: nn.LayerNorm((t, d)),
        "layer-norm-no-bias": lambda: nn.LayerNorm(d, bias=False),
        "layer-norm-frozen": lambda: frozen(nn.LayerNorm(d), "weight"),
        "rms-norm": lambda: nn.RMSNorm(d),
        "rms-norm-2d": lambda: nn.RMSNorm((t, d), eps=1e-3),
        "group-norm": lambda: Transposed(nn.GroupNorm(2, d)),
        "instance-norm": lambda: Transposed(nn.InstanceNorm1d(d, affine=True)),
        "conv1d": lambda: Transposed(nn.Conv1d(d, d, 3, padding=1)),
        "residual": lambda: Residual(
            nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)
        ),
        "in-place": lambda: nn.Sequential(nn.Linear(d, d), nn.ReLU(inplace=True)),
        "attention": lambda: Attention(d),
        "torch-attention": lambda: TorchAttention(d),
        "bilinear": lambda: Product(d),
        "einsum": lambda: Mixer(t, d),
        "weight-norm": lambda: weight_norm(nn.Linear(d, d)),
        "class-token": lambda: ClassToken(d),
        "added-1td": lambda: Added(1, t, d),
        "added-td": lambda: Added(t, d),
        "added-d": lambda: Added(d),
        "added-1d": lambda: Added(1, d),
        "added-scalar": Added,
        "scaled-d": lambda: Scaled(d),
        "positions-t": lambda: Positions(t, d, leading=False),
        "positions-1t": lambda: Positions(t, d, leading=True),
        "called-thrice": lambda: Recurrent(d),
        "adapter": lambda: Adapted(d),
    }


# -- blocks on images [B, C, H, W] -----------------------------------------------------


class Downsampled(nn.Module):
    """A strided convolution, brought back to the size of its input."""

    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x):
        return F.interpolate(self.conv(x).tanh(), size=x.shape[2:])


def image_blocks(c, side):
    def same(**options):
        return nn.Conv2d(c, c, 3, padding=1, **options)

    return {
        "conv": same,
        "conv-no-bias": lambda: same(bias=False),
        "conv-frozen-weight": lambda: frozen(same(), "weight"),
        "conv-frozen-bias": lambda: frozen(same(groups=2), "bias"),
        "conv-same-even": lambda: nn.Conv2d(c, c, (2, 4), padding="same"),
        "conv-reflect": lambda: same(padding_mode="reflect"),
        "conv-circular": lambda: same(padding_mode="circular"),
        "conv-replicate": lambda: same(padding_mode="replicate"),
        "conv-dilated": lambda: nn.Conv2d(c, c, 3, padding=2, dilation=2),
        "conv-groups": lambda: same(groups=2),
        "conv-depthwise": lambda: same(groups=c),
        "conv-depthwise-2": lambda: nn.Sequential(
            nn.Conv2d(c, 2 * c, 3, padding=1, groups=c), nn.Conv2d(2 * c, c, 1)
        ),
        "conv-strided": lambda: Downsampled(nn.Conv2d(c, c, 3, stride=(2, 3))),
        "conv-skipping": lambda: Downsampled(nn.Conv2d(c, c, 1, stride=3)),
        "conv-all": lambda: Downsampled(
            nn.Conv2d(c, c, (3, 2), (2, 1), (1, 2), (1, 2), 2, padding_mode="circular")
        ),
        "conv-standardised": lambda: StandardisedConv2d(c, c, 3, padding=1),
        "conv-weight-norm": lambda: weight_norm(same()),
        "conv-tied": lambda: tied_convs(c),
        "conv-twice": lambda: Recurrent2d(same()),
        "conv-transposed": lambda: Resized(nn.ConvTranspose2d(c, c, 3)),
        "conv-transposed-all": lambda: Resized(
            nn.ConvTranspose2d(
                c, c, (3, 2), (2, 1), (1, 2), (1, 2), groups=2, dilation=(1, 3)
            )
        ),
        "conv-transposed-size": lambda: Resized(
            nn.ConvTranspose2d(c, c, 2, stride=2, bias=False), output_size=(13, 12)
        ),
        "conv-transposed-frozen": lambda: Resized(
            frozen(nn.ConvTranspose2d(c, c, 3, groups=c), "weight")
        ),
        "image-group-norm": lambda: nn.GroupNorm(2, c),
        "image-group-norm-frozen": lambda: frozen(nn.GroupNorm(1, c), "bias"),
        "image-instance-norm": lambda: nn.InstanceNorm2d(c, affine=True),
        "image-layer-norm": lambda: nn.LayerNorm((c, side, side)),
        "image-scale": lambda: Scaled(c, 1, 1),
        "image-residual": lambda: Residual(nn.GroupNorm(2, c), nn.ReLU(), same()),
    }


def tied_convs(c):
    """One weight, with another stride and with other groups."""
    first = nn.Conv2d(c, 2 * c, 3, padding=1, groups=2)
    second = nn.Conv2d(c // 2, 2 * c, 3, padding=1)
    strided = nn.Conv2d(c, 2 * c, 3, stride=2, groups=2, bias=False)
    second.weight = strided.weight = first.weight
    return TiedConvs(first, second, strided)


class TiedConvs(nn.Module):
    def __init__(self, *convs):
        super().__init__()
        self.convs = nn.ModuleList(convs)

    def forward(self, x):
        c = x.shape[1]
        first, second, strided = self.convs
        y = first(x).tanh() + second(x[:, : c // 2]).tanh()
        return y[:, :c] + y[:, c:] + strided(x).mean((2, 3), keepdim=True)[:, :c]


class Recurrent2d(nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x):
        return self.conv(self.conv(x).tanh())


class Pooled(nn.Module):
    """Mean over all positions, then a Linear: the head of every net here."""

    def __init__(self, features, channels_last):
        super().__init__()
        self.linear = nn.Linear(features, 3)
        self.channels_last = channels_last

    def forward(self, x):
        x = x.tanh()
        return self.linear(x.mean(1) if self.channels_last else x.flatten(2).mean(2))


class Resized(nn.Module):
    """A layer that changes the size, its output brought back to that of its input."""

    def __init__(self, layer, **options):
        super().__init__()
        self.layer, self.options = layer, options

    def forward(self, x):
        y = self.layer(x, **self.options).tanh()
        for i, size in enumerate(x.shape[2:]):
            y = torch.cat([y, y.flip(2 + i)], 2 + i).narrow(2 + i, 0, size)
        return y


def volume_blocks(c):
    return {
        "conv3d-transposed": lambda: Resized(
            nn.ConvTranspose3d(c, c, (2, 3, 2), stride=2, padding=1, output_padding=1)
        ),
        "conv3d": lambda: nn.Conv3d(c, c, 3, padding=1, groups=2),
        "conv3d-strided": lambda: Downsampled(nn.Conv3d(c, c, 2, stride=2)),
        "volume-instance-norm": lambda: nn.InstanceNorm3d(c, affine=True),
    }


def signal_tied(c):
    """A convolution and its adjoint, as in a tied autoencoder."""
    down = nn.Conv1d(c, c, 3, stride=2)
    up = nn.ConvTranspose1d(c, c, 3, stride=2, output_padding=1)
    up.weight = down.weight
    return nn.Sequential(down, nn.Tanh(), up)


def signal_blocks(c):
    return {
        "signal-transposed": lambda: Resized(
            nn.ConvTranspose1d(c, c, 4, stride=3, padding=2, output_padding=1)
        ),
        "signal-transposed-tied": lambda: signal_tied(c),
        "signal-conv": lambda: nn.Conv1d(c, c, 5, padding="same", dilation=2),
        "signal-strided": lambda: Downsampled(nn.Conv1d(c, c, 4, 3, bias=False)),
        "signal-depthwise": lambda: nn.Conv1d(c, c, 3, padding=1, groups=c),
    }


# -- whole models with a structure of their own ----------------------------------------


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


def built_in():
    """The models that the package ships, small.

    The wide and the deep residual net are left out: they are made of the blocks above
    and take longer than all the others together.
    """
    settings = {
        "cnn": {"width": 4, "dense": 8},
        "mlp": {"width": 8},
        "small-cnn": {"dense": 8},
        "vit": {"dim": 12, "depth": 1, "heads": 2, "patch": 4},
    }
    shapes = {"cnn": 8, "mlp": 4, "small-cnn": 8, "vit": 8, "logreg": 4}

    def net(name, side):
        def inputs(size, generator):
            return torch.rand(size, 1, side, side, generator=generator)

        def make():
            return build(name, (1, side, side), 3, **settings.get(name, {}))

        return Net(f"built-in-{name}", make, inputs)

    return [net(name, side) for name, side in shapes.items()]


def composed():
    """Random compositions: as many as there are blocks, each block in at least one."""
    t, d, c, side = 5, 6, 4, 6
    shapes = {
        "sequence": ((t, d), sequence_blocks(t, d), d),
        "image": ((c, side, side), image_blocks(c, side), c),
        "volume": ((c, 4, 4, 4), volume_blocks(c), c),
        "signal": ((c, 12), signal_blocks(c), c),
    }
    nets = []
    for family, (shape, blocks, features) in shapes.items():
        for i, name in enumerate(blocks):
            nets.append(_compose(family, shape, blocks, features, name, seed=i))
    return nets


def _compose(family, shape, blocks, features, name, seed):
    def make():
        rng = random.Random(seed)
        chosen = [blocks[name]]
        # a norm undoes what stands before it: that gradient would be rounding alone
        others = [other for other in blocks if "norm" not in other + name]
        if others and rng.randrange(2):
            chosen.append(blocks[rng.choice(others)])
        rng.shuffle(chosen)
        return nn.Sequential(
            *(block() for block in chosen),
            Pooled(features, channels_last=family == "sequence"),
        )

    def inputs(size, generator):
        return torch.randn(size, *shape, generator=generator)

    return Net(f"{family}-{name}", make, inputs)


ALL = composed() + structured() + built_in()
