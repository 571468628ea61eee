"""Small models: linear, fully connected, and plain convolutional nets.

None of the built-in models uses BatchNorm (it mixes examples), an in-place operation,
a module twice, or a weight in two places: per-example gradients stay well defined.
"""

from __future__ import annotations

import math

from torch import nn

from curvedp.errors import ConfigurationError

__all__ = ["cnn", "dpkfc_mnist", "group_norm", "logreg", "mlp", "small_cnn"]

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "elu": nn.ELU,
}


def make_activation(name: str) -> nn.Module:
    """A fresh activation module, so that none is called twice.

    Raises:
        ConfigurationError: If the name is unknown.
    """
    if name not in _ACTIVATIONS:
        raise ConfigurationError(
            f"unknown activation {name!r}",
            f"choose one of: {', '.join(sorted(_ACTIVATIONS))}",
        )
    return _ACTIVATIONS[name]()


def image_shape(
    model: str, input_shape: tuple[int, ...], smallest_side: int
) -> tuple[int, int, int]:
    """Channels, height and width, if the shape is an image's.

    Raises:
        ConfigurationError: If it is not, or the image is too small for the model.
    """
    if len(input_shape) != 3:
        raise ConfigurationError(
            f"the model {model!r} takes images, and an input has shape {input_shape}",
            "inputs are [channels, height, width]; for other data use mlp or logreg",
        )
    channels, height, width = input_shape
    if min(height, width) < smallest_side:
        raise ConfigurationError(
            f"the model {model!r} needs images of {smallest_side}x{smallest_side} or "
            f"more, and an input has shape {input_shape}",
            "use a smaller model: cnn, mlp or logreg",
        )
    return channels, height, width


def group_norm(channels: int, most_groups: int) -> nn.GroupNorm:
    """GroupNorm with the largest number of groups that divides the channels.

    Raises:
        ConfigurationError: If ``most_groups`` is below 1.
    """
    if most_groups < 1:
        raise ConfigurationError(f"groups is {most_groups}", "use 1 or more")
    groups = max(n for n in range(1, most_groups + 1) if channels % n == 0)
    return nn.GroupNorm(groups, channels)


def logreg(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """Logistic (or linear) regression on the flattened input."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), num_outputs))


def mlp(
    input_shape: tuple[int, ...],
    num_outputs: int,
    *,
    width: int = 128,
    depth: int = 2,
    activation: str = "tanh",
) -> nn.Module:
    """A fully connected net with ``depth`` hidden layers of ``width`` units."""
    _positive("width", width)
    _positive("depth", depth)
    layers: list[nn.Module] = [nn.Flatten()]
    features = math.prod(input_shape)
    for _ in range(depth):
        layers += [nn.Linear(features, width), make_activation(activation)]
        features = width
    return nn.Sequential(*layers, nn.Linear(features, num_outputs))


def cnn(
    input_shape: tuple[int, ...],
    num_outputs: int,
    *,
    width: int = 16,
    dense: int = 32,
    activation: str = "tanh",
) -> nn.Module:
    """Two 3x3 convolutions with 2x2 pooling and one hidden layer, for small images.

    ``activation="tanh"`` bounds what a layer passes on, which often helps under DP
    (Papernot et al. 2021, "Tempered sigmoid activations").
    """
    channels, height, width_px = image_shape("cnn", input_shape, 4)
    _positive("width", width)
    _positive("dense", dense)
    features = 2 * width * (height // 4) * (width_px // 4)
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        make_activation(activation),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        make_activation(activation),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(features, dense),
        make_activation(activation),
        nn.Linear(dense, num_outputs),
    )


def dpkfc_mnist(
    input_shape: tuple[int, ...], num_outputs: int, *, activation: str = "relu"
) -> nn.Module:
    """The MNIST net of DP-KFC: 206 922 parameters for 1x28x28 inputs and 10 classes.

    The paper has relu; tanh makes plain DP-SGD stronger.
    """
    channels, height, width = image_shape("dpkfc-mnist", input_shape, 4)
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        make_activation(activation),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        make_activation(activation),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), 128),
        make_activation(activation),
        nn.Linear(128, num_outputs),
    )


def small_cnn(
    input_shape: tuple[int, ...],
    num_outputs: int,
    *,
    dense: int = 128,
    groups: int = 4,
) -> nn.Module:
    """The small CNN with GroupNorm of NoiseCurve (its table 4a).

    The paper leaves three things open. Chosen here: padding 1; 4 groups in each norm
    (4, 8 and 16 channels to a group, so no group is a single channel); and 128 for its
    ``dense_size``.
    """
    channels, _, _ = image_shape("small-cnn", input_shape, 5)
    _positive("dense", dense)
    layers: list[nn.Module] = []
    for width, stride in ((16, 1), (32, 2), (64, 2)):
        layers += [
            nn.Conv2d(channels, width, 3, stride=stride, padding=1),
            group_norm(width, groups),
            nn.ReLU(),
        ]
        channels = width
    return nn.Sequential(
        *layers,
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * channels, dense),
        nn.ReLU(),
        nn.Linear(dense, num_outputs),
    )


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigurationError(f"{name} is {value}", "use 1 or more")
