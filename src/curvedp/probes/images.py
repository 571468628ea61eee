r"""Images of coloured noise: right in their spectrum, without any content.

With ``Z`` the Fourier transform of real white noise and ``f`` the frequency in cycles
per pixel,

.. math::  x = \mathrm{irfft2}\bigl(f^{-\mathrm{power}/2} \odot Z\bigr),

so that the *power* spectrum falls like ``f^-power`` (DP-KFC, eq. 2). Natural images
have a power near 2. The paper's Algorithm 3 and its code weight the *amplitude* by
``f^-alpha``, which is ``power = 2 alpha`` here: the alphas of 1.5 to 1.8 that they
tuned are powers of 3 to 3.6.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from curvedp.barrier import Provenance
from curvedp.errors import ConfigurationError
from curvedp.probes.base import JSON
from curvedp.probes.checks import check_draw
from curvedp.values import is_number, is_whole

__all__ = ["ImageProbe", "Normalisation"]


class Normalisation(Enum):
    """Over what the images get zero mean and unit variance.

    ======  =====================================================================
    BATCH   all numbers of the batch together; images differ in brightness and
            contrast, and frequency zero weighs as much as the lowest other one
    IMAGE   each image has its own unit variance and each channel of it mean zero
            (frequency zero is dropped): what DP-KFC's public code does
    ======  =====================================================================
    """

    BATCH = "batch"
    IMAGE = "image"


@dataclass(frozen=True)
class ImageProbe:
    """Noise images ``[B, C, H, W]`` with a power spectrum ``f^-power``.

    Attributes:
        shape: ``(C, H, W)`` of one image, each from 1 on; a signal is ``(C, 1, T)``.
        power: Exponent of the power spectrum; 0 is white noise. Between 2 and 4 worked
            best in private training of small networks.
        mean: Declared mean of the model's inputs, one number or one per channel.
        std: Declared standard deviation, likewise. With inputs that are normalised by
            public constants to mean 0 and variance 1 both stay as they are.
        normalisation: See :class:`Normalisation`.
    """

    shape: tuple[int, int, int]
    power: float = 3.0
    mean: float | tuple[float, ...] = 0.0
    std: float | tuple[float, ...] = 1.0
    normalisation: Normalisation = Normalisation.BATCH

    def __post_init__(self) -> None:
        shape = self.shape
        if (
            not isinstance(shape, tuple | list | torch.Size)
            or len(shape) != 3
            or not all(is_whole(n, at_least=1) for n in shape)
        ):
            raise ConfigurationError(
                f"the shape of an image is {shape!r}, not three numbers from 1 on",
                "give (channels, height, width); a signal of T steps is (C, 1, T)",
            )
        object.__setattr__(self, "shape", tuple(shape))
        if not (is_number(self.power) and self.power >= 0):
            raise ConfigurationError(
                f"power is {self.power!r}, not a finite number from 0 on",
                "0 is white noise, 2 the spectrum of natural images",
            )
        self._per_channel("mean", self.mean, above=None)
        self._per_channel("std", self.std, above=0.0)
        if not isinstance(self.normalisation, Normalisation):
            raise ConfigurationError(
                f"normalisation is {self.normalisation!r}",
                "use Normalisation.BATCH or Normalisation.IMAGE",
            )

    @classmethod
    def official(cls, shape: tuple[int, int, int]) -> ImageProbe:
        """The probe of DP-KFC's public code: amplitude ``1/f``, each image std 0.5."""
        return cls(shape, power=2.0, std=0.5, normalisation=Normalisation.IMAGE)

    @property
    def provenance(self) -> Provenance:
        """SYNTHETIC."""
        return Provenance.SYNTHETIC

    def inputs(self, size: int, generator: torch.Generator) -> Tensor:
        """Images ``[size, C, H, W]``, float32."""
        return self.finished(self.drawn(size, generator))

    def drawn(self, size: int, generator: torch.Generator) -> Tensor:
        """White noise ``[size, C, H, W]``, which :meth:`finished` colours."""
        check_draw(size, generator)
        return torch.randn((size, *self.shape), generator=generator)

    def finished(self, drawn: Tensor) -> Tensor:
        """Images from white noise, wherever it lies; no draw is left."""
        _, height, width = self.shape
        spectrum = torch.fft.rfft2(drawn) * self._amplitudes().to(drawn.device)
        unit = self._normalised(torch.fft.irfft2(spectrum, s=(height, width)))
        std = self._per_channel("std", self.std, above=0.0).to(drawn.device)
        mean = self._per_channel("mean", self.mean, above=None).to(drawn.device)
        return unit * std + mean

    def describe(self) -> dict[str, JSON]:
        """Shape, power, normalisation."""
        return {
            "kind": "images",
            "shape": list(self.shape),
            "power": self.power,
            "mean": _plain(self.mean),
            "std": _plain(self.std),
            "normalisation": self.normalisation.value,
        }

    def _amplitudes(self) -> Tensor:
        """``(f / f_min)^-(power/2)`` on the half plane of rfft2, ``[H, W//2 + 1]``."""
        _, height, width = self.shape
        vertical = torch.fft.fftfreq(height, dtype=torch.float64)[:, None]
        horizontal = torch.fft.rfftfreq(width, dtype=torch.float64)[None, :]
        frequency = torch.hypot(vertical, horizontal)
        # A frequency of 0 has no power law; the lowest other one stands in. Relative
        # to it no weight exceeds 1, however large the power.
        positive = frequency[frequency > 0]
        lowest = positive.min() if positive.numel() else torch.tensor(1.0)
        weights = (frequency.clamp_min(lowest) / lowest) ** (-self.power / 2)
        if self.normalisation is Normalisation.IMAGE and positive.numel():
            weights[0, 0] = 0.0
        return weights.float()

    def _normalised(self, noise: Tensor) -> Tensor:
        whole_batch = self.normalisation is Normalisation.BATCH
        over = (0, 1, 2, 3) if whole_batch else (1, 2, 3)
        if noise.numel() == 1 or (not whole_batch and noise[0].numel() == 1):
            return noise  # one number has no variance; by its law it has mean 0, std 1
        if whole_batch or noise[0, 0].numel() == 1:
            noise = noise - noise.mean(over, keepdim=True)
        std = noise.square().mean(over, keepdim=True).sqrt()
        return noise / std.clamp_min(torch.finfo(noise.dtype).tiny)

    def _per_channel(self, name: str, value: Any, above: float | None) -> Tensor:
        """``[C or 1, 1, 1]`` from one number or one per channel."""
        channels = self.shape[0]
        listed = tuple(value) if isinstance(value, tuple | list) else (value,)
        fits = not isinstance(value, tuple | list) or len(listed) == channels
        valid = all(is_number(v) and (above is None or v > above) for v in listed)
        if not (fits and valid):
            kind = "finite" if above is None else "positive"
            raise ConfigurationError(
                f"{name} is {value!r}, and the images have {channels} channel(s)",
                f"give one {kind} number, or a tuple with one per channel",
            )
        return torch.tensor(listed, dtype=torch.float32)[:, None, None]


def _plain(value: float | tuple[float, ...]) -> JSON:
    return list(value) if isinstance(value, tuple | list) else value
