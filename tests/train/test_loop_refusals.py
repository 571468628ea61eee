"""Hand-written loops: what is refused, and in which words."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from curvedp import make_private
from curvedp.errors import (
    ConfigurationError,
    CoverageError,
    DataError,
    LoopError,
    NotPrivateError,
)

from ..faults.cases import attach, examples, linear
from .loops import small_net


def test_a_checked_loss_must_be_used():
    private = attach(examples())
    for x, y in private.loader:
        F.cross_entropy(private.model(x), y).backward()
        with pytest.raises(LoopError, match=r"private\.loss"):
            private.optimizer.step()
        break


def test_the_bare_model_is_refused_and_its_gradients_are_not_used():
    model = linear()
    private = attach(examples(), model)
    for x, y in private.loader:
        F.cross_entropy(model(x), y).backward()
        with pytest.raises(LoopError, match=r"private\.model"):
            private.optimizer.step()
        break


def test_step_without_a_batch_is_refused():
    private = attach(examples())
    with pytest.raises(LoopError, match=r"private\.loader"):
        private.optimizer.step()


def test_closures_are_refused():
    private = attach(examples())
    with pytest.raises(LoopError, match="closure"):
        private.optimizer.step(lambda: 0.0)


def test_two_passes_over_one_batch_are_refused():
    private = attach(examples())
    for x, _ in private.loader:
        private.model(x)
        with torch.no_grad():
            private.model(x)  # fine: nothing is recorded
        with pytest.raises(LoopError, match="called twice"):
            private.model(x)
        break


def test_a_whole_batch_must_be_stepped():
    private = attach(examples(), rate=0.9, physical_batch_size=4)

    def never_step():
        for x, y in private.loader:
            private.loss(private.model(x), y).backward()

    with pytest.raises(LoopError, match="is whole and never went"):
        never_step()


def test_penalties_on_weights_are_refused_not_dropped():
    private = attach(examples())
    for x, y in private.loader:
        penalty = sum(p.square().sum() for p in private.model.parameters())
        (private.loss(private.model(x), y) + penalty).backward()
        with pytest.raises(LoopError, match="weight_decay"):
            private.optimizer.step()
        break


def test_sampling_is_not_for_loader_options():
    with pytest.raises(ConfigurationError, match="shuffle"):
        attach(examples(), loader_options={"shuffle": True})
    with pytest.raises(ConfigurationError, match="loss_reduction"):
        attach(examples(), loss_reduction="sum")


def test_optimiser_and_model_must_match():
    model = small_net()
    part = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(CoverageError, match=r"2\.weight"):
        attach(examples(), model, optimizer=part)
    more = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(CoverageError, match="not in the model"):
        attach(examples(), model, optimizer=more)
    private = attach(examples(), model)
    with pytest.raises(ConfigurationError, match="cannot be added"):
        private.optimizer.add_param_group({"params": []})


def test_weighted_samplers_are_refused():
    sampler = WeightedRandomSampler([1.0] * 24, num_samples=24)
    with pytest.raises(ConfigurationError, match="WeightedRandomSampler"):
        attach(DataLoader(examples(), batch_size=4, sampler=sampler))


def test_datasets_without_length_are_refused():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(examples())

    with pytest.raises(DataError, match="length"):
        attach(Stream())
    with pytest.raises(DataError, match="empty"):
        attach(TensorDataset(torch.zeros(0, 4), torch.zeros(0).long()))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"noise_multiplier": None}, "either epsilon"),
        ({"noise_multiplier": None, "epsilon": -1.0}, "epsilon"),
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"sample_rate": 1.5}, "sample_rate"),
        ({"steps": 0}, "steps"),
        ({"steps": None}, "not declared in full"),
        ({"expected_batch_size": None}, "expected_batch_size is missing"),
        ({"batch_size": 4}, "cannot be combined"),
        ({"delta": 1.0}, "delta"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"clipping": "gentle"}, "gentle"),
        ({"relation": "friendly"}, "friendly"),
        ({"epsilom": 1.0}, "epsilom"),
        ({"physical_batch_size": 0}, "physical_batch_size"),
        ({"loss_reduction": "max", "loss": None}, "loss_reduction"),
        ({"loss": "hinge"}, "hinge"),
        ({"recipe": "dp-magic"}, "dp-magic"),
        ({"unsafe_reproducible_noise": -1}, "unsafe_reproducible_noise"),
    ],
)
def test_impossible_settings_are_named(settings, words):
    with pytest.raises(ConfigurationError, match=words):
        attach(examples(), **settings)


def test_a_batch_larger_than_the_data_is_refused():
    model = linear()
    with pytest.raises(ConfigurationError, match="larger than the dataset of 24"):
        make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            examples(),
            epsilon=1.0,
            delta=1e-3,
            batch_size=25,
            epochs=1,
        )


def test_the_non_private_recipe_has_no_place_here():
    with pytest.raises(NotPrivateError, match="non-private"):
        attach(examples(), recipe="non-private")
