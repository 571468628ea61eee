"""The bound holds after rounding, also for examples that are made to break it.

Every example here is built so that ``sum_t d_t a_t^T`` cancels almost entirely, which
is where a float32 norm loses its digits, or so that magnitudes leave the range in which
float32 has any.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from passes import in_float64
from torch import nn

from curvedp.clipping import (
    FlatClipping,
    NormalisedClipping,
    PerLayerClipping,
    bounded,
)
from curvedp.clipping.bounded import clipped_sum
from curvedp.layers import dense, lookup, precision, rounding
from curvedp.layers.conv import ConvGeometry
from curvedp.layers.costs import NormMethod
from curvedp.layers.dense import DenseIO
from curvedp.layers.io import DirectIO
from curvedp.layers.linear import LinearGeometry
from curvedp.layers.lookup import LookupIO
from curvedp.layers.precision import NormPrecision, exact, norms_in
from curvedp.whitening import (
    IdentityWhitener,
)

#: The bound holds up to the rounding of the measurement's float32 inputs.
SLACK = 1e-6

#: Without an allowance the hostile examples exceed the bound by at least this factor.
VISIBLE = 1.5

METHODS = list(NormMethod)
RULES = [FlatClipping, NormalisedClipping, PerLayerClipping]


def linear_io(a, d, method=None):
    """A bias-free linear layer that saw ``a [B, T, p]`` and ``d [B, T, r]``."""
    shape = torch.Size((d.shape[-1], a.shape[-1]))
    return DenseIO(
        "layer", "layer.weight", None, [(a, d)], LinearGeometry(shape), method
    )


@pytest.fixture(params=list(NormPrecision), ids=lambda norms: norms.value)
def norms(request):
    """Norms as on this machine, as on a GPU without fast float64, on tensor cores."""
    with norms_in(request.param):
        yield request.param


def counting_what_is_left(monkeypatch):
    """Norms of what cancels are what they are, and contributions are not shortened."""
    monkeypatch.setattr(rounding, "REACH", dict.fromkeys(rounding.REACH, math.inf))
    monkeypatch.setattr(bounded, "kept_of_bound", lambda *_: 1.0)


def without_allowances(monkeypatch, *modules):
    counting_what_is_left(monkeypatch)
    for module in modules:
        monkeypatch.setattr(module, "ROUNDING", dict.fromkeys(precision.ROUNDING, 0.0))
        monkeypatch.setattr(module, "gamma", lambda *_: 0.0, raising=False)
        monkeypatch.setattr(module, "lost", lambda *_: 0.0, raising=False)


def contribution(io, rule):
    """Largest weight times float64 gradient of the very same values, over the bound."""
    with exact(torch.device("cpu")):
        weights = rule.weights(io.sq_norms().unsqueeze(0))[0].double()
    squares = sum(
        g.reshape(len(g), -1).square().sum(1) for g in in_float64(io).values()
    )
    return float((weights * squares.sqrt()).nan_to_num(0).max()) / rule.bound


def added_up(io, rule):
    """Largest sum of the engine with everybody else masked out, over the bound."""
    shapes = {n: torch.zeros(g.shape[1:]) for n, g in in_float64(io).items()}
    worst = 0.0
    for i in range(io.batch_size):
        total = clipped_sum(
            [io],
            rule,
            IdentityWhitener(),
            parameters=shapes,
            present=torch.arange(io.batch_size) == i,
            step=0,
            norms=precision._chosen.get(),  # as the test has said
        )
        added = sum(float(v.double().square().sum()) for v in total.values.values())
        assert math.isfinite(added)
        worst = max(worst, math.sqrt(added))
    return worst / rule.bound


def assert_bounded(io, rule):
    assert contribution(io, rule) <= 1 + SLACK, (io, rule)
    assert added_up(io, rule) <= 1 + SLACK, (io, rule)


def assert_settled_is_bounded(io, rule):
    """Norms of the very numbers that are added: rounding can hide nothing."""
    written = DirectIO(io.name, io.per_example())
    assert contribution(written, rule) <= 1 + SLACK, (io, rule)
    assert added_up(written, rule) <= 1 + SLACK, (io, rule)


def random_cancellation(t, p, r, residue, scale, seed):
    """Pairs of opposite outer products, apart by a small residue."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(4, t // 2, p, generator=generator)
    d = torch.randn(4, t // 2, r, generator=generator) * scale
    moved = a + residue * torch.randn(a.shape, generator=generator)
    return torch.cat([a, moved], 1), torch.cat([d, -d], 1)


def swallowed_in_dot_products(p, exponent=12.5, repeats=2):
    """Rows that differ by less than a dot product of length p can hold beside a 1."""
    large = torch.zeros(p)
    large[: 4 if p >= 1024 else 1] = 1
    small = torch.where(large == 0, 2.0**-exponent, 0.0)
    a = torch.stack([large + small, large - small] * repeats).unsqueeze(0)
    d = torch.tensor([1.0, -1.0] * repeats).reshape(1, -1, 1).expand(-1, -1, 4)
    return a, 1e3 * d


def swallowed_in_the_sum(t, exponent=25):
    """A large term, many that vanish beside it one by one, and its opposite."""
    d = torch.full((t,), 2.0**-exponent)
    d[0], d[-1] = 1, -1
    return torch.ones(1, t, 8), 1e6 * d.reshape(1, -1, 1).expand(-1, -1, 4).contiguous()


HOSTILE = {
    **{
        f"pairs-{t}-{p}-{r}-{residue:g}-{scale:g}": (t, p, r, residue, scale)
        for t, p, r in ((2, 3, 5), (16, 40, 10), (64, 8, 8), (6, 300, 200))
        for residue in (0.0, 1e-8, 1e-7, 1e-5, 1e-3)
        for scale in (1.0, 1e4, 1e8)
    },
    **{f"dot-{p}": (p,) for p in (64, 256, 1024, 4096)},
    **{f"sum-{t}": t for t in (64, 256, 1024, 16384)},
}


def hostile(name):
    value = HOSTILE[name]
    if name.startswith("pairs"):
        return random_cancellation(*value, seed=3)
    if name.startswith("dot"):
        return swallowed_in_dot_products(*value)
    return swallowed_in_the_sum(value)


def methods_for(t):
    # T^2 Gram entries: beyond this the planner never takes that way
    return METHODS if t <= 1024 else [NormMethod.INSTANTIATE]


@pytest.mark.parametrize("name", HOSTILE)
def test_cancellation_stays_below_the_bound(name, norms):
    a, d = hostile(name)
    for method in [None, *methods_for(a.shape[1])]:
        for rule in RULES:
            for bound in (0.1, 1.0, 50.0):
                assert_bounded(linear_io(a, d, method), rule(bound))
                assert_settled_is_bounded(linear_io(a, d, method), rule(bound))


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("dot-1024", NormMethod.GRAM),
        ("dot-4096", NormMethod.GRAM),
        ("pairs-16-40-10-1e-05-10000", NormMethod.GRAM),
        ("sum-256", NormMethod.INSTANTIATE),
        ("sum-16384", NormMethod.INSTANTIATE),
    ],
)
@pytest.mark.parametrize(
    "norms", [NormPrecision.FLOAT32, NormPrecision.BF16], indirect=True
)
def test_plain_float32_norms_would_break_the_bound(name, method, norms, monkeypatch):
    a, d = hostile(name)
    without_allowances(monkeypatch, dense)
    bounds = (0.1, 1.0, 50.0)
    ratios = [contribution(linear_io(a, d, method), FlatClipping(c)) for c in bounds]
    assert max(ratios) > VISIBLE


