"""``physical_batch_size="auto"``: what fits; nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from curvedp import make_private
from curvedp.errors import ConfigurationError
from curvedp.train import Trainer, fitting
from curvedp.train.fitting import largest_fitting

from .loops import SAME_BUT_FOR_ROUNDING, small_net

EXAMPLES = 60


class Watched(Dataset):
    """Notes which examples are asked for."""

    def __init__(self, seed=0, size=EXAMPLES):
        random = torch.Generator().manual_seed(seed)
        self.x = torch.randn(size, 4, generator=random)
        self.asked = []

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        self.asked.append(int(i))
        return self.x[i], int(i) % 3


def attach(physical, data=None, net=None, *, by_size=False, **settings):
    net = net or small_net()
    sampling = {"sample_rate": 0.5, "steps": 4, "expected_batch_size": 30}
    if by_size:
        sampling = {"batch_size": 30, "epochs": 2}
    return make_private(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1),
        data or Watched(),
        loss="cross-entropy",
        noise_multiplier=1.0,
        physical_batch_size=physical,
        seed=3,
        unsafe_reproducible_noise=5,
        allow_large_delta=True,
        **sampling,
        **settings,
    )


def trained(private):
    for x, y in private.loader:
        private.optimizer.zero_grad()
        private.loss(private.model(x), y).backward()
        private.optimizer.step()
    return [p.detach() for p in private.model.parameters()]


def rows(private):
    return private._engine.physical_batch_size


@pytest.fixture
def memory(monkeypatch):
    """Sets how much memory the machine has, and how much of it is free."""

    def set_to(whole, free):
        known = {"MemTotal": int(whole), "MemAvailable": int(free)}
        monkeypatch.setattr(fitting, "_meminfo", lambda: known)

    return set_to


@pytest.mark.parametrize("recipe", ["dp-sgd", "dp-kfc"])
@pytest.mark.parametrize("fixed", [1, 7, 64])
def test_what_is_sampled_and_released_is_that_of_any_fixed_size(fixed, recipe, memory):
    memory(4_000, 4_000)  # so that auto takes several parts
    found = {}
    for physical in ("auto", fixed):
        data = Watched()
        private = attach(physical, data, recipe=recipe)
        del data.asked[:]
        found[physical] = trained(private), data.asked
        if physical == "auto":
            assert 1 < rows(private) < 30
    assert found["auto"][1] == found[fixed][1]
    for mine, other in zip(found["auto"][0], found[fixed][0], strict=True):
        torch.testing.assert_close(mine, other, **SAME_BUT_FOR_ROUNDING)


def test_no_private_value_is_looked_at():
    data = Watched()
    attach(8, data)
    before = list(data.asked)
    other = Watched(seed=1)
    assert rows(attach("auto", other)) == rows(attach("auto", Watched()))
    assert other.asked == before  # for shapes alone, as with any size


def test_free_memory_is_looked_at_only_where_the_size_is_public(memory):
    def found(by_size):
        sizes = []
        for free in (8e9, 3_000):
            memory(1e10, free)
            sizes.append(rows(attach("auto", by_size=by_size)))
        return sizes

    public, private = found(by_size=True), found(by_size=False)
    assert public[0] > public[1]
    assert private[0] == private[1] == 48  # room for most draws of 30


def test_more_memory_is_more_rows_and_no_more_than_a_step_draws(memory):
    sizes = []
    for whole in (0, 2_000, 3_000, 6_000, 1e12):
        memory(whole, whole)
        sizes.append(rows(attach("auto")))
    assert sizes == sorted(sizes)
    assert sizes[0] == 1 and sizes[-1] == 48
    assert len(set(sizes)) > 2


def test_larger_examples_are_fewer_rows(memory):
    memory(1e5, 1e5)

    def of(width):
        net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))
        return rows(attach("auto", net=net))

    assert of(8) > of(400)


def test_views_stay_together(memory):
    memory(0, 0)
    data = TensorDataset(torch.rand(20, 1, 4, 4), torch.zeros(20, dtype=torch.int64))
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    assert rows(attach("auto", data, net, augment="flips", views=5)) == 5


def test_what_does_not_fit_is_halved():
    tried = []

    def fits(n):
        tried.append(n)
        return n <= 10

    assert largest_fitting(fits, 64) == 8
    assert tried == [64, 32, 16, 8]
    assert largest_fitting(lambda n: False, 9) == 1


def test_the_trainer_takes_it_and_other_words_are_refused():
    data = Watched()
    settings = {"sample_rate": 0.5, "steps": 2, "expected_batch_size": 30}
    for recipe, own in (("dp-sgd", {"noise_multiplier": 1.0}), ("non-private", {})):
        trainer = Trainer(
            small_net(), "cross-entropy", recipe, physical_batch_size="auto",
            allow_large_delta=True, **own, **settings,
        )  # fmt: skip
        assert trainer.fit(data).steps == 2
    with pytest.raises(ConfigurationError, match="auto"):
        attach("lots")
