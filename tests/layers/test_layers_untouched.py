"""The model is left as it was; what changes during a private pass is refused."""

import pytest
import torch
import torch.nn.functional as F
from covering import (
    TEMPLATE,
    Custom,
    assert_same,
    assert_untouched_hooks,
    covered,
    cross_entropy,
    refused,
    snapshot,
)
from torch import nn

from curvedp.errors import ConfigurationError, CouplingError, LoopError
from curvedp.layers import Recording, cover, synthesiser_like
from curvedp.layers.coverage import set_training_mode, undisturbed

# -- buffers --------------------------------------------------------------------------


def counting(m, x):
    m.seen += x.detach().sum()
    return m.layer(x)


def replacing(m, x):
    m.seen = m.seen + x.detach().mean()
    return m.layer(x)


def registering(m, x):
    m.register_buffer("cache", x.detach().clone())
    return m.layer(x)


@pytest.mark.parametrize("forward", [counting, replacing, registering])
def test_a_buffer_that_changes_is_refused_and_put_back(forward):
    model = Custom(forward, layer=nn.Linear(5, 3))
    model.register_buffer("seen", torch.zeros(()))
    buffer = model.seen
    named = "cache" if forward is registering else "seen"
    refused(CouplingError, f"'{named}'", model, 5)
    assert dict(model.named_buffers()).keys() == {"seen"}
    assert model.seen is buffer
    assert float(model.seen) == 0


def test_a_counter_is_let_pass_and_put_back():
    def counting_calls(m, x):
        m.seen += 1
        return m.layer(x)

    model = Custom(counting_calls, layer=nn.Linear(5, 3))
    model.register_buffer("seen", torch.zeros(()))
    assert covered(model, 5) == {"layer": "Linear"}
    assert float(model.seen) == 0


# -- the model is left exactly as it was -----------------------------------------------


def lively_net():
    return nn.Sequential(
        nn.Linear(5, 4),
        nn.Dropout(0.5),
        nn.LayerNorm(4),
        nn.ReLU(True),
        nn.Linear(4, 3),
    )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("broken", [True, False])
def test_covering_leaves_model_and_random_state_alone(training, broken):
    model = lively_net().train(training)
    model[1].train(not training)  # a mixture of modes comes back too
    model[0].bias.requires_grad_(False)
    before, state = snapshot(model), torch.get_rng_state()
    loss = F.cross_entropy if broken else cross_entropy
    if broken:
        with pytest.raises(ConfigurationError):
            covered(model, 5, loss=loss)
    else:
        covered(model, 5)
    assert_same(model, before)
    assert torch.equal(torch.get_rng_state(), state)


class Resting(nn.Sequential):
    """Leaves its first layer in evaluation mode, and counts nothing else."""

    def train(self, mode=True):
        super().train(mode)
        self[0].eval()
        return self


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_that_is_checked_is_the_one_that_the_model_trains_in(training):
    norm = nn.BatchNorm1d(5, affine=False).eval()
    model = Resting(nn.Dropout(0.5), norm, nn.Linear(5, 3), nn.Dropout(0.1))
    for module in model.modules():
        module.training = training and module is not norm
    before = snapshot(model)
    with undisturbed(model):
        modes = [module.training for module in model.modules()]
    assert modes == [True, False, False, True, True]
    assert_same(model, before)
    set_training_mode(model)
    assert [module.training for module in model.modules()] == modes


def test_a_recorded_pass_leaves_the_model_alone():
    model = lively_net()
    coverage = cover(model, synthesiser_like(TEMPLATE, model), cross_entropy)
    before = snapshot(model)
    recording = Recording(model, coverage.covered, 2)
    output = recording.forward((torch.randn(2, 5),), {})
    assert_untouched_hooks(model)
    cross_entropy(output, torch.zeros(2, dtype=torch.int64)).sum().backward()
    recording.layer_ios()
    assert_same(model, before)


def test_a_forward_pass_that_fails_leaves_no_hooks():
    model = lively_net()
    coverage = cover(model, synthesiser_like(TEMPLATE, model), cross_entropy)
    before = snapshot(model)
    with pytest.raises(RuntimeError):
        Recording(model, coverage.covered, 2).forward((torch.randn(2, 6),), {})
    assert_same(model, before)


# -- what the private pass itself refuses ----------------------------------------------


def recorded(model, x, size):
    coverage = cover(model, synthesiser_like(TEMPLATE, model), cross_entropy)
    recording = Recording(model, coverage.covered, size)
    return recording, recording.forward((x,), {})


def test_a_batch_of_another_size_than_declared_is_refused():
    recording, output = recorded(nn.Linear(5, 3), torch.randn(4, 5), size=3)
    output.sum().backward()
    with pytest.raises(CouplingError, match="not the batch of 3"):
        recording.layer_ios()


def test_backward_twice_is_refused():
    recording, output = recorded(nn.Linear(5, 3), torch.randn(2, 5), size=2)
    output.sum().backward(retain_graph=True)
    with pytest.raises(LoopError, match="twice"):
        output.sum().backward()
    assert recording.reached


def test_an_input_modified_after_its_layer_is_refused():
    def forward(m, x):
        h = x * 1
        out = m.a(h)
        h.mul_(0)
        return out

    model = Custom(forward, a=nn.Linear(5, 3))
    with pytest.raises(LoopError, match="'a'"):
        covered(model, 5)


def test_layer_values_never_show_in_a_repr():
    recording, output = recorded(nn.Linear(5, 3), torch.full((2, 5), 1234.5), size=2)
    output.sum().backward()
    (io,) = recording.layer_ios()
    assert repr(io) == "DenseIO('')"
