"""What ``fix`` changes, what it lists, and what it leaves alone."""

import pytest
import torch
from torch import nn

from curvedp.diagnostics import fix
from tests.diagnostics import architectures


@pytest.mark.parametrize(
    ("norm", "groups"),
    [
        (nn.BatchNorm2d(64), 32),
        (nn.BatchNorm2d(48), 24),
        (nn.BatchNorm3d(7), 1),
        (nn.BatchNorm2d(34), 17),
        (nn.SyncBatchNorm(96), 32),
        (nn.BatchNorm1d(64), 8),  # eight channels a group: its inputs may be [B, C]
        (nn.BatchNorm1d(6), 1),
        (nn.BatchNorm2d(16, affine=False), 8),
    ],
)
def test_batch_norm_becomes_group_norm(norm, groups):
    if norm.affine:
        torch.nn.init.uniform_(norm.weight)
        torch.nn.init.uniform_(norm.bias)
    model, (change,) = fix(nn.Sequential(norm))
    new = model[0]
    assert isinstance(new, nn.GroupNorm)
    assert (new.num_groups, new.num_channels) == (groups, norm.num_features)
    assert (change.name, change.after) == (
        "0",
        f"GroupNorm({groups}, {norm.num_features})",
    )
    assert new.affine == norm.affine
    if norm.affine:
        assert torch.equal(new.weight, norm.weight)
        assert torch.equal(new.bias, norm.bias)
        assert new.weight is not norm.weight


def test_a_batch_norm_that_is_public_stays():
    frozen = nn.BatchNorm2d(8).requires_grad_(False).eval()
    assert fix(nn.Sequential(frozen))[1] == []


def test_a_batch_norm_of_one_channel_or_of_ones_own_kind_stays():
    class Own(nn.BatchNorm2d):
        def forward(self, x):
            return torch.relu(super().forward(x))

    assert fix(nn.Sequential(nn.BatchNorm1d(1), Own(8)))[1] == []


def test_the_model_itself_and_shared_modules():
    model, changes = fix(nn.BatchNorm2d(8))
    assert isinstance(model, nn.GroupNorm)
    assert changes[0].name == "(the model itself)"
    norm = nn.BatchNorm2d(8)
    model, changes = fix(nn.ModuleList([norm, nn.Identity(), norm]))
    assert model[0] is model[2]
    assert len(changes) == 1


def test_dtype_and_frozen_weights_are_kept():
    norm = nn.BatchNorm2d(8).double()
    norm.bias.requires_grad_(False)
    model, _ = fix(nn.Sequential(norm))
    assert model[0].weight.dtype is torch.float64
    assert model[0].weight.requires_grad
    assert not model[0].bias.requires_grad


def test_everything_else_is_listed():
    model, inputs = architectures.mixed()
    fixed, changes = fix(model)
    assert {c.name: c.after for c in changes} == {
        "words": "max_norm=None",
        "norm": "GroupNorm(1, 8)",
        "instance": "track_running_stats=False",
        "attention": "dropout=0",
        "relu": "ReLU(inplace=False)",
    }
    assert fixed.instance.running_mean is None
    assert fixed(inputs).shape == (2, 4)
    assert torch.equal(fixed.instance.weight, model.instance.weight)
    assert fix(fixed)[1] == []
    untouched = {"conv.weight", "head.weight", "attention.in_proj_weight"}
    old, new = model.state_dict(), fixed.state_dict()
    assert all(torch.equal(old[n], new[n]) for n in untouched)


def test_a_model_that_needs_nothing():
    model, _ = architectures.vit()
    assert fix(model)[1] == []
