"""What a pass keeps in bfloat16: the same gradients, half the bytes, nobody else's.

The slow twin takes each layer's kept inputs and output gradients an example at a time
through autograd in float64: norms and sums must be those of these very numbers.
"""

import copy
import gc
import weakref

import pytest
import torch
from nets import ALL, loss
from passes import SEED, add_up, flat, largest_contribution
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from curvedp.clipping import FlatClipping
from curvedp.errors import LoopError
from curvedp.layers import (
    Batch,
    Recording,
    as_call,
    costs,
    cover,
    synthesiser_like,
)
from curvedp.layers.direct import RuleServer
from curvedp.layers.io import DirectIO
from curvedp.layers.kept import Keeper
from curvedp.layers.lookup import LookupIO
from curvedp.models import build
from curvedp.testing.live import LiveBytes

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using padding='same' with even kernel:UserWarning"
)

SIZE = 5
#: Of gradients: every value rounds by up to 2^-9, mostly in different directions.
FAR = 1e-2


def record(model, coverage, batch, loss=loss, size=SIZE, short=True, kept=False):
    torch.manual_seed(SEED)
    recording = Recording(
        model, coverage.covered, size,
        keep_inputs=kept, keeper=Keeper() if short else None,
    )  # fmt: skip
    output = recording.forward(*as_call(batch.inputs))
    loss(output, batch.targets).sum().backward()
    return recording


def rows(ios):
    """All gradients of all layers, ``[B, n]``, in float64."""
    found = [(n, g) for io in ios for n, g in io.per_example().items()]
    found.sort(key=lambda item: item[0])
    return torch.cat([g.double().reshape(len(g), -1) for _, g in found], 1)


#: Half of the nets of every kind; the others are for slow runs.
QUICK = ALL[::2]


@pytest.mark.parametrize(
    "net",
    [
        pytest.param(net, id=str(net), marks=[] if net in QUICK else pytest.mark.slow)
        for net in ALL
    ],
)
def test_gradients_are_those_of_the_rounded_values_and_bounded(net):
    model = net.make()
    coverage = cover(model, net.synthesiser(), loss)
    batch = net.batch(SIZE, torch.Generator().manual_seed(5))
    exact = rows(record(model, coverage, batch, short=False).layer_ios())
    ios = record(model, coverage, batch).layer_ios()
    assert (rows(ios) - exact).norm() <= FAR * exact.norm()
    rule = FlatClipping(float(exact.norm(dim=1).median()))
    present = torch.ones(SIZE, dtype=torch.bool)
    assert largest_contribution(ios, rule, present) <= 1 + 1e-6

    recording = record(model, coverage, batch, kept=True)
    expected = one_at_a_time(model, coverage, recording)
    whole = recording.layer_ios()
    assert (rows(whole) - exact).norm() <= FAR * exact.norm()
    weights = torch.linspace(0.5, 1.5, SIZE, dtype=torch.float64)
    for io in whole:
        if not set(io.names) <= expected.keys():
            continue
        lengths = sum(expected[n].reshape(SIZE, -1).square().sum(1) for n in io.names)
        norms = io.sq_norms()
        # gradients that are written down have rounded, and are added up as they are
        lowered = 1e-5 if isinstance(io, DirectIO) else 1e-9
        assert bool((norms >= lengths * (1 - lowered) - 1e-12).all()), io.name
        raised = 2e-3 if isinstance(io, LookupIO) else 1e-3
        cancelled = 1e-4 * lengths.max() + 1e-12
        assert bool((norms <= lengths * (1 + raised) + cancelled).all()), io.name
        for name, value in io.weighted_sum(weights).items():
            twin = torch.tensordot(weights, expected[name], 1)
            far = (value.double() - twin).norm()
            assert far <= 1e-5 * (weights @ lengths.sqrt()) + 1e-9, name


def one_at_a_time(model, coverage, recording):
    """Gradients of what is kept of each layer that a rule serves, in float64."""
    total, unserved = {}, set()
    for item in coverage.covered:
        served = isinstance(item.server, RuleServer) and item.server.shared is None
        if not served:
            unserved |= set(item.site.parameters.values())
            continue
        module = copy.deepcopy(model.get_submodule(item.site.name)).double()
        if isinstance(module, nn.RMSNorm) and module.eps is None:
            module.eps = torch.finfo(torch.float32).eps  # or float64 has its own
        own = {n: module.get_parameter(n) for n in item.site.parameters}
        for call in recording._calls[item.site.name]:
            if not call.reached:
                continue
            (d,) = call._d
            assert d.dtype == torch.bfloat16
            for i in range(SIZE):
                args, kwargs = tree_map(
                    lambda x, k=i: one_row(x, k), (call.args, call.kwargs)
                )
                output = module(*args, **kwargs)
                found = torch.autograd.grad(
                    output, list(own.values()), d[i : i + 1].double()
                )
                for name, g in zip(own, found, strict=True):
                    full = item.site.parameters[name]
                    zeros = torch.zeros(SIZE, *g.shape, dtype=torch.float64)
                    total.setdefault(full, zeros)[i] += g
    return {n: g for n, g in total.items() if n not in unserved}


