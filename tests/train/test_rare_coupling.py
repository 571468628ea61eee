"""Rows that are tied in some passes only, or by what is not finite only."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from curvedp.errors import ConfigurationError, CouplingError

from .test_coupling_at_size import Middle, Net, attach, first_pass

DRAWS = {
    "torch": lambda: float(torch.rand(())),
    "python": random.random,
    "numpy": np.random.rand,
}


def sometimes(draw, share):
    """Manifold mixup in some passes."""
    return lambda h, net: (
        0.6 * h + 0.4 * h.flip(0) if len(h) >= 8 and draw() < share else h
    )


@pytest.mark.parametrize("share", [0.4, 0.1])
@pytest.mark.parametrize("draw", DRAWS)
def test_what_is_mixed_in_some_passes_is_found(draw, share):
    with pytest.raises(CouplingError, match="another example"):
        attach(Net(Middle(sometimes(DRAWS[draw], share))))


@pytest.mark.parametrize(
    "generator", [random.Random(3), np.random.default_rng(3), np.random.RandomState(3)]
)
def test_what_a_held_generator_mixes_in_some_passes_is_found(generator):
    model = Net(Middle(sometimes(generator.random, 0.1)))
    with pytest.raises(CouplingError, match="another example"):
        attach(model)


def test_an_order_that_is_drawn_sometimes_is_found():
    def shuffled(h, net):
        return h[torch.randperm(len(h))] if len(h) >= 8 and torch.rand(()) < 0.1 else h

    with pytest.raises(CouplingError, match="another example"):
        attach(Net(Middle(shuffled)))


@pytest.mark.parametrize("draw", [*DRAWS, "given"])
def test_batches_that_are_mixed_sometimes_are_refused(draw):
    def mixed(x, generator=None):
        given = draw == "given"
        number = torch.rand((), generator=generator) if given else DRAWS[draw]()
        return 0.3 * x + 0.7 * x.flip(0) if number < 0.3 else x

    with pytest.raises(CouplingError, match="changes the views"):
        attach(nn.Linear(6, 4), augment=mixed)
    with pytest.raises(ConfigurationError, match="mixes rows"):
        attach(nn.Linear(6, 4), prepare=lambda b: (mixed(b[0]), b[1]))


def test_functions_for_one_size_of_batch_are_refused_too():
    def mixed(x):
        assert len(x) != 8
        return 0.3 * x + 0.7 * x.flip(0) if torch.rand(()) < 0.3 else x

    with pytest.raises(ConfigurationError, match="mixes rows"):
        attach(nn.Linear(6, 4), prepare=lambda b: (mixed(b[0]), b[1]))
    with pytest.raises(CouplingError, match="changes the views"):
        attach(nn.Linear(6, 4), augment=lambda x, generator: mixed(x))


def dropped_paths(h, net):
    return h * (torch.rand(len(h), 1) < 0.8) + 0.1 * torch.randn_like(h)


def layers_dropped(h, net):
    return h if torch.rand(()) < 0.3 else torch.relu(h)


@pytest.mark.parametrize("middle", [dropped_paths, layers_dropped])
def test_what_is_drawn_for_each_row_or_for_all_alike_passes(middle):
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]
    first_pass(attach(Net(Middle(middle), dropout=0.3)))
    torch.set_rng_state(states[0])
    attach(Net(Middle(middle), dropout=0.3), augment=lambda x, g: x * random.random())
    assert random.getstate() == states[1]
    assert np.random.get_state()[2] == states[2]


def attended(h, net):
    others = ~torch.eye(len(h), dtype=torch.bool)
    return torch.softmax((h @ h.T).masked_fill(others, -torch.inf), -1) @ h


def summed(h, net):
    c = torch.cumsum(h.double(), 0)
    return (c - torch.cat([c.new_zeros(1, c.shape[1]), c[:-1]])).to(h)


REACHED = {
    "times zero": lambda h, net: h + 0 * h.sum(),
    "one-hot": lambda h, net: torch.eye(len(h)).to(h) @ h,
    "attention": attended,
    "cumulative": summed,
    "whole batch": lambda h, net: h if h.isfinite().all() else torch.zeros_like(h),
    "largest": lambda h, net: h if h.abs().max() < 1e30 else h * 0,
}


class Raw(Net):
    """The middle comes first, before any squashing."""

    def forward(self, x):
        return super().forward(self.middle(x, self))


@pytest.mark.parametrize("kind", REACHED)
def test_rows_that_are_not_finite_reach_no_others(kind):
    with pytest.raises(CouplingError, match=r"not finite reaches others.*middle"):
        attach(Raw(Middle(REACHED[kind])))


def whole(losses):
    return torch.where(losses.isfinite().all(), losses, torch.zeros_like(losses))


def test_a_loss_that_leaves_out_batches_is_refused():
    def skipping(output, targets):
        return whole(nn.functional.cross_entropy(output, targets, reduction="none"))

    with pytest.raises(CouplingError, match="not finite reaches others through the lo"):
        attach(nn.Linear(6, 4), loss=skipping)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.body, self.head = kind(6, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.body(x[:, None].expand(-1, 3, -1))[0].mean(1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        x = x[:, None] * torch.ones(1, 3, 1)
        return self.head(self.body(x, x, x)[0].mean(1))


def says_no(h, net):
    assert h.isfinite().all()
    return h


HONEST = {
    "gru": lambda: Recurrent(nn.GRU),
    "lstm": lambda: Recurrent(nn.LSTM),
    "attention": Attention,
    "asserts": lambda: Raw(Middle(says_no)),
    "way out": lambda: Raw(
        Middle(lambda h, net: REACHED["one-hot"](made_finite(h), net))
    ),
}


def made_finite(h):
    return torch.nan_to_num(h, 0, 0, 0).clamp(-1e4, 1e4)


@pytest.mark.parametrize("kind", HONEST)
@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}])
def test_nets_in_which_such_rows_stay_alone_pass(kind, options):
    attach(HONEST[kind](), **options)
