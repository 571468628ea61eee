"""Residual nets with GroupNorm, and optionally with standardised weights."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from curvedp.models.basic import group_norm, image_shape

__all__ = ["StandardisedConv2d", "resnet_20", "wrn_16_4"]

_STANDARDISE_EPSILON = 1e-10


class StandardisedConv2d(nn.Conv2d):
    """A convolution whose kernel has mean 0 and variance 1 / fan-in for each output.

    With ``w`` an output channel's kernel of n entries, the convolution uses
    ``(w - mean(w)) / sqrt(n var(w) + epsilon)``. The parameter is the raw kernel, so
    its gradient passes through the standardisation, and is *not* the outer product of
    inputs and error signals that a plain convolution has.

    Reference: Qiao et al. 2019, "Micro-batch training with batch-channel normalization
    and weight standardization"; with the fan-in as in Brock et al. 2021.
    """

    def standardised_weight(self) -> Tensor:
        """The kernel that the convolution uses, ``[out, in / groups, kh, kw]``."""
        rows = self.weight.flatten(1)
        centred = rows - rows.mean(1, keepdim=True)
        # n var = sum of squares; epsilon keeps the root's derivative finite at zero.
        norm = (centred.square().sum(1, keepdim=True) + _STANDARDISE_EPSILON).sqrt()
        return (centred / norm).view_as(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        """Convolve with the standardised kernel."""
        output: Tensor = self._conv_forward(
            input, self.standardised_weight(), self.bias
        )
        return output


def _conv(
    inputs: int, outputs: int, kernel: int, stride: int, standardise: bool
) -> nn.Conv2d:
    # No bias: a norm, whose shift does the same, follows every convolution but those
    # before an addition, whose sum meets a norm later.
    kind = StandardisedConv2d if standardise else nn.Conv2d
    conv = kind(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    return conv


class _PreActivationBlock(nn.Module):
    """Norm and ReLU before each convolution (He et al. 2016b), as in wide ResNets."""

    def __init__(
        self, inputs: int, outputs: int, stride: int, groups: int, standardise: bool
    ) -> None:
        super().__init__()
        self.norm1 = group_norm(inputs, groups)
        self.conv1 = _conv(inputs, outputs, 3, stride, standardise)
        self.norm2 = group_norm(outputs, groups)
        self.conv2 = _conv(outputs, outputs, 3, 1, standardise)
        self.shortcut: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.shortcut = _conv(inputs, outputs, 1, stride, standardise)

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(x))
        kept = x if self.shortcut is None else self.shortcut(active)
        branch: Tensor = self.conv2(F.relu(self.norm2(self.conv1(active))))
        return kept + branch


class _PostActivationBlock(nn.Module):
    """Norm after each convolution, ReLU after the sum (He et al. 2016a)."""

    def __init__(
        self, inputs: int, outputs: int, stride: int, groups: int, standardise: bool
    ) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, outputs, 3, stride, standardise)
        self.norm1 = group_norm(outputs, groups)
        self.conv2 = _conv(outputs, outputs, 3, 1, standardise)
        self.norm2 = group_norm(outputs, groups)
        self.shortcut: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                _conv(inputs, outputs, 1, stride, standardise),
                group_norm(outputs, groups),
            )

    def forward(self, x: Tensor) -> Tensor:
        kept = x if self.shortcut is None else self.shortcut(x)
        branch = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(kept + branch)


def _stages(
    block: type[_PreActivationBlock] | type[_PostActivationBlock],
    widths: tuple[int, int, int],
    blocks_per_stage: int,
    groups: int,
    standardise: bool,
) -> nn.Sequential:
    blocks: list[nn.Module] = []
    channels = 16
    for stage, width in enumerate(widths):
        for place in range(blocks_per_stage):
            stride = 2 if stage > 0 and place == 0 else 1
            blocks.append(block(channels, width, stride, groups, standardise))
            channels = width
    return nn.Sequential(*blocks)


def wrn_16_4(
    input_shape: tuple[int, ...],
    num_outputs: int,
    *,
    groups: int = 16,
    weight_standardisation: bool = False,
) -> nn.Module:
    """Wide ResNet 16-4 (Zagoruyko and Komodakis 2016) with GroupNorm.

    2 748 890 parameters for 3 input channels and 10 classes. With 16 groups and
    standardised weights it is the net of De et al. 2022.

    Args:
        input_shape: ``[channels, height, width]``, at least 8x8.
        num_outputs: Outputs of the last layer.
        groups: Most groups of a norm; the largest divisor of its channels is taken.
        weight_standardisation: Whether convolutions standardise their kernels.
    """
    channels, _, _ = image_shape("wrn-16-4", input_shape, 8)
    return nn.Sequential(
        _conv(channels, 16, 3, 1, weight_standardisation),
        _stages(_PreActivationBlock, (64, 128, 256), 2, groups, weight_standardisation),
        group_norm(256, groups),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(256, num_outputs),
    )


def resnet_20(
    input_shape: tuple[int, ...],
    num_outputs: int,
    *,
    groups: int = 16,
    weight_standardisation: bool = False,
) -> nn.Module:
    """ResNet-20 for small images (He et al. 2016) with GroupNorm.

    272 474 parameters for 3 input channels and 10 classes; shortcuts that change the
    shape are 1x1 convolutions. The first stage has 16 channels, so 16 groups make its
    norms per-channel.

    Args:
        input_shape: ``[channels, height, width]``, at least 8x8.
        num_outputs: Outputs of the last layer.
        groups: Most groups of a norm; the largest divisor of its channels is taken.
        weight_standardisation: Whether convolutions standardise their kernels.
    """
    channels, _, _ = image_shape("resnet-20", input_shape, 8)
    return nn.Sequential(
        _conv(channels, 16, 3, 1, weight_standardisation),
        group_norm(16, groups),
        nn.ReLU(),
        _stages(_PostActivationBlock, (16, 32, 64), 3, groups, weight_standardisation),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, num_outputs),
    )
