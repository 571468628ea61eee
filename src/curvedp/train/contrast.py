r"""SimCLR on public images: a net that knows two views of one image among many others.

Of each image of a batch two random views are made. The net's features of a view go
through a small projector, which is thrown away later, to ``z [2B, p]`` of length 1, and

    loss = mean_i -log( exp(<z_i, z_j(i)> / t) / sum_{k != i} exp(<z_i, z_k> / t) )

with j(i) the other view of the same image. No label is looked at. Features are what the
net's last dense layer gets; that layer keeps its initial values.

Chen et al., "A simple framework for contrastive learning of visual representations",
2020. NoiseCurve pretrains in this way.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvedp.errors import ConfigurationError

__all__ = ["Contrast", "contrastive_loss", "random_views"]

#: Least share of an image's area that a crop shows, and the ratios of its sides.
LEAST_AREA, RATIOS = 0.25, (3 / 4, 4 / 3)
#: How often colours are jittered, and how often none is left.
JITTERED, GREY = 0.8, 0.2
#: How far brightness, contrast and saturation may be from what they were.
JITTER = 0.4
#: p, or less where the net has fewer features.
PROJECTED = 128


class Contrast:
    """The features of a model, a projector behind them, and the loss of a batch.

    Args:
        model: any that has a dense layer; the last one to be called is its head.
        images: some ``[B, C, H, W]`` in the model's type, on its device.
        temperature: t.

    The projector is drawn from torch's global generator.
    """

    def __init__(self, model: nn.Module, images: Any, temperature: float) -> None:
        self._model, self._temperature = model, temperature
        _require_images(images)
        self._head = _last_dense(model, images)
        width = self._features(images).shape[1]
        own = next(model.parameters())
        self.projector = nn.Sequential(
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, min(width, PROJECTED)),
        ).to(own.device, own.dtype)

    def loss(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Of one batch of images, with views from the generator."""
        views = [random_views(images, generator) for _ in range(2)]
        projected = self.projector(self._features(torch.cat(views)))
        return contrastive_loss(projected, self._temperature)

    def _features(self, images: Tensor) -> Tensor:
        """``[B, d]``: what the head gets, averaged over positions where it has any."""
        seen: list[Tensor] = []
        handle = self._head.register_forward_pre_hook(
            lambda _, given: seen.append(given[0])
        )
        try:
            self._model(images)
        finally:
            handle.remove()
        features = seen[-1]
        if len(features) != len(images):
            raise ConfigurationError(
                "the last dense layer of the model does not get one row for each image",
                "set pretrain_labels = 'own' or 'random'",
            )
        between = tuple(range(1, features.dim() - 1))
        return features.mean(between) if between else features


def contrastive_loss(projected: Tensor, temperature: float) -> Tensor:
    """Mean over all views of how badly each is told from those of other images.

    Args:
        projected: ``[2B, p]``; row i and row B + i are of one image.
        temperature: t.
    """
    rows = len(projected)
    z = F.normalize(projected, dim=1)
    alike = z @ z.mT / temperature
    itself = torch.eye(rows, dtype=torch.bool, device=z.device)
    alike = alike.masked_fill(itself, -math.inf)
    partners = torch.arange(rows, device=z.device).roll(rows // 2)
    return F.cross_entropy(alike, partners)


def random_views(images: Tensor, generator: torch.Generator) -> Tensor:
    """One view of each image ``[C, H, W]``: a crop, mirrored or not, in other colours.

    Brightness is moved in standard deviations of the image, and nothing is cut off at
    0 or 1: images may have been normalised.
    """
    return _recoloured(_cropped(images, generator), generator)


def _cropped(x: Tensor, generator: torch.Generator) -> Tensor:
    """A box of random size, place and ratio, stretched to the whole; or its mirror."""
    n = len(x)

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(n, generator=generator) * (high - low) + low

    area = uniform(LEAST_AREA, 1.0)
    ratio = torch.exp(uniform(*map(math.log, RATIOS)))
    width = (area * ratio).sqrt().clamp(max=1.0)
    height = (area / ratio).sqrt().clamp(max=1.0)
    sign = torch.where(uniform(0, 1) < 0.5, -1.0, 1.0)
    box = torch.zeros(n, 2, 3)
    box[:, 0, 0], box[:, 0, 2] = sign * width, uniform(-1, 1) * (1 - width)
    box[:, 1, 1], box[:, 1, 2] = height, uniform(-1, 1) * (1 - height)
    grid = F.affine_grid(box.to(x), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)


def _recoloured(x: Tensor, generator: torch.Generator) -> Tensor:
    shape = (-1, 1, 1, 1)
    draws = torch.rand(5, len(x), generator=generator)
    bright, contrast, saturation = (
        (JITTER * (2 * draw - 1)).to(x).view(shape) for draw in draws[:3]
    )
    centre = x.mean((1, 2, 3), keepdim=True)
    spread = x.std((1, 2, 3), keepdim=True)
    other = centre + (1 + contrast) * (x - centre) + bright * spread
    grey = other.mean(1, keepdim=True)
    other = grey + (1 + saturation) * (other - grey)
    x = torch.where((draws[3] < JITTERED).to(x.device).view(shape), other, x)
    without = x.mean(1, keepdim=True).expand_as(x)
    return torch.where((draws[4] < GREY).to(x.device).view(shape), without, x)


def _require_images(images: Any) -> None:
    fits = isinstance(images, Tensor) and images.dim() == 4
    if not (fits and images.is_floating_point()):
        raise ConfigurationError(
            "SimCLR makes views of images [channels, height, width], and the public "
            "inputs are not such",
            "set pretrain_labels = 'own' or 'random'",
        )


def _last_dense(model: nn.Module, images: Tensor) -> nn.Linear:
    called: list[nn.Linear] = []

    def note(module: nn.Module, _: Any) -> None:
        if isinstance(module, nn.Linear):
            called.append(module)

    handles = [m.register_forward_pre_hook(note) for m in model.modules()]
    try:
        with torch.no_grad():
            model(images)
    finally:
        for handle in handles:
            handle.remove()
    if not called:
        raise ConfigurationError(
            "SimCLR trains what comes before a model's last dense layer, and this one "
            "has none",
            "set pretrain_labels = 'own' or 'random'",
        )
    return called[-1]
