"""Layers and losses that mix examples are refused, by name."""

import re

import pytest
import torch
import torch.nn.functional as F
from covering import (
    Custom,
    covered,
    cross_entropy,
    refused,
)
from torch import nn

from curvedp.errors import ConfigurationError, CouplingError, CoverageError
from curvedp.layers.coverage import refuse_structure


def batch_norm_net():
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_batch_norm_is_refused_with_its_replacement(kind):
    model = nn.Sequential(nn.Linear(5, 4), kind(4), nn.Linear(4, 3))
    message = refused(CouplingError, "'1'", model, 5)
    assert "GroupNorm" in message


@pytest.mark.parametrize("channels", [1, 6, 31, 33, 37, 40, 48, 64, 96, 100])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm])
def test_the_replacement_of_batch_norm_can_be_built(kind, channels):
    with pytest.raises(CouplingError) as caught:
        refuse_structure(nn.Sequential(kind(channels)))
    (number,) = re.findall(rf"nn.GroupNorm\((.*), {channels}\)", str(caught.value))
    groups = eval(number)
    assert nn.GroupNorm(groups, channels).num_groups <= 32
    assert (kind is nn.BatchNorm1d) == ("nn.LayerNorm" in str(caught.value))


def test_batch_norm_in_evaluation_mode_but_trainable_is_refused():
    model = batch_norm_net()
    model[1].eval()
    refused(CouplingError, "'1'", model, 5)


def test_frozen_batch_norm_in_evaluation_mode_is_accepted():
    model = batch_norm_net()
    model[1].requires_grad_(False).eval()
    model[1].running_mean.fill_(0.3)
    assert covered(model, 5) == {"0": "Linear", "2": "Linear"}
    assert not model[1].training
    assert torch.all(model[1].running_mean == 0.3)


def test_instance_norm_with_running_statistics_is_refused():
    norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
    model = nn.Sequential(nn.Conv1d(2, 4, 3), norm, nn.Flatten(), nn.LazyLinear(3))
    model(torch.zeros(1, 2, 6))
    refused(CouplingError, "'1'", model, 2, 6)


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_embeddings_that_look_at_the_batch_are_refused(option):
    table = nn.Embedding(7, 4, **option)
    model = Custom(
        lambda m, x: m.head(m.table(x).mean(1)), table=table, head=nn.Linear(4, 3)
    )
    refused(CouplingError, "'table'", model, 5, dtype=torch.int64)


def test_a_layer_that_couples_examples_is_named():
    centre = Custom(lambda m, x: x - x.mean(0))
    model = nn.Sequential(nn.Linear(5, 4), centre, nn.Linear(4, 3))
    refused(CouplingError, "layer '1'", model, 5)
    # it is found without a loss too
    refused(CouplingError, "layer '1'", model, 5, loss=None)


def test_coupling_in_the_backward_pass_alone_is_found():
    class Coupled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad + grad.mean(0)

    model = Custom(
        lambda m, x: m.head(Coupled.apply(m.body(x))),
        body=nn.Linear(5, 4),
        head=nn.Linear(4, 3),
    )
    with pytest.raises((CouplingError, CoverageError), match="'body"):
        covered(model, 5)


def test_a_scalar_loss_is_refused():
    message = refused(
        ConfigurationError, "batch of 3", nn.Linear(5, 3), 5, loss=F.cross_entropy
    )
    assert "one loss per example" in message


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, y: cross_entropy(o, y) / cross_entropy(o, y).sum().detach(),
        lambda o, y: cross_entropy(o - o.mean(0), y),
        lambda o, y: cross_entropy(o, y) * (1 + (y == y[0]).float().mean()),
    ],
    ids=["normalised", "centred", "weighted-by-count"],
)
def test_a_loss_that_couples_examples_is_refused(loss):
    model = nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 30))
    refused(CouplingError, "the loss couples examples", model, 5, loss=loss)


def test_an_output_without_a_batch_dimension_is_refused():
    model = Custom(lambda m, x: m.layer(x).mean(), layer=nn.Linear(5, 3))
    refused(CouplingError, "its first dimension is not the batch", model, 5, loss=None)
