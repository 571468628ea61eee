"""A gradient that is zero is accepted; a small use that no rule sees is not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from curvedp.errors import CouplingError, CoverageError
from curvedp.layers import Batch, cover, synthesiser_like, trial
from curvedp.layers.tolerance import COUPLING, NEGLIGIBLE, TOLERANCE, close

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str
)


def covered(model, *shape, dtype=torch.float32):
    template = Batch(torch.zeros(1, *shape, dtype=dtype), None)
    model = model.to(dtype)
    return cover(model, synthesiser_like(template, model))


# -- gradients that are zero whatever the data -----------------------------------------


class Attention(nn.Module):
    """With the bias on its keys that every library gives it."""

    def __init__(self, d=8):
        super().__init__()
        self.query, self.key = nn.Linear(d, d), nn.Linear(d, d)
        self.value, self.proj = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(2, (2, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v)
        return x + self.proj(mixed.transpose(1, 2).flatten(2))


class OwnBiases(nn.Module):
    """Biases of keys and values as parameters of the module, one weight for both."""

    def __init__(self, d=8):
        super().__init__()
        self.both = nn.Linear(d, 2 * d, bias=False)
        self.key_bias = nn.Parameter(torch.randn(d))
        self.value_bias = nn.Parameter(torch.randn(d))

    def forward(self, x):
        k, v = self.both(x).chunk(2, 2)
        scores = x @ (k + self.key_bias).mT
        return x + scores.softmax(-1) @ (v + self.value_bias)


class TokenMixing(nn.Module):
    def __init__(self, tokens):
        super().__init__()
        self.mix = nn.Linear(tokens, tokens)

    def forward(self, x):
        return x + self.mix(x.mT).mT


def biases_only(model):
    for name, p in model.named_parameters():
        p.requires_grad_("bias" in name)
    return model


def images(*layers):
    return nn.Sequential(*layers, nn.GELU(), nn.Conv2d(4, 2, 3), nn.Flatten(2))


def sequences(*blocks):
    return nn.Sequential(nn.Linear(5, 8), *blocks, nn.LayerNorm(8), nn.Linear(8, 3))


ZERO = {
    "key-bias": (lambda: sequences(Attention(), Attention()), (40, 5)),
    "key-bias-alone": (lambda: biases_only(sequences(Attention())), (40, 5)),
    "key-bias-parameter": (lambda: sequences(OwnBiases()), (40, 5)),
    "token-bias": (lambda: sequences(TokenMixing(40)), (40, 5)),
    "instance-norm": (
        lambda: images(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4)),
        (3, 24, 24),
    ),
    "one-channel-groups": (
        lambda: images(nn.Conv2d(3, 4, 3), nn.GroupNorm(4, 4)),
        (3, 24, 24),
    ),
    "transposed": (
        lambda: images(nn.ConvTranspose2d(3, 4, 3), nn.InstanceNorm2d(4)),
        (3, 24, 24),
    ),
}


@DTYPES
@pytest.mark.parametrize("name", ZERO)
def test_a_gradient_that_is_always_zero_is_accepted(name, dtype):
    make, shape = ZERO[name]
    model = make()
    expected = {n for n, p in model.named_parameters() if p.requires_grad}
    assert set(covered(model, *shape, dtype=dtype).parameters) == expected


@pytest.mark.parametrize("name", ZERO)
def test_so_it_is_where_float64_cannot_be_had(name, monkeypatch):
    monkeypatch.setattr(trial, "LARGEST_COPY", 0)
    make, shape = ZERO[name]
    covered(make(), *shape)


def test_long_sequences_in_bfloat16_are_accepted():
    """Autograd adds the bias of a norm up in bfloat16: a third of it is lost."""
    model = sequences(Attention(), nn.LayerNorm(8), Attention())
    covered(model, 600, 5, dtype=torch.bfloat16)


# -- small uses past the module --------------------------------------------------------


class Used(nn.Module):
    """A parameter of the inner net, used once more past its module, scaled.

    For most it adds to a gradient that is there. For the bias of keys it is all there
    is, because the attention gives none.
    """

    def __init__(self, name, scale):
        super().__init__()
        self.inner = sequences(Attention())
        self.name, self.scale = name, scale

    def forward(self, x):
        p = dict(self.inner.named_parameters())[self.name]
        y = self.inner(x)
        return y + self.scale * y.mean(1, keepdim=True) * p.sum()


@DTYPES
@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e-3, 1e-4])
@pytest.mark.parametrize("name", ["1.value.weight", "1.key.bias", "2.weight"])
def test_a_small_functional_use_is_refused_by_name(name, scale, dtype):
    with pytest.raises(CoverageError, match=f"inner.{name}"):
        covered(Used(name, scale), 6, 5, dtype=dtype)


@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e-3])
def test_so_it_is_for_zero_gradients_where_float64_cannot_be_had(scale, monkeypatch):
    monkeypatch.setattr(trial, "LARGEST_COPY", 0)
    with pytest.raises(CoverageError, match=r"inner.1.key.bias"):
        covered(Used("1.key.bias", scale), 6, 5)


@pytest.mark.parametrize("strength", [1.0, 1e-4, 1e-6])
def test_a_weak_coupling_is_refused(strength):
    class Coupled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad + strength * grad.tanh().mean(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(Coupled.apply(self.body(x))).square()

    with pytest.raises((CouplingError, CoverageError), match="'body"):
        covered(Net(), 5)


# -- models that float64 does not suit -------------------------------------------------


class Float32Inside(nn.Module):
    """Norms in float32 whatever it is given, as several language models do."""

    def forward(self, x):
        y = x.float()
        return (y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()).to(x.dtype)


class Float32Only(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = torch.randn(8, 8)  # no buffer: it stays in float32

    def forward(self, x):
        return x @ self.matrix


class Uncopied(nn.Module):
    def __deepcopy__(self, memo):
        raise RuntimeError("holds a handle")

    def forward(self, x):
        return x


@pytest.mark.parametrize("inside", [Float32Inside, Float32Only, Uncopied])
def test_other_models_are_judged_too(inside):
    model = sequences(Attention(), inside(), OwnBiases())
    covered(model, 6, 5)
    model = Used("1.key.bias", 1e-2)
    model.inner.insert(2, inside())
    with pytest.raises(CoverageError, match=r"inner.1.key.bias"):
        covered(model, 6, 5)


def test_a_model_that_does_something_else_in_float64_is_judged_itself():
    class Sly(Used):
        def forward(self, x):
            return self.inner(x) if x.dtype is torch.float64 else super().forward(x)

    with pytest.raises(CoverageError, match=r"inner.1.value.weight"):
        covered(Sly("1.value.weight", 1.0), 6, 5)


def test_an_unused_parameter_inside_a_module_that_needs_vmap_is_refused():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Parameter(torch.randn(6, 6, 8))
            self.spare = nn.Parameter(torch.randn(3))

        def forward(self, x):
            return torch.einsum("tsd,bsd->btd", self.mix, x)

    with pytest.raises(CoverageError, match="spare"):
        covered(sequences(Half()), 6, 5)


# -- the rule itself -------------------------------------------------------------------


def test_agreement_is_relative_to_the_gradient_or_to_the_whole_model():
    x = torch.tensor([1.0, 0.0], dtype=torch.float64)
    noise = torch.tensor([0.0, 1.0], dtype=torch.float64)
    r, n = TOLERANCE[torch.float64], NEGLIGIBLE[torch.float64]
    for size in (1e-30, 1.0, 1e30):  # no unit is special
        assert close(size * x, size * (x + 0.9 * r * noise))
        assert not close(size * x, size * (x + 2 * r * noise))
        tiny = 0.4 * n * size
        assert close(tiny * x, tiny * noise, scale=size)
        assert not close(tiny * x, tiny * noise, scale=size, strictness=COUPLING)
        assert not close(tiny * x, tiny * noise)
        assert not close(5 * tiny * x, 5 * tiny * noise, scale=size)


def test_what_is_not_a_number_agrees_with_nothing():
    x = torch.ones(2)
    for wrong in (float("nan"), float("inf")):
        assert not close(x, x * wrong, scale=1.0)
        assert not close(x * wrong, x * wrong, scale=1.0)
    assert close(0 * x, 0 * x)
    assert not close(x, torch.ones(3))
