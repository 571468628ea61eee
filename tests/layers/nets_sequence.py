"""Blocks on sequences ``[B, T, D]``."""

import torch
import torch.nn.functional as F
from nets_base import Residual, frozen
from nets_recurrent import recurrent_blocks
from nets_tied import Mixer, Transposed, tied_blocks
from torch import nn
from torch.nn.utils.parametrizations import weight_norm


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
