"""Inputs that are made again: the same gradients to the bit, in less memory."""

import gc
import weakref

import pytest
import torch
from nets import ALL, loss
from passes import SEED
from torch import nn
from torch.nn import functional as F

from curvedp.errors import LoopError
from curvedp.layers import Batch, Recording, as_call, cover, synthesiser_like
from curvedp.layers.dense import DenseIO
from curvedp.layers.remade import Remade, Remaker
from curvedp.models import build
from curvedp.testing.live import LiveBytes

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using padding='same' with even kernel:UserWarning"
)

SIZE = 5


def recorded(model, coverage, batch, remaker=None, parameters=None):
    torch.manual_seed(SEED)
    recording = Recording(model, coverage.covered, SIZE, remaker=remaker)
    output = recording.forward(*as_call(batch.inputs), parameters)
    loss(output, batch.targets).sum().backward()
    return recording.layer_ios()


def assert_same(ios, expected):
    assert len(ios) == len(expected)
    for one, other in zip(ios, expected, strict=True):
        assert type(one) is type(other)
        found, twin = one.per_example(), other.per_example()
        assert found.keys() == twin.keys()
        assert all(torch.equal(found[n], twin[n]) for n in twin)


@pytest.fixture
def remade(monkeypatch):
    """How often something was made again."""
    made, init = [], Remade.__init__

    def counting(self, like, make):
        def counted():
            made.append(tuple(like_shape))
            return make()

        like_shape = like.shape
        init(self, like, counted)

    monkeypatch.setattr(Remade, "__init__", counting)
    return made


@pytest.mark.parametrize("net", ALL[::3], ids=str)
def test_any_net_has_the_same_gradients(net):
    model = net.make()
    coverage = cover(model, net.synthesiser(), loss)
    batch = net.batch(SIZE, torch.Generator().manual_seed(5))
    expected = recorded(model, coverage, batch)
    assert_same(recorded(model, coverage, batch, Remaker()), expected)


class Net(nn.Module):
    """Two convolutions on one input that a norm layer and an activation have made."""

    def __init__(self, activation=F.relu, norm=None, between=None):
        super().__init__()
        self.first = nn.Conv2d(2, 8, 3, padding=1)
        self.norm = norm or nn.GroupNorm(2, 8)
        self.one = nn.Conv2d(8, 8, 3, padding=1)
        self.two = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 3)
        self.activation = activation
        self.between = between or (lambda x: x)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x):
        before = self.first(x)
        active = self.between(self.activation(self.norm(before)))
        return self.head((self.one(active) + self.two(active)).mean((2, 3)))


def attached(model):
    torch.manual_seed(0)
    x, y = torch.randn(SIZE, 2, 12, 12), torch.arange(SIZE) % 3
    coverage = cover(model, synthesiser_like(Batch(x[:1], y[:1]), model), loss)
    return coverage, Batch(x, y)


WAYS = {
    "relu": {},
    "relu in place": {"activation": nn.ReLU(inplace=True)},
    "tanh": {"activation": torch.tanh},
    "sigmoid": {"activation": torch.sigmoid},
    "silu": {"activation": F.silu},
    "gelu": {"activation": F.gelu},
    "gelu by tanh": {"activation": lambda x: F.gelu(x, approximate="tanh")},
    "none": {"activation": lambda x: x},
    "layer norm": {"norm": nn.LayerNorm([8, 12, 12])},
}


@pytest.mark.parametrize("way", WAYS)
def test_an_input_of_two_layers_is_made_once_and_is_the_same(way, remade):
    torch.manual_seed(3)
    model = Net(**WAYS[way])
    coverage, batch = attached(model)
    expected = recorded(model, coverage, batch)
    assert not remade
    assert_same(recorded(model, coverage, batch, Remaker()), expected)
    assert remade == [(SIZE, 8, 12, 12)]


NOT_MADE = {
    "another activation": {"activation": F.softplus},
    "another norm": {"norm": nn.InstanceNorm2d(8, affine=True)},
    "something between": {"between": lambda x: 2 * x},
    "a part of it": {"between": lambda x: x[:, :, 1:]},
}


@pytest.mark.parametrize("way", NOT_MADE)
def test_what_is_of_no_known_form_is_kept(way, remade):
    model = Net(**NOT_MADE[way])
    coverage, batch = attached(model)
    expected = recorded(model, coverage, batch)
    assert_same(recorded(model, coverage, batch, Remaker()), expected)
    assert not remade


class Doubled(nn.GroupNorm):
    def forward(self, x):
        return 2 * super().forward(x)


class DoubledBefore(nn.GroupNorm):
    def forward(self, x):
        return super().forward(2 * x + x.abs())


@pytest.mark.parametrize("norm", [Doubled, DoubledBefore])
def test_a_norm_layer_with_a_forward_of_its_own_is_left_alone(norm, remade):
    torch.manual_seed(3)
    model = Net(norm=norm(2, 8))
    coverage, batch = attached(model)
    expected = recorded(model, coverage, batch)
    assert_same(recorded(model, coverage, batch, Remaker()), expected)
    assert not remade


LATER = {
    "a hook": lambda norm: norm.register_forward_hook(lambda m, a, y: 2 * y),
    "a hook that normalises": lambda norm: norm.register_forward_hook(
        lambda m, a, y: F.group_norm(y, 4)
    ),
    "a forward": lambda norm: setattr(
        norm, "forward", lambda x: nn.GroupNorm.forward(norm, x + x.abs())
    ),
}


