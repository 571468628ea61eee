"""Probes and labels that a recipe takes where the user names none."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from curvedp import make_private
from curvedp.errors import ConfigurationError
from curvedp.layers import Batch
from curvedp.probes import BernoulliLabels, UniformLabels
from curvedp.recipes import Curvature
from curvedp.train.probing import choose_labels, choose_probe

WORDS, PLACES = 500, 6


class Reader(nn.Module):
    """Words, and where they stand; ``lookup`` says what words are looked up by."""

    def __init__(self, lookup=lambda ids: ids):
        super().__init__()
        self.places = nn.Embedding(PLACES, 4)
        self.words = nn.Embedding(WORDS, 4)
        self.head = nn.Linear(4, 2)
        self.lookup = lookup

    def forward(self, ids):
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return self.head((self.words(self.lookup(ids)) + self.places(places)).mean(1))


def tokens():
    return Batch(torch.zeros(1, PLACES, dtype=torch.long), None)


def test_tokens_come_from_the_table_that_inputs_are_looked_up_in():
    model = Reader()
    probe = choose_probe(Curvature(), None, tokens(), model, None)
    drawn = probe.inputs(200, torch.Generator().manual_seed(0))
    assert int(drawn.max()) >= PLACES
    assert model.training
    assert not model.words._forward_pre_hooks


def test_a_table_that_does_not_show_is_asked_for():
    model = Reader(lambda ids: ids + 1)
    with pytest.raises(ConfigurationError, match="6, 500 rows"):
        choose_probe(Curvature(), None, tokens(), model, None)


def test_uniform_labels_fit_the_loss():
    uniform = Curvature(labels="uniform")
    assert choose_labels(uniform, None, "cross-entropy") == UniformLabels()
    assert choose_labels(uniform, None, "bce") == BernoulliLabels(0.5)
    assert choose_labels(uniform, None, lambda output, y: output) == UniformLabels()
    with pytest.raises(ConfigurationError, match="regression"):
        choose_labels(uniform, None, "mse")


def attach(recipe, rate, **settings):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    data = TensorDataset(torch.randn(20, 3), torch.randint(0, 2, (20,)))
    return make_private(
        model, torch.optim.SGD(model.parameters(), lr=rate), data, recipe=recipe,
        loss="cross-entropy", noise_multiplier=1.0, sample_rate=0.5, steps=2,
        expected_batch_size=10, delta=1e-3, **settings,
    )  # fmt: skip


def test_a_floor_that_follows_a_learning_rate_of_zero_is_refused():
    with pytest.raises(ConfigurationError, match="learning rate is 0"):
        attach("dp-ngd", 0.0)
    attach("dp-kfc", 0.0)  # has no such floor


def test_a_layer_that_is_left_out_must_exist():
    attach("dp-kfc", 0.1, leave_out="0, 1.bias")
    with pytest.raises(ConfigurationError, match="'fc', and no trained layer"):
        attach("dp-kfc", 0.1, leave_out="0, fc")