def one_row(x, i):
    if not isinstance(x, torch.Tensor):
        return x
    return x[i : i + 1].double() if x.is_floating_point() else x[i : i + 1]


@pytest.mark.parametrize("net", ALL[::9], ids=str)
def test_a_batch_in_pieces_is_the_same_batch(net, monkeypatch):
    """Where memory is short, norm layers and sums take a few examples at a time."""
    model = net.make()
    coverage = cover(model, net.synthesiser(), loss)
    batch = net.batch(SIZE, torch.Generator().manual_seed(5))
    weights = torch.linspace(0.5, 1.5, SIZE)
    whole = record(model, coverage, batch).layer_ios()
    sums = [io.weighted_sum(weights) for io in whole]
    lengths = [io.sq_norms() for io in whole]
    monkeypatch.setattr(costs, "LEAN_CHUNK_ELEMENTS", {"cpu": 1})
    pieces = record(model, coverage, batch).layer_ios()
    for io, expected, squares in zip(pieces, sums, lengths, strict=True):
        torch.testing.assert_close(io.sq_norms(), squares, rtol=1e-4, atol=1e-9)
        for name, value in io.weighted_sum(weights).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


# -- memory ----------------------------------------------------------------------------


def sized(name, side=16):
    model = build(name, (3, side, side), 10, **SETTINGS.get(name, {}))
    x = torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(1))
    coverage = cover(model, synthesiser_like(Batch(x[:1], None), model), None)
    return model, coverage, x


SETTINGS = {"vit": {"dim": 48, "depth": 2, "heads": 2}}


def kept_bytes(model, x, forward):
    with LiveBytes([*model.parameters(), *model.buffers(), x]) as live:
        output = forward(x)
        return live.now(), output


@pytest.mark.parametrize("name", ["wrn-16-4", "vit"])
def test_half_the_bytes_wait_for_the_backward_pass(name):
    """0.5 of an ordinary step, and a little that stays; shared copies count once."""
    model, coverage, x = sized(name)
    ordinary, _ = kept_bytes(model, x, model)
    recording = Recording(model, coverage.covered, len(x))
    private, _ = kept_bytes(model, x, lambda x: recording.forward((x,), {}))
    assert private == pytest.approx(ordinary, rel=0.01)
    recording = Recording(model, coverage.covered, len(x), keeper=Keeper())
    short, output = kept_bytes(model, x, lambda x: recording.forward((x,), {}))
    assert 0.49 * ordinary <= short <= 0.53 * ordinary
    output.sum().backward()


def test_output_gradients_wait_in_half_the_bytes():
    model, coverage, x = sized("vit")

    def after_backward(keeper):
        recording = Recording(model, coverage.covered, len(x), keeper=keeper)
        with LiveBytes([*model.parameters(), x]) as live:
            recording.forward((x,), {}).sum().backward()
            return live.now()

    # written-down gradients stay float32
    assert after_backward(Keeper()) <= 0.6 * after_backward(None)


class Deep(nn.Module):
    """Residual blocks of convolutions and norms, with few weights."""

    def __init__(self, width=16, blocks=3):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(2 * blocks))
        self.convs = nn.ModuleList(
            nn.Conv2d(width, width, 3, padding=1) for _ in range(2 * blocks)
        )
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x, inner = self.stem(x), 0.0
        for k, (norm, conv) in enumerate(zip(self.norms, self.convs, strict=True)):
            inner = conv(F.relu(norm(inner if k % 2 else x)))
            x = x + inner if k % 2 else x
        return self.head(x.mean((2, 3)))


def test_the_peak_is_lower_and_norms_and_convolutions_need_no_whole_input(monkeypatch):
    """Three float32 tensors under way: the residual's gradient, and a layer's two."""
    monkeypatch.setattr(costs, "LEAN_CHUNK_ELEMENTS", {"cpu": 2**13})
    torch.manual_seed(0)
    model, x = Deep(), torch.rand(32, 3, 12, 12)
    coverage = cover(model, synthesiser_like(Batch(x[:1], None), model), None)
    one = 32 * 16 * 12 * 12 * 4

    def peak(forward):
        with LiveBytes([*model.parameters(), x]) as live:
            output = forward(x)
            kept = live.now()
            output.square().sum().backward()
        return kept, live.peak

    ordinary = peak(model)[1]
    recording = Recording(model, coverage.covered, len(x), keeper=Keeper())
    kept, found = peak(lambda x: recording.forward((x,), {}))
    assert found <= 0.7 * ordinary
    assert found <= kept + 4.4 * one  # and what is written down
    plain = Recording(model, coverage.covered, len(x))
    plain.forward((x,), {}).square().sum().backward()
    exact = rows(plain.layer_ios())
    assert (rows(recording.layer_ios()) - exact).norm() <= FAR * exact.norm()


