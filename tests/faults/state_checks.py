"""Nothing that a pass leaves in a model gets past the noise; it stays as built."""

from __future__ import annotations

from unittest.mock import patch

import torch
from torch import nn

from curvedp.errors import CouplingError, LoopError
from curvedp.layers import contents
from curvedp.layers.state import State

from .cases import attach, examples, linear, train
from .checking import refused


class Keeps(nn.Module):
    """Writes the mean of what it sees in some way, once it is told to."""

    def __init__(self, write):
        super().__init__()
        torch.manual_seed(1)
        self.head = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(4))
        self.code = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.log = {}
        self.write, self.told = write, False

    def forward(self, x):
        if self.told:
            self.write(self, x.detach().mean(0))
        return self.head(x)


def _refused(write, name):
    model = Keeps(write)
    private = attach(
        examples(),
        model,
        noise_multiplier=50.0,
        optimizer=torch.optim.SGD(model.head.parameters(), lr=0.1),
    )
    model.told = True
    refused(CouplingError, f"'{name}'", lambda: train(private))
    assert not model.seen.any(), "the buffer kept it"
    assert not model.code.any(), "the frozen weight kept it"
    assert not hasattr(model, "last"), "the attribute kept it"
    assert not model.log, "the dictionary kept it"


def buffer_written_through_data_is_refused():
    _refused(lambda m, mean: m.seen.data.copy_(mean), "seen")


def as_on_a_gpu(copied):
    """A comparison that is made, and whose answer nobody has waited for."""
    pairs = zip(copied.pieces, copied.held, strict=True)
    return torch.stack([(x != y).any() for x, y in pairs]).any()


#: As after a first step in which no cache or counter moved.
STILL = property(lambda state: True, lambda state, value: None)


def weight_written_in_a_pass_on_a_gpu_is_refused():
    with (
        patch.object(contents._Copied, "differs", as_on_a_gpu),
        patch.object(State, "_still", STILL, create=True),
    ):
        frozen_weight_written_in_a_pass_is_refused()


def frozen_weight_written_in_a_pass_is_refused():
    _refused(lambda m, mean: m.code.data.copy_(mean), "code")


def attribute_written_in_a_pass_is_refused():
    _refused(lambda m, mean: setattr(m, "last", mean), "last")


def entry_written_in_a_pass_is_refused():
    _refused(lambda m, mean: m.log.update(last=mean), "log")


class KeepsTerm(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        self.term = x.detach().mean(0)
        return self.head(x)


def what_every_pass_writes_anew_is_gone_after_it():
    model = KeepsTerm()
    train(attach(examples(), model))
    assert not hasattr(model, "term"), "the term is still there"


def running_mean_is_refused_when_attached():
    class Runs(KeepsTerm):
        term = torch.zeros(4)

        def forward(self, x):
            self.term = 0.9 * self.term + x.detach().mean(0)
            return self.head(x)

    refused(CouplingError, "'term' changed", lambda: attach(examples(), Runs()))


def hook_after_attaching_is_refused():
    model = nn.Sequential(linear(), nn.Identity())
    private = attach(examples(), model)
    model[1].register_forward_hook(lambda m, args, output: output - output.mean(0))
    refused(LoopError, "forward hook", lambda: train(private))


def forward_replaced_after_attaching_is_refused():
    model = nn.Sequential(linear(), nn.Identity())
    private = attach(examples(), model)
    model[1].forward = lambda x: x - x.mean(0)
    refused(LoopError, "after make_private", lambda: train(private))


def module_exchanged_after_attaching_is_refused():
    model = nn.Sequential(linear(), nn.Identity())
    private = attach(examples(), model)
    model[1] = nn.BatchNorm1d(3, affine=False, track_running_stats=False)
    refused(LoopError, "exchanged", lambda: train(private))