def test_without_the_allowance_the_sum_would_break_the_bound(monkeypatch):
    # the norm is exact in float64; what is added up in float32 is rounding, mostly
    a, d = random_cancellation(16, 40, 10, 1e-8, 1e8, seed=3)
    assert added_up(linear_io(a, d), FlatClipping(50.0)) <= 1 + SLACK
    counting_what_is_left(monkeypatch)
    assert added_up(linear_io(a, d), FlatClipping(50.0)) <= 1 + SLACK
    without_allowances(monkeypatch, dense)
    assert added_up(linear_io(a, d), FlatClipping(50.0)) > VISIBLE


def test_rounding_along_the_gradient_is_allowed_for(monkeypatch):
    """Where ``n^2 + e^2`` would not do: it takes an error for orthogonal to g."""

    def worst():
        found = []
        for seed in range(40):
            generator = torch.Generator().manual_seed(seed)
            a, d = (torch.randn(1, 2, 1, generator=generator) for _ in "ad")
            for _ in range(5):
                scale = 3e4 * torch.rand(1, generator=generator)
                moved = a * (1 + 1e-4 * torch.randn(a.shape, generator=generator))
                io = linear_io(torch.cat([a, moved], 1), torch.cat([d, -d], 1) * scale)
                found.append(added_up(io, FlatClipping(1.0)))
        return max(found)

    counting_what_is_left(monkeypatch)
    assert worst() <= 1 + SLACK
    monkeypatch.setattr(
        dense, "counted", lambda squares, s, e, _: squares + (e * s).square()
    )
    assert worst() > 1 + 100 * SLACK


