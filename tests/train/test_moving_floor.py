"""DP-NGD's floor (eq. 18) is that of its step, whenever curvature was estimated."""

import pytest
import torch
from torch import nn

from curvedp.errors import ConfigurationError
from curvedp.recipes import RECIPES
from curvedp.whitening import matched_floor

from .test_whitened_recipes import attach, examples, train

STEPS = 210
OWN = {"steps": STEPS, "probe_size": 8, "probe_batches": 1}


def shares(steps, warm_up=0.1, power=10.0, base=0.01):
    """Eq. 18 as it is printed, over the safe floor."""
    first = warm_up * steps
    for t in range(steps):
        if t < first:
            yield 1 - (1 - base) * t / first
        else:
            yield base + (1 - base) * ((t - first) / (steps - first)) ** power


def floors(source, steps):
    """Of every step: the floor of the map, and the safe one of its eigenvalues."""
    for step in range(steps):
        maps = source.at(step).maps
        (floor,) = {float(one.floor) for one in maps}
        sizes = [one.shape.numel() + one.shape[0] for one in maps]  # with the bias
        known = [one.products for one in maps]
        yield floor, [(p, n - p.numel()) for p, n in zip(known, sizes, strict=True)]


def net():
    torch.manual_seed(2)
    return nn.Sequential(nn.Flatten(), nn.Linear(30, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.parametrize("clamp", ["matched", "printed"])
@pytest.mark.parametrize("refresh", [1, 32, 100, 0])
def test_the_floor_of_every_step_is_the_printed_one(refresh, clamp):
    own = {"floor_warm_up": 0.2, "floor_power": 3.0} if refresh == 32 else {}
    private = attach(examples(), "dp-ngd", net(),
        refresh=refresh, clamp=clamp, **OWN, **own
    )  # fmt: skip
    ratio = 0.05 * 10 / 2.0
    expected = shares(STEPS, *own.values())
    for (floor, products), share in zip(
        floors(private._engine.whiteners, STEPS), expected, strict=True
    ):
        safe = ratio**2 if clamp == "printed" else matched_floor(products, ratio)
        assert floor == pytest.approx(share * safe, rel=1e-12, abs=0)


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("dp-ngd", {"clamp": "none", "plain_step": 1.0}),
        ("dp-ngd", {"clamp": "none", "floor_base": 0.1}),
        ("dp-ngd", {"floor_base": 1.0, "floor_power": 3.0}),
        ("dp-ngd", {"floor_base": 1.0, "floor_warm_up": 0.2}),
        ("dp-kfc", {"floor_power": 3.0}),
        ("dp-kfc", {"plain_step": 1.0}),
        ("dp-kfc+noisecurve", {"clamp": "matched", "side": "both", "rank": 0}),
    ],
)
def test_settings_of_a_floor_that_would_do_nothing_are_refused(name, own):
    told = list(own)[-1].replace("rank", "floor of a clamp")
    with pytest.raises(ConfigurationError, match=told):
        RECIPES[name].configure(**own)


@pytest.mark.parametrize(
    ("name", "value"), [("floor_warm_up", 1.0), ("floor_power", 0.0), ("floor_base", 2)]
)
def test_a_schedule_that_is_none_is_refused_by_the_settings_name(name, value):
    with pytest.raises(ConfigurationError, match=name):
        RECIPES["dp-ngd"].configure(**{name: value})


def test_a_floor_that_stays_ends_no_block_of_noise():
    own = {"clamp": "matched", "side": "both", "rank": 0, "floor_base": 1.0}
    assert RECIPES["dp-kfc+noisecurve"].configure(**own).correlation is not None


@pytest.mark.parametrize("refresh", [3, 0])
def test_a_run_resumed_between_two_refreshes_has_the_maps_of_its_steps(
    refresh, tmp_path
):
    own = {"refresh": refresh, "floor_warm_up": 0.5}
    whole = attach(examples(), "dp-ngd", net(), **own)
    frames = [whole._engine.whiteners.at(step).frame for step in range(2)]
    assert len(set(frames)) == 2
    expected = train(attach(examples(), "dp-ngd", net(), **own))
    with attach(examples(), "dp-ngd", net(), **own, run_dir=tmp_path) as first:
        first.save()
        train(first, 5)  # the journal has the steps
    with attach(examples(), "dp-ngd", net(), **own, run_dir=tmp_path) as second:
        second.resume()
        assert torch.equal(train(second), expected)