@pytest.mark.parametrize("change", LATER)
def test_a_norm_layer_that_was_changed_later_is_left_alone(change, remade):
    """Attaching refuses these; what comes afterwards must not be guessed either."""
    torch.manual_seed(3)
    model = Net()
    coverage, batch = attached(model)
    LATER[change](model.norm)
    expected = recorded(model, coverage, batch)
    assert_same(recorded(model, coverage, batch, Remaker()), expected)
    assert not remade


def test_parameters_are_those_of_the_forward_pass(remade):
    model = Net()
    coverage, batch = attached(model)
    point = {n: p.detach() + 0.3 for n, p in model.named_parameters()}
    expected = recorded(model, coverage, batch, parameters=point)
    assert_same(recorded(model, coverage, batch, Remaker(), point), expected)
    assert remade


def test_an_input_that_another_layer_keeps_is_not_made(remade):
    """Of few positions and many weights, which needs its input for the sum."""
    model = nn.ModuleDict(
        {
            "first": nn.Conv2d(2, 32, 3, stride=4),
            "norm": nn.GroupNorm(2, 32),
            "small": nn.Conv2d(32, 2, 1),
            "large": nn.Conv2d(32, 32, 3, padding=1),
            "head": nn.Linear(34, 3),
        }
    )

    def forward(x):
        active = F.relu(model["norm"](model["first"](x)))
        both = torch.cat([model["small"](active), model["large"](active)], 1)
        return model["head"](both.mean((2, 3)))

    model.forward = forward
    coverage, batch = attached(model)
    ios = recorded(model, coverage, batch)
    assert [type(io) is DenseIO for io in ios] == [False, False, False, True, True]
    assert_same(recorded(model, coverage, batch, Remaker()), ios)
    assert not remade


class Later(Net):
    """Writes to an input after a layer has used it."""

    in_place = False

    def forward(self, x):
        active = F.relu(self.norm(self.first(x)))
        one = self.one(active)
        if self.in_place:
            active += 1
        else:
            active = active + 1
        return self.head((one + self.two(active)).mean((2, 3)))


def test_an_input_that_is_written_to_later_is_made_as_it_was(remade):
    model = Later()
    coverage, batch = attached(model)
    expected = recorded(model, coverage, batch)
    model.in_place = True
    with pytest.raises((LoopError, RuntimeError), match="modified"):
        recorded(model, coverage, batch)
    assert_same(recorded(model, coverage, batch, Remaker()), expected)
    assert len(remade) == 1


def test_what_an_input_is_made_from_must_not_be_written_to():
    model = Net()
    coverage, batch = attached(model)
    seen = {}
    handle = model.first.register_forward_hook(
        lambda module, args, output: seen.update(before=output)
    )
    recording = Recording(model, coverage.covered, SIZE, remaker=Remaker())
    output = recording.forward(*as_call(batch.inputs))
    handle.remove()
    with torch.no_grad():
        seen["before"].mul_(2)
    with pytest.raises(LoopError, match="modified in place"):
        loss(output, batch.targets).sum().backward()


def test_a_tensor_that_autograd_saved_must_not_be_written_to():
    class Squared(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            self.output = self.layer(x)
            return self.output.square()

    model, x = Squared(), torch.randn(SIZE, 4)
    coverage = cover(model, synthesiser_like(Batch(x[:1], None), model), None)
    recording = Recording(model, coverage.covered, SIZE, remaker=Remaker())
    output = recording.forward((x,), {})
    with torch.no_grad():
        model.output.mul_(2)
    with pytest.raises(LoopError, match="modified in place"):
        output.sum().backward()


def passed(model, coverage, x, remaker):
    recording = Recording(model, coverage.covered, len(x), remaker=remaker)
    with LiveBytes([*model.parameters(), x]) as live:
        output = recording.forward((x,), {})
        kept = live.now()
        output.square().sum().backward()
        del output
        after = live.now()
        ios = recording.layer_ios()
    return kept, live.peak, after, ios


def test_a_wide_residual_net_keeps_and_needs_less():
    torch.manual_seed(0)
    model = build("wrn-16-4", (3, 32, 32), 10)
    x = torch.rand(4, 3, 32, 32)
    coverage = cover(model, synthesiser_like(Batch(x[:1], None), model), None)
    kept, peak, after, ios = passed(model, coverage, x, None)
    kept_less, peak_less, after_less, same = passed(model, coverage, x, Remaker())
    assert_same(same, ios)
    # inputs of 64 channels four times, of 128 three times, and the first, of 16
    one = 4 * 64 * 32 * 32 * 4
    assert kept - kept_less == 4 * one + 3 * one // 2 + one // 4
    assert peak - peak_less >= 3 * one
    assert after_less <= after  # nothing of it is left


def test_a_pass_leaves_nothing_alive_and_no_cycle():
    model = Net()
    coverage, batch = attached(model)
    gc.collect()
    gc.disable()
    try:
        remaker = Remaker()
        ios = recorded(model, coverage, batch, remaker)
        gone = weakref.ref(remaker)
        del remaker, ios
        assert gone() is None
    finally:
        gc.enable()


def test_nobody_gets_what_is_gone():
    x = torch.randn(3)
    remade = Remade(x, x.clone)
    remade.awaited().awaited()
    assert torch.equal(remade.opened(), x)
    assert remade.opened() is not x
    with pytest.raises(LoopError, match="again after that pass"):
        remade.opened()


def test_backward_runs_once():
    model = Net()
    coverage, batch = attached(model)
    recording = Recording(model, coverage.covered, SIZE, remaker=Remaker())
    total = loss(recording.forward(*as_call(batch.inputs)), batch.targets).sum()
    total.backward(retain_graph=True)
    with pytest.raises(LoopError, match="twice"):
        total.backward()
