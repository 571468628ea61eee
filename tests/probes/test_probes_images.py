"""Noise images: the slope of the spectrum, the scale, any shape."""

import itertools
import math

import pytest
import torch

from curvedp.errors import ConfigurationError
from curvedp.probes import (
    ImageProbe,
    Normalisation,
    StagedProbe,
    UniformLabels,
    draw,
)

from .examples import seeded

SHAPES = [
    (1, 28, 28),
    (3, 32, 32),
    (3, 7, 5),
    (2, 1, 9),
    (2, 9, 1),
    (1, 2, 2),
    (5, 1, 1),
    (1, 16, 33),
]


def measured_slope(images):
    """Slope of log power over log frequency, by regression on all but frequency 0."""
    *_, height, width = images.shape
    power = torch.fft.fft2(images.double()).abs().square().mean((0, 1))
    vertical = torch.fft.fftfreq(height, dtype=torch.float64)[:, None]
    horizontal = torch.fft.fftfreq(width, dtype=torch.float64)[None, :]
    frequency = (vertical**2 + horizontal**2).sqrt()
    chosen = frequency > 0
    x, y = frequency[chosen].log(), power[chosen].log()
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / (x * x).sum())


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0, 3.6])
@pytest.mark.parametrize("shape", [(1, 96, 96), (2, 64, 101), (1, 1, 4096)])
def test_the_power_spectrum_falls_as_declared(power, shape):
    images = ImageProbe(shape, power).inputs(16, seeded())
    assert measured_slope(images) == pytest.approx(-power, abs=0.05)


def test_white_noise_is_the_generators_own():
    images = ImageProbe((1, 8, 9), power=0.0).inputs(4, seeded(3))
    white = torch.randn((4, 1, 8, 9), generator=seeded(3))
    white = (white - white.mean()) / white.std(correction=0)
    torch.testing.assert_close(images, white, atol=1e-5, rtol=0)


def test_frequency_zero_weighs_as_much_as_the_lowest_other_one():
    images = ImageProbe((1, 12, 12), power=3.0).inputs(20_000, seeded())
    power = torch.fft.fft2(images.double()).abs().square().mean((0, 1))
    assert float(power[0, 0] / power[0, 1]) == pytest.approx(1.0, abs=0.05)
    assert float(power[0, 0] / power[0, 2]) == pytest.approx(8.0, rel=0.05)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("power", [0.0, 2.0, 1000.0])
def test_a_batch_has_mean_zero_and_variance_one(shape, power):
    images = ImageProbe(shape, power).inputs(7, seeded())
    assert images.shape == (7, *shape)
    assert float(images.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(images.std(correction=0)) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_single_image_is_finite_and_not_empty(shape):
    for normalisation in Normalisation:
        probe = ImageProbe(shape, normalisation=normalisation)
        image = probe.inputs(1, seeded())
        assert torch.isfinite(image).all()
        assert image.abs().max() > 0


def test_a_single_number_keeps_its_law():
    # nothing to normalise over: N(0, 1) as drawn
    values = torch.cat(
        [ImageProbe((1, 1, 1)).inputs(1, seeded(s)).flatten() for s in range(400)]
    )
    assert float(values.std()) == pytest.approx(1.0, abs=0.1)


def test_declared_mean_and_std_hold_per_channel():
    probe = ImageProbe((2, 16, 16), mean=(0.5, -1.0), std=(0.2, 3.0))
    images = probe.inputs(400, seeded())
    spread = images.std((0, 2, 3))
    assert spread.tolist() == pytest.approx([0.2, 3.0], rel=0.1)
    # the mean of few low frequencies has an error of its own; its unit is the std
    error = (images.mean((0, 2, 3)) - torch.tensor([0.5, -1.0])) / spread
    assert error.abs().max() < 0.15
    one = ImageProbe((2, 16, 16), mean=0.5, std=0.2).inputs(400, seeded())
    assert float(one.mean()) == pytest.approx(0.5, abs=1e-5)
    assert float(one.std(correction=0)) == pytest.approx(0.2, abs=1e-5)


def test_the_official_probe_is_amplitude_one_over_f_with_std_one_half():
    images = ImageProbe.official((3, 32, 32)).inputs(64, seeded())
    assert measured_slope(images) == pytest.approx(-2.0, abs=0.05)
    each = images.flatten(1).std(1, correction=0)
    torch.testing.assert_close(each, torch.full((64,), 0.5), atol=1e-5, rtol=0)
    assert images.mean((2, 3)).abs().max() < 1e-5  # frequency zero is dropped


def test_over_the_batch_images_differ_in_brightness_and_contrast():
    images = ImageProbe((1, 16, 16), power=3.0).inputs(64, seeded())
    assert images.mean((1, 2, 3)).std() > 0.2
    assert images.flatten(1).std(1).std() > 0.05


def test_axes_of_different_length_are_measured_in_pixels():
    # the same physical frequency has the same power along both axes
    images = ImageProbe((1, 16, 64), power=2.0).inputs(4000, seeded())
    power = torch.fft.fft2(images.double()).abs().square().mean((0, 1))
    assert float(power[2, 0] / power[0, 8]) == pytest.approx(1.0, abs=0.1)
    assert math.log2(float(power[0, 4] / power[0, 8])) == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize(
    "settings",
    [
        {"shape": (28, 28)},
        {"shape": (1, 28, 0)},
        {"shape": (1, -28, 28)},
        {"shape": (1, 28.0, 28)},
        {"shape": 28},
        {"power": math.nan},
        {"power": math.inf},
        {"power": -1.0},
        {"power": "pink"},
        {"std": 0.0},
        {"std": (1.0, 1.0)},
        {"std": math.nan},
        {"mean": (0.0, math.nan, 0.0)},
        {"mean": "zero"},
        {"normalisation": "batch"},
    ],
)
def test_impossible_settings_are_refused(settings):
    name = next(iter(settings))
    with pytest.raises(ConfigurationError, match=name):
        ImageProbe(**{"shape": (3, 28, 28), **settings})


def test_different_settings_give_different_images():
    probes = [ImageProbe((1, 8, 8), power) for power in (0.0, 1.0, 2.0)]
    drawn = [probe.inputs(3, seeded()) for probe in probes]
    for a, b in itertools.combinations(drawn, 2):
        assert not torch.allclose(a, b)


class Moved:
    """Stands for another device: notes what is moved there."""

    def __init__(self, monkeypatch):
        self.shapes = []
        real = torch.Tensor.to

        def to(tensor, place, *rest):
            if place is self:
                self.shapes.append(tuple(tensor.shape))
                return tensor
            return real(tensor, place, *rest)

        monkeypatch.setattr(torch.Tensor, "to", to)


def test_a_device_gets_the_draws_and_does_the_rest(monkeypatch):
    probe = ImageProbe((2, 6, 5), mean=(0.5, 1.0), std=2.0)
    assert isinstance(probe, StagedProbe)
    whole = draw(probe, UniformLabels(), 7, torch.Generator().manual_seed(0))
    device, generator = Moved(monkeypatch), torch.Generator().manual_seed(0)
    staged = draw(probe, UniformLabels(), 7, generator, device)
    assert device.shapes == [(7, 2, 6, 5)]
    assert torch.equal(staged.inputs, whole.inputs)