def test_a_forward_that_was_put_on_a_norm_layer_stays_there():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    x = torch.randn(SIZE, 4)
    coverage = cover(model, synthesiser_like(Batch(x[:1], None), model), None)
    own = model[1].forward
    model[1].forward = patched = lambda x: 2 * own(x)
    recording = Recording(model, coverage.covered, SIZE, keeper=Keeper())
    torch.testing.assert_close(recording.forward((x,), {}), model(x))
    assert model[1].forward is patched
    del model[1].forward
    Recording(model, coverage.covered, SIZE, keeper=Keeper()).forward((x,), {})
    assert "forward" not in vars(model[1])


def test_views_of_one_memory_share_a_copy_and_a_small_view_has_its_own():
    keeper, x = Keeper(), torch.randn(4, 6, 10)
    whole, part = keeper.short(x), keeper.short(x[:, :3].transpose(1, 2))
    first = keeper.short(x[:, 0])
    assert whole.dtype == part.dtype == first.dtype == torch.bfloat16
    assert part.untyped_storage()._cdata == whole.untyped_storage()._cdata
    assert torch.equal(part, x[:, :3].transpose(1, 2).bfloat16())
    assert first.untyped_storage().nbytes() == 4 * 10 * 2
    assert torch.equal(first, x[:, 0].bfloat16())
    again = keeper.short(x[:, 0])
    assert again.data_ptr() == first.data_ptr()
    repeated = torch.randn(10).expand(4, 10)
    assert torch.equal(keeper.short(repeated), repeated.bfloat16())


def test_copies_go_with_their_last_user_and_writing_makes_another():
    keeper, x = Keeper(), torch.randn(4, 6)
    with LiveBytes([x]) as live:
        short = keeper.short(x)
        before = x.clone()
        assert live.now() == x.numel() * (2 + 4)
        x.mul_(2)
        other = keeper.short(x)
        assert torch.equal(short, before.bfloat16())
        assert torch.equal(other, x.bfloat16())
        del short, other, before
        assert live.now() == 0
    assert torch.equal(keeper.short(x), x.bfloat16())


def test_a_pass_leaves_nothing_alive_and_no_cycle():
    model, coverage, x = sized("vit")
    gc.collect()
    gc.disable()
    try:
        with LiveBytes([*model.parameters(), x]) as live:
            recording = Recording(model, coverage.covered, len(x), keeper=Keeper())
            recording.forward((x,), {}).sum().backward()
            ios = recording.layer_ios()
            gone = weakref.ref(recording)
            del recording
            assert gone() is None
            del ios
            assert live.now() == 0
            # a forward pass that nobody followed up goes as well
            Recording(model, coverage.covered, len(x), keeper=Keeper()).forward(
                (x,), {}
            )
            assert live.now() == 0
    finally:
        gc.enable()


# -- whose values ----------------------------------------------------------------------


class Busy(nn.Module):
    """Frees and makes many tensors of one size, and writes into some."""

    def __init__(self, width=16, layers=12):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.seen = []

    def forward(self, x):
        self.seen = []  # written anew: a list that grew would be refused
        for k, layer in enumerate(self.layers):
            for _ in range(3):
                x = torch.tanh(x * 1.1)
            x = x.clone().add_(0.1).relu_() if k % 3 else (x + 0).mul_(1.3)
            self.seen.append(x.clone())
            x = layer(x)
            if k % 2:
                x = F.leaky_relu_(x, 0.2)
        return x


def test_memory_that_is_used_again_is_not_mistaken():
    torch.manual_seed(0)
    model, x = Busy(), torch.randn(SIZE, 16)
    coverage = cover(model, synthesiser_like(Batch(x[:1], None), model), None)
    recording = Recording(model, coverage.covered, SIZE, keeper=Keeper())
    output = recording.forward((x,), {})
    for k, value in enumerate(model.seen):
        (call,) = recording._calls[f"layers.{k}"]
        assert torch.equal(call.args[0], value.bfloat16()), k
    output.square().sum().backward()
    found = rows(recording.layer_ios())
    plain = Recording(model, coverage.covered, SIZE)
    plain.forward((x,), {}).square().sum().backward()
    exact = rows(plain.layer_ios())
    assert 1e-6 <= (found - exact).norm() / exact.norm() <= FAR


