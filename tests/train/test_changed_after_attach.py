"""What was checked is what runs: a model that was rebuilt since is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from curvedp.errors import CouplingError, LoopError

from ..faults.cases import attach, examples, train


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), Wrapped(), nn.Linear(6, 3))


class Wrapped(nn.Module):
    """Calls what it holds."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()
        self.squash = torch.tanh

    def forward(self, x):
        return self.squash(self.inner(x))


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


def centred(module, args, output):
    return output - output.mean(0)


def batch_norm_without_weights(model):
    model[2].inner = nn.BatchNorm1d(6, affine=False, track_running_stats=False)


def module_inserted(model):
    model.insert(1, Centred())


def module_appended(model):
    model[2].late = Centred()


def module_removed(model):
    del model[2]


def another_type(model):
    model[2].inner.__class__ = Centred


def forward_hook(model):
    model[1].register_forward_hook(centred)


def forward_pre_hook(model):
    model[1].register_forward_pre_hook(lambda m, args: (args[0] - args[0].mean(0),))


def backward_hook(model):
    model[1].register_full_backward_hook(lambda m, i, o: (i[0] - i[0].mean(0),))


def backward_pre_hook(model):
    model[1].register_full_backward_pre_hook(lambda m, o: (o[0] - o[0].mean(0),))


def hook_on_a_weight(model):
    model[0].weight.register_hook(lambda g: g - g.mean())


def hook_after_accumulation(model):
    model[0].weight.register_post_accumulate_grad_hook(lambda p: None)


def forward_of_an_instance(model):
    own = model[1].forward
    model[1].forward = lambda x: own(x - x.mean(0))


def function_that_is_called(model):
    model[2].squash = lambda x: torch.tanh(x - x.mean(0))


def parametrization(model):
    parametrize.register_parametrization(model[0], "weight", nn.Identity())


CHANGES = [
    batch_norm_without_weights,
    module_inserted,
    module_appended,
    module_removed,
    another_type,
    forward_hook,
    forward_pre_hook,
    backward_hook,
    backward_pre_hook,
    hook_on_a_weight,
    hook_after_accumulation,
    forward_of_an_instance,
    function_that_is_called,
    parametrization,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_a_model_that_was_rebuilt_is_refused_before_a_payment(change):
    model = net()
    private = attach(examples(), model)
    change(model)
    with pytest.raises(LoopError, match=r"after make_private") as refusal:
        train(private)
    assert "call make_private" in str(refusal.value)
    assert private._engine.ledger.count() == 0


@pytest.mark.parametrize("change", [forward_hook, forward_of_an_instance])
def test_the_same_in_the_middle_of_a_run(change):
    model = net()
    private = attach(examples(), model)
    with pytest.raises(LoopError, match="after make_private"):
        for batch in private.loader:
            private.train_on(batch)
            if private.step == 1:
                change(model)
    assert private.step == 1


def test_a_change_stays_refused_until_it_is_undone():
    model = net()
    private = attach(examples(), model)
    batches = iter(private.loader)
    x, y = next(batches)
    handle = model[1].register_forward_hook(centred)
    with torch.no_grad():
        private.model(x)  # looks over the model as well, and checks nothing
    for _ in range(2):
        with pytest.raises(LoopError, match="forward hook"):
            private.model(x)
    handle.remove()
    private.loss(private.model(x), y).backward()
    private.optimizer.step()


def test_a_layer_that_rebuilds_itself_is_refused():
    class Late(nn.Module):
        told = False

        def forward(self, x):
            if self.told and not self._forward_hooks:
                self.register_forward_hook(centred)
            return x

    model = nn.Sequential(nn.Linear(4, 6), Late(), nn.Linear(6, 3))
    private = attach(examples(), model)
    model[1].told = True
    with pytest.raises((LoopError, CouplingError)):
        train(private)
    assert private.step <= 1


def test_hooks_for_all_modules_are_refused():
    private = attach(examples(), net())
    handle = nn.modules.module.register_module_forward_hook(centred)
    try:
        with pytest.raises(LoopError, match="a hook for all modules"):
            train(private)
    finally:
        handle.remove()
    train(private)


def test_the_forward_of_a_class_is_refused(monkeypatch):
    private = attach(examples(), net())
    monkeypatch.setattr(Wrapped, "forward", lambda self, x: x - x.mean(0))
    with pytest.raises(LoopError, match="forward of Wrapped was replaced"):
        train(private)


def test_a_frozen_batch_norm_that_trains_is_refused():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6).eval(), nn.Linear(6, 3))
    model[1].requires_grad_(False)
    private = attach(examples(), model)
    private.model.train()
    for x, _ in private.loader:
        private.model(x)
        break
    model.train()
    for x, _ in private.loader:
        with pytest.raises(LoopError, match="was frozen when it was attached"):
            private.model(x)
        break


def test_hooks_that_were_there_when_it_was_checked_stay():
    model = net()
    seen = []
    model[1].register_forward_hook(lambda m, args, output: seen.append(1))
    model[0].weight.register_hook(lambda g: g)
    train(attach(examples(), model))
    assert seen


def test_what_is_no_part_of_the_computation_may_change():
    model = net()
    model.temperature = 1.0
    private = attach(examples(), model)
    for x, y in private.loader:
        model.temperature *= 0.9
        model.note = {"step": private.step}
        private.loss(private.model(x), y).backward()
        private.optimizer.step()
    assert model.temperature < 1
