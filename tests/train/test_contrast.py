"""SimCLR on public images: its views, its loss, and what it does to a model."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from curvedp.errors import ConfigurationError
from curvedp.noise import RandomStreams
from curvedp.probes import PublicProbe
from curvedp.recipes import Pretraining
from curvedp.train.contrast import (
    GREY,
    JITTERED,
    LEAST_AREA,
    contrastive_loss,
    random_views,
)
from curvedp.train.pretrain import pretrain


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def slow_loss(z, temperature):
    """As the formula says it, one view after the other."""
    rows, total = len(z), 0.0
    alike = [
        [float(a @ b / a.norm() / b.norm()) / temperature for b in z.double()]
        for a in z.double()
    ]
    for i in range(rows):
        partner = (i + rows // 2) % rows
        others = sum(math.exp(alike[i][k]) for k in range(rows) if k != i)
        total -= math.log(math.exp(alike[i][partner]) / others)
    return total / rows


@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_the_loss_is_that_of_the_formula(temperature):
    z = torch.randn(10, 4, generator=generator(), dtype=torch.float64)
    found = float(contrastive_loss(z, temperature))
    assert found == pytest.approx(slow_loss(z, temperature))


def test_partners_that_are_alike_cost_least():
    z = torch.randn(8, 16, generator=generator())
    alike, apart = torch.cat([z, z]), torch.cat([z, z.roll(1, 0)])
    assert contrastive_loss(alike, 0.1) < 0.1 < contrastive_loss(apart, 0.1)


def ramp(n=400, size=16):
    """Brightness is the place from left to right, between -1 and 1."""
    line = (torch.arange(size) * 2 + 1) / size - 1
    return line.expand(n, 1, size, size).clone()


def test_crops_show_a_part_and_half_of_them_its_mirror(monkeypatch):
    monkeypatch.setattr("curvedp.train.contrast._recoloured", lambda x, _: x)
    shown = random_views(ramp(), generator())
    assert shown.shape == (400, 1, 16, 16)
    assert shown.abs().max() <= 1
    slopes = (shown[:, 0, 8, 10] - shown[:, 0, 8, 5]) / (ramp(1)[0, 0, 8, 10] * 2)
    assert 0.4 < (slopes < 0).double().mean() < 0.6
    least = math.sqrt(LEAST_AREA * 3 / 4)
    # the share of the width that is seen; a pixel at the edge is reflected
    seen = slopes.abs() * ramp(1)[0, 0, 8, 10] * 2 / (10 / 16)
    assert seen.min() > least - 0.02 and seen.max() < 1.02
    assert seen.std() > 0.05
    upright = random_views(ramp().mT, generator())  # never upside down
    assert (upright[:, 0, 10, 8] > upright[:, 0, 5, 8]).all()


def test_colours_change_and_sometimes_go(monkeypatch):
    monkeypatch.setattr("curvedp.train.contrast._cropped", lambda x, _: x)
    x = torch.randn(1000, 3, 4, 4, generator=generator(1))
    shown = random_views(x, generator())
    grey = (shown - shown.mean(1, keepdim=True)).abs().amax((1, 2, 3)) < 1e-6
    assert grey.double().mean() == pytest.approx(GREY, abs=0.04)
    same = torch.isclose(shown, x, atol=1e-6).all(dim=(1, 2, 3))
    assert same.double().mean() == pytest.approx((1 - JITTERED) * 0.8, abs=0.04)
    moved = shown.mean((1, 2, 3)) - x.mean((1, 2, 3))
    assert moved.abs().max() <= 0.4 * x.std((1, 2, 3)).max() + 1e-6
    assert moved.abs().mean() > 0.05


def test_views_follow_from_the_generator_alone():
    x = torch.rand(5, 3, 8, 8, generator=generator(1))
    one, two = random_views(x, generator()), random_views(x, generator())
    assert torch.equal(one, two)
    assert not torch.equal(one, random_views(x, generator(4)))
    state = torch.random.get_rng_state()
    random_views(x, generator())
    assert torch.equal(state, torch.random.get_rng_state())


def net():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(), nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4),
    )  # fmt: skip


def images(n=48, seed=5):
    """Smooth random pictures, so that a part of one looks like the whole."""
    coarse = torch.randn(n, 3, 3, 3, generator=generator(seed))
    return nn.functional.interpolate(coarse, size=12, mode="bilinear")


def run(own, dataset, **settings):
    how = {
        "pretrain_labels": "simclr", "pretrain_epochs": 50,
        "pretrain_batch_size": 24, "pretrain_temperature": 0.2, **settings,
    }  # fmt: skip
    streams = RandomStreams(7)
    pretrain(own, None, PublicProbe(dataset), Pretraining(**how), streams)
    return own


def known_again(own, x):
    """How often a view's nearest among views of all images is of the same image."""
    found = []
    for seed in range(10, 18, 2):
        with torch.no_grad():
            pair = [own[:7](random_views(x, generator(seed + k))) for k in (0, 1)]
        one, two = (nn.functional.normalize(z - z.mean(0), dim=1) for z in pair)
        nearest = (one @ two.mT).argmax(1)
        found.append((nearest == torch.arange(len(x))).double().mean())
    return float(torch.stack(found).mean())


def test_a_pretrained_net_knows_views_that_it_has_not_seen():
    fresh = images(48, seed=6)
    own = run(net(), images(96))
    assert own.training
    assert all(p.grad is None for p in own.parameters())
    assert known_again(own, fresh) > known_again(net(), fresh) + 0.1
    for before, after in zip(net()[-1].parameters(), own[-1].parameters(), strict=True):
        assert torch.equal(before, after)  # the head has learnt nothing
    assert not torch.equal(net()[0].weight, own[0].weight)


def test_labels_are_not_looked_at():
    x = images()
    labels = [torch.zeros(48, dtype=torch.long), torch.arange(48)]
    runs = [run(net(), d, pretrain_epochs=1) for d in
            (x, *(TensorDataset(x, y) for y in labels))]  # fmt: skip
    weights = [torch.cat([p.flatten() for p in own.parameters()]) for own in runs]
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


def test_a_head_over_positions_gets_their_mean():
    class OverPositions(nn.Module):
        def __init__(self):
            super().__init__()
            self.mixed, self.head = nn.Conv2d(3, 8, 4, stride=4), nn.Linear(8, 4)

        def forward(self, x):
            return self.head(self.mixed(x).flatten(2).mT).mean(1)

    own = OverPositions()
    before = own.mixed.weight.clone()
    run(own, images(), pretrain_epochs=2)
    assert not torch.equal(before, own.mixed.weight)


@pytest.mark.parametrize(
    ("own", "inputs", "match"),
    [
        (nn.Sequential(nn.Linear(4, 2)), torch.randn(9, 4), "images"),
        (nn.Sequential(nn.Conv2d(3, 2, 12), nn.Flatten()), images(9), "dense layer"),
    ],
)
def test_what_simclr_cannot_be_done_with_is_refused(own, inputs, match):
    with pytest.raises(ConfigurationError, match=match):
        run(own, inputs, pretrain_batch_size=4)