class Attends(nn.Module):
    """Queries, keys and values as parts of one output; a residual; a norm."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.mixed, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.last, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x)), inplace=True).flatten(2).mT
        q, k, v = self.mixed(x).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        return self.head(self.last(x[:, 0]))


@pytest.fixture(scope="module")
def attending():
    torch.manual_seed(3)
    model, x = Attends(), torch.randn(SIZE, 3, 4, 4)
    coverage = cover(model, synthesiser_like(Batch(x[:1], None), model), None)
    return model, coverage, x


def squares(output, targets):
    return output.square().sum(1)


@pytest.mark.parametrize("value", [0.0, 1.0, -3e4, 1e30, 3.4e38, float("nan")])
def test_an_example_is_rounded_alone(attending, value):
    model, coverage, x = attending
    others = torch.cat([x[:1], value * torch.ones_like(x[1:])])
    first, second = (
        record(model, coverage, Batch(inputs, None), squares).layer_ios()
        for inputs in (x, others)
    )
    for one, two in zip(first, second, strict=True):
        torch.testing.assert_close(
            two.sq_norms()[0], one.sq_norms()[0], rtol=1e-5, atol=0
        )
        for name, g in one.per_example().items():
            torch.testing.assert_close(
                two.per_example()[name][0], g[0], rtol=1e-5, atol=1e-6
            )


@pytest.mark.parametrize(
    "value", [1e-30, 1e4, 1e30, 3.4e38, float("inf"), float("nan")]
)
def test_nobody_moves_the_sum_by_more_than_the_bound(attending, value):
    model, coverage, x = attending
    rule = FlatClipping(0.3)
    hostile = torch.cat([x[:-1], value * x[-1:]])
    ios = record(model, coverage, Batch(hostile, None), squares).layer_ios()
    everyone = torch.ones(SIZE, dtype=torch.bool)
    without = everyone & (torch.arange(SIZE) < SIZE - 1)
    sums = [flat(add_up(model, ios, rule, own).values) for own in (everyone, without)]
    assert bool(sums[0].isfinite().all())
    assert (sums[0] - sums[1]).norm() <= rule.bound * (1 + 1e-6)


def test_parameters_and_the_inputs_of_the_pass_stay(attending):
    model, coverage, x = attending
    recording = record(model, coverage, Batch(x, None), squares, kept=True)
    kinds = {n: c.args[0].dtype for n, (c,) in recording._calls.items()}
    assert kinds.pop("conv") == torch.float32
    assert set(kinds.values()) == {torch.bfloat16}
    assert recording._calls["conv"][0].args[0].data_ptr() == x.data_ptr()


def test_writing_over_what_the_backward_pass_needs_is_refused():
    """As torch does; what is rounded already cannot be written over."""

    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            y = (self.first(x) + 1).tanh()
            z = y.exp()  # its result is saved, and is no layer's input or output
            out = self.second(y) + z
            (z if self.writes else out).mul_(2)
            return out

    model, x = Writes(), torch.randn(SIZE, 4)
    model.writes = False
    coverage = cover(model, synthesiser_like(Batch(x[:1], None), model), None)
    record(model, coverage, Batch(x, None), squares)
    model.writes = True
    with pytest.raises(LoopError, match="modified in place"):
        record(model, coverage, Batch(x, None), squares)


def test_the_input_of_a_convolution_may_be_used_elsewhere():
    """The shape alone is kept of what the convolution saves, and of nothing else."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)
            self.head = nn.Linear(16, 2)

        def forward(self, x):
            x = self.first(x)
            before = x * x.square()
            return self.head((self.second(x) + before + x * x).flatten(1))

    torch.manual_seed(0)
    model, x = Twice(), torch.randn(SIZE, 3, 4, 4)
    coverage = cover(model, synthesiser_like(Batch(x[:1], None), model), None)
    exact, found = (
        rows(record(model, coverage, Batch(x, None), squares, short=short).layer_ios())
        for short in (False, True)
    )
    assert 0 < (found - exact).norm() <= FAR * exact.norm()


class Gated(nn.Module):
    """Parts that share memory and are written to, each with a version of its own."""

    def __init__(self):
        super().__init__()
        self.both, self.head = nn.Linear(4, 8), nn.Linear(4, 2)

    def forward(self, x):
        gate, value = self.both(x).unsafe_chunk(2, 1)
        return self.head(gate.sigmoid_() * value.tanh_())


def test_a_part_that_was_written_to_is_not_taken_from_before_the_write():
    torch.manual_seed(0)
    model, x = Gated(), torch.randn(SIZE, 4)
    coverage = cover(model, synthesiser_like(Batch(x[:1], None), model), None)
    exact, found = (
        rows(record(model, coverage, Batch(x, None), squares, short=short).layer_ios())
        for short in (False, True)
    )
    assert 0 < (found - exact).norm() <= FAR * exact.norm()