def without_the_first(a, d):
    """How far the sum moves when the first example leaves, over the bound."""
    rows = torch.arange(len(a))
    sums = [
        clipped_sum(
            [linear_io(a, d)],
            FlatClipping(1.0),
            IdentityWhitener(),
            parameters={"layer.weight": torch.zeros(d.shape[-1], a.shape[-1])},
            present=present,
            step=0,
        ).values["layer.weight"]
        for present in (rows >= 0, rows > 0)
    ]
    return float((sums[0].double() - sums[1].double()).norm())


def test_what_cancels_in_others_does_not_round_differently_without_one(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(64, 1, 30, generator=generator)
    d = 1e8 * torch.randn(64, 1, 10, generator=generator)
    a, d = torch.cat([a, a], 1), torch.cat([d, -d], 1)
    a[0], d[0] = torch.randn(2, 30), torch.randn(2, 10)
    assert without_the_first(a, d) <= 1 + SLACK
    monkeypatch.setattr(rounding, "REACH", dict.fromkeys(rounding.REACH, math.inf))
    assert without_the_first(a, d) > 1 + 1e-3


@pytest.mark.parametrize("examples", [64, 1024, 4096])
def test_equal_examples_do_not_round_apart(examples, monkeypatch):
    """The sum is as large as can be, and its last digit with it."""

    def worst():
        found = []
        for seed in range(6):
            generator = torch.Generator().manual_seed(seed)
            a = 10 * torch.randn(1, 1, 3, generator=generator).expand(examples, 1, 3)
            d = torch.ones(examples, 1, 2)
            found.append(without_the_first(a.contiguous(), d))
        return max(found)

    assert worst() <= 1 + SLACK
    monkeypatch.setattr(bounded, "kept_of_bound", lambda *_: 1.0)
    assert worst() > 1


@pytest.mark.parametrize("kind", ["ramp", "random", "pairs"])
@pytest.mark.parametrize(("p", "r"), [(1, 1), (3, 2), (16, 8)])
@pytest.mark.parametrize("examples", [8, 64, 512])
def test_everybody_else_cancels_and_one_leaves(examples, p, r, kind):
    """The worst batches that we know: terms as long as may be, nothing left of them.

    In one coordinate rounding can only point along the gradient.
    """
    for t in (2, 16, 128):
        generator = torch.Generator().manual_seed(t)
        a = torch.randn(examples, t // 2, p, generator=generator)
        d = 1e4 * torch.randn(examples, t // 2, r, generator=generator)
        if kind == "ramp":  # up, and down again
            a, d = a.abs(), d.abs()
        if kind == "pairs":
            a, d = torch.stack([a, a], 2), torch.stack([d, -d], 2)
            a, d = a.flatten(1, 2), d.flatten(1, 2)
        else:
            a, d = torch.cat([a, a], 1), torch.cat([d, -d], 1)
        a[0], d[0] = torch.randn(p, generator=generator), 3.0
        assert without_the_first(a, d) <= 1 + SLACK


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    t=st.sampled_from([2, 5, 33]),
    exponent=st.floats(0, 9),
    method=st.sampled_from([None, *METHODS]),
    norms=st.sampled_from(list(NormPrecision)),
    seed=st.integers(0, 99),
)
def test_an_example_counts_for_its_terms(t, exponent, method, norms, seed):
    """Beside the slow twin: the lengths of the terms, one by one, in float64."""
    half = torch.Generator().manual_seed(seed)
    a, d = torch.randn(3, t, 6, generator=half), torch.randn(3, t, 4, generator=half)
    a[:, 1], d[:, 1] = a[:, 0] * (1 + 10**-exponent), -d[:, 0]
    d[:, 2:] = 0
    with norms_in(norms):
        counted = linear_io(a, d, method).sq_norms().sqrt()
    lengths = a.double().norm(dim=2) * d.double().norm(dim=2)
    limit = torch.full((), rounding.REACH[torch.float32], dtype=torch.float64)
    assert torch.all(counted >= lengths.sum(1) / limit * (1 - 1e-6))
    gradients = torch.einsum("btr,btp->brp", d.double(), a.double())
    left = gradients.flatten(1).norm(dim=1)
    assert torch.all(counted >= left * (1 - 1e-12))
    if norms is NormPrecision.WIDE:  # and for no more
        spread = a.double().flatten(1).norm(dim=1) * d.double().flatten(1).norm(dim=1)
        most = torch.maximum(left + (t + 9) * 2.0**-24 * spread, spread / limit)
        assert torch.all(counted <= most * (1 + 1e-6))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_convolutions_cancel_too(method, groups, norms):
    module = nn.Conv2d(4, 8, 3, groups=groups)
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(3, 4, 3, 12, generator=generator)
    # the right half of the image repeats the left one, with opposite error signals
    x = torch.cat([half, half * (1 + 1e-6)], 3)
    d = torch.zeros(3, 8, 1, 22)
    d[..., :10] = 1e5 * torch.randn(3, 8, 1, 10, generator=generator)
    d[..., 12:] = -d[..., :10]
    geometry = ConvGeometry.of(module)
    io = DenseIO("conv", "conv.weight", "conv.bias", [(x, d)], geometry, method)
    for rule in RULES:
        assert_bounded(io, rule(1.0))
        assert_settled_is_bounded(io, rule(1.0))


def repeated_tokens(t):
    d = torch.full((t,), 2.0**-25)
    d[0], d[-1] = 1, -1
    d = 1e6 * d.reshape(1, -1, 1).expand(-1, -1, 4).contiguous()
    ids = torch.zeros(1, t, dtype=torch.int64)
    return LookupIO("table", "table.weight", 3, None, [(ids, d)])


def test_repeated_tokens_cancel_too(norms, monkeypatch):
    io = repeated_tokens(4096)
    for rule in RULES:
        assert_bounded(io, rule(1.0))
    if norms is not NormPrecision.WIDE:
        without_allowances(monkeypatch, lookup)
        assert contribution(io, FlatClipping(1.0)) > VISIBLE


MAGNITUDES = st.sampled_from(
    [0.0, 1e-45, 1e-40, 1e-30, 1e-22, 1e-19, 1e-10, 1.0, 1e10, 1e18, 1e25, 3e38]
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    a_scale=MAGNITUDES,
    d_scale=MAGNITUDES,
    t=st.sampled_from([1, 2, 5]),
    method=st.sampled_from([None, *METHODS]),
    rule=st.sampled_from(RULES),
    bound=st.sampled_from([1e-3, 1.0, 1e4]),
    seed=st.integers(0, 99),
    norms=st.sampled_from(list(NormPrecision)),
)
def test_any_magnitude(a_scale, d_scale, t, method, rule, bound, seed, norms):
    generator = torch.Generator().manual_seed(seed)
    a = torch.rand(2, t, 7, generator=generator) * a_scale
    d = torch.rand(2, t, 5, generator=generator) * d_scale
    with norms_in(norms):
        assert_bounded(linear_io(a, d, method), rule(bound))


@pytest.mark.parametrize("method", [None, *METHODS])
@pytest.mark.parametrize("t", [1, 2])
def test_squares_that_underflow_hide_nothing(t, method, norms):
    # a^2 is zero in float32, d^2 is nearly its largest number, and g is ordinary
    a, d = torch.full((1, t, 2000), 2e-23), torch.full((1, t, 10), 1e18)
    for rule in RULES:
        for bound in (1e-3, 1e-6):
            assert_bounded(linear_io(a, d, method), rule(bound))


@pytest.mark.parametrize("rule", RULES)
def test_an_overflowing_norm_counts_as_non_finite(rule):
    a = torch.full((2, 3, 4), 1.0)
    d = torch.full((2, 3, 5), 1.0)
    d[1] = 1e20  # finite, and so is its gradient; the squared norm is not
    io = linear_io(a, d)
    assert_bounded(io, rule(1.0))
    total = clipped_sum(
        [io],
        rule(1.0),
        IdentityWhitener(),
        parameters={"layer.weight": torch.zeros(5, 4)},
        present=torch.tensor([False, True]),
        step=0,
    )
    assert not total.values["layer.weight"].any()


def test_a_scale_beyond_the_range_drops_the_example():
    io = DirectIO("layer", {"layer.weight": torch.tensor([[1e15], [1.0]])})
    total = clipped_sum(
        [io],
        FlatClipping(1.0),
        IdentityWhitener(),
        parameters={"layer.weight": torch.zeros(1)},
        present=torch.ones(2, dtype=torch.bool),
        step=0,
        scale=1e140,
    )
    assert torch.isfinite(total.values["layer.weight"]).all()
    assert float(total.values["layer.weight"].norm()) <= 2 * (1 + SLACK)
