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


def sequence_blocks(t, d):
    return {
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
        "conv-twice": lambda: Recurrent2d(same()),
        "image-group-norm": lambda: nn.GroupNorm(2, c),
        "image-group-norm-frozen": lambda: frozen(nn.GroupNorm(1, c), "bias"),
        "image-instance-norm": lambda: nn.InstanceNorm2d(c, affine=True),
        "image-layer-norm": lambda: nn.LayerNorm((c, side, side)),
        "image-scale": lambda: Scaled(c, 1, 1),
        "image-residual": lambda: Residual(nn.GroupNorm(2, c), nn.ReLU(), same()),
    }


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


def volume_blocks(c):
    return {
        "conv3d": lambda: nn.Conv3d(c, c, 3, padding=1, groups=2),
        "conv3d-strided": lambda: Downsampled(nn.Conv3d(c, c, 2, stride=2)),
        "volume-instance-norm": lambda: nn.InstanceNorm3d(c, affine=True),
    }


def signal_blocks(c):
    return {
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


def structured():
    def tokens(size, generator):
        ids = torch.randint(0, TOKENS, (size, 7), generator=generator)
        ids[:, 3] = ids[:, 0]  # every example repeats a token
        return ids

    def masked(size, generator):
        return {"ids": tokens(size, generator), "mask": torch.ones(size, 7)}

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
        chosen += [blocks[rng.choice(list(blocks))] for _ in range(rng.randrange(2))]
        rng.shuffle(chosen)
        return nn.Sequential(
            *(block() for block in chosen),
            Pooled(features, channels_last=family == "sequence"),
        )

    def inputs(size, generator):
        return torch.randn(size, *shape, generator=generator)

    return Net(f"{family}-{name}", make, inputs)


ALL = composed() + structured() + built_in()
