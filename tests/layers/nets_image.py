"""Blocks on images ``[B, C, H, W]``, volumes and signals."""

import torch
import torch.nn.functional as F
from nets_base import Residual, frozen
from nets_sequence import Scaled
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from curvedp.models import StandardisedConv2d


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
