"""One suite for all ways to compute a step: what is released must be the same thing.

Eager, recorded as a graph, traced for a compiler, compiled for good, in bfloat16, with
inputs that are made again, with norms in fewer digits, and with all of it together:
norms and clipped sums against autograd an example at a time, the bound for every kind
of example, the law of the noise. A graph is repeated by running it again (a CPU records
none), "traced" runs the graph that a compiler would be given, and "gpu" is what a GPU
is given to do, done by a CPU.
"""

import math

import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset

from curvedp import make_private
from curvedp.errors import ConfigurationError
from curvedp.layers import Batch
from curvedp.layers.costs import DenseShape, writes_down
from curvedp.layers.planned import planned_for
from curvedp.testing import reference
from curvedp.train import compiled, passes
from curvedp.train.losses import LOSSES

from .test_graph import Twin

LOSS = LOSSES["cross-entropy"]
BOUND = 0.7
ROWS = 12

SLOW = [pytest.mark.slow]
#: Options of make_private, the backend of a compiled pass, and whether it is recorded.
MODES = {
    "eager": ({}, None, False),
    "graphed": ({}, None, True),
    "traced": ({}, "eager", False),
    "compiled": ({}, "inductor", False),
    "bf16": ({"precision": "bf16"}, None, False),
    "bf16-compiled": ({"precision": "bf16"}, "inductor", False),
    "remade": ({}, None, False),
    "remade-graphed": ({}, None, True),
    "remade-traced": ({}, "eager", False),
    "gpu": ({}, None, False),
    "gpu-remade-graphed": ({}, None, True),
    "gpu-kept": ({"precision": "bf16-kept"}, None, False),
    "kept": ({"precision": "bf16-kept"}, None, False),
    "kept-graphed": ({"precision": "bf16-kept"}, None, True),
    "kept-bf16-norms": (
        {"precision": "bf16-kept", "norm_precision": "bf16"},
        None,
        False,
    ),
    "float32-norms": ({"norm_precision": "float32"}, None, False),
    "bf16-norms": ({"norm_precision": "bf16"}, None, False),
    "all": ({"precision": "bf16", "norm_precision": "bf16"}, "eager", True),
}
#: Relative distance of a clipped sum from the reference's: the precision of the model,
#: and by how much norms are raised.
FAR = {"bf16": 3e-2, "bf16-compiled": 3e-2, "all": 3e-2}
FAR |= {"gpu-kept": 1e-2, "kept": 1e-2, "kept-graphed": 1e-2, "kept-bf16-norms": 1e-2}
FAR |= {"float32-norms": 4e-4, "bf16-norms": 2e-3}

every_mode = pytest.mark.parametrize(
    "mode",
    [pytest.param(mode, marks=SLOW if "compiled" in mode else []) for mode in MODES],
)
every_recipe = pytest.mark.parametrize("recipe", ["dp-sgd", "dp-kfc"])


def network():
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GELU(), nn.GroupNorm(2, 4), nn.ReLU(),
        nn.Conv2d(4, 4, 1), nn.Flatten(2),
        nn.Linear(12, 9), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3),
    )  # fmt: skip


def examples(n=ROWS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 1, 6, 5, generator=generator)
    return x, torch.randint(0, 3, (n,), generator=generator)


def attach(mode, x, y, recipe="dp-sgd", steps=1, **settings):
    options, backend, recorded = MODES[mode]
    own = network()
    if recipe == "dp-kfc":
        settings |= {"probe_size": 16, "probe_batches": 2}
    private = make_private(
        own, torch.optim.SGD(own.parameters(), lr=0.05), TensorDataset(x, y),
        recipe=recipe, loss="cross-entropy", clip_norm=BOUND, noise_multiplier=1.0,
        sample_rate=1.0, steps=steps, expected_batch_size=ROWS, seed=3,
        physical_batch_size=ROWS, unsafe_reproducible_noise=7, **options, **settings,
    )  # fmt: skip
    private._kind = "cuda" if mode.startswith("gpu") else "cpu"
    if "remade" in mode:  # as large passes do
        private._engine._precision.remade_from = 0
    if backend is not None:
        private._passed = private._engine.compiled(LOSS, synthetic, backend)
    if recorded:
        private._passed = private._engine.graphed(LOSS, Twin())
    return private


def synthetic(size, generator):
    x = torch.rand(size, 1, 6, 5, generator=generator)
    return Batch(x, torch.randint(0, 3, (size,), generator=generator))


def watched(private):
    """Every clipped sum and its release, while it trains."""
    mechanism, seen = private._engine.noise.mechanism, []

    class Watched:
        def update(self, part, state):
            release, state = mechanism.update(part, state)
            seen.append((part, release))
            return release, state

    private._engine.noise.mechanism = Watched()
    with planned_for(private._kind):
        for batch in private.loader:
            private.train_on(batch)
    return seen


def summed(mode, x, y, recipe="dp-sgd", **settings):
    """The clipped sum of the first step."""
    (part, _), *_ = watched(attach(mode, x, y, recipe, **settings))
    return {name: value.double() for name, value in part.values.items()}


def distance(left, right):
    return math.sqrt(sum(float((left[n] - right[n]).square().sum()) for n in left))


def length(values):
    return math.sqrt(sum(float(v.square().sum()) for v in values.values()))


@every_mode
@pytest.mark.parametrize("rule", ["flat", "normalised"])
def test_sums_are_those_of_autograd_an_example_at_a_time(mode, rule):
    """A normalised sum consists of directions: each is divided by its norm."""
    x, y = examples()
    x[3:6] *= 20  # some that are cut under any rule
    found = summed(mode, x, y, clipping=rule)
    gradients = reference.per_example_gradients(network(), LOSS, x, y)
    expected = reference.clipped_sum(gradients, rule, BOUND)
    assert found.keys() == expected.keys()
    # contributions are shortened a little, for the rounding of a batch
    assert distance(found, expected) <= FAR.get(mode, 2e-4) * length(expected)


@every_mode
@every_recipe
def test_modes_agree_with_eager_mode(mode, recipe):
    x, y = examples()
    eager = summed("eager", x, y, recipe)
    found = summed(mode, x, y, recipe)
    assert distance(found, eager) <= FAR.get(mode, 1e-5) * length(eager)


HOSTILE = {
    "nan": lambda x: torch.full_like(x, float("nan")),
    "one-nan": lambda x: torch.where(x == x.max(), float("nan"), x),
    "inf": lambda x: torch.full_like(x, -float("inf")),
    "1e30": lambda x: 1e30 * x,
    "1e4": lambda x: 1e4 * x,
    "1e-30": lambda x: 1e-30 * x,
    "checks": lambda x: 100 * torch.ones_like(x).cumsum(-1).remainder(2),
}


@every_mode
@every_recipe
def test_an_example_moves_the_sum_by_at_most_the_bound(mode, recipe):
    """Whatever it is; neighbours have the same rows but the last one."""
    x, y = examples()
    without = summed(mode, x[:-1], y[:-1], recipe)
    traced = MODES[mode][1] is not None  # a trace for each of them takes time
    for name in ("one-nan", "1e30", "1e4") if traced else HOSTILE:
        make = HOSTILE[name]
        more = torch.cat([x[:-1], make(x[-1:])])
        found = summed(mode, more, y, recipe)
        assert all(bool(v.isfinite().all()) for v in found.values()), name
        apart = distance(found, without)
        assert apart <= BOUND * (1 + 1e-5), name
        if name in ("nan", "one-nan", "inf"):  # the others' roundings, if anything
            assert apart <= 1e-6, name
        elif name != "1e30":  # it has a norm that a float32 cannot hold, or none
            assert apart >= 0.05 * BOUND, name


@every_mode
def test_noise_is_the_same_and_has_its_law(mode):
    """Independent of the mode, and normal with ``s C`` in every coordinate."""

    def noises(own):
        seen = watched(attach(own, *examples(), steps=12))
        return torch.cat(
            [
                (release.values[n].double() - value.double()).flatten()
                for part, release in seen
                for n, value in part.values.items()
            ]
        )

    drawn = noises(mode)
    # a release is float32: what is left after the sum is taken away is rounded
    torch.testing.assert_close(drawn, noises("eager"), rtol=0, atol=1e-5)
    assert stats.kstest(drawn.numpy() / BOUND, "norm").pvalue > 1e-3


@every_mode
def test_without_examples_there_is_noise_alone(mode):
    x, y = examples()
    private = attach(mode, x, y)
    for batch in private.loader:
        private._engine._open.batch.present[:] = False
        private._engine.release = lambda: None  # so that the sum stays where it is
        private.train_on(batch)
        total = private._engine._open.pending.values
        assert not any(bool(v.any()) for v in total.values())


@pytest.mark.parametrize("options", [{"precision": "fp8"}, {"norm_precision": "int4"}])
def test_other_names_are_refused(options):
    x, y = examples()
    own = network()
    with pytest.raises(ValueError, match="must be one of"):
        make_private(
            own, torch.optim.SGD(own.parameters(), lr=0.1), TensorDataset(x, y),
            loss="cross-entropy", noise_multiplier=1.0, sample_rate=0.5, steps=1,
            expected_batch_size=6, **options,
        )  # fmt: skip


def test_rounding_alone_is_no_fault_of_a_compiler():
    """Queries of a net that has not learnt yet: in bfloat16 all of it is rounding."""

    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.query, self.key = nn.Linear(5, 8), nn.Linear(5, 8, bias=False)
            self.value, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
            nn.init.constant_(self.value.bias, 100.0)  # values that are nearly equal

        def forward(self, x):
            x = x[:, 0]
            scores = 1e-3 * self.query(x) @ self.key(x).mT
            return self.head((scores.softmax(-1) @ self.value(x)).mean(1))

    x, y = examples()
    own = Attends()
    private = make_private(
        own, torch.optim.SGD(own.parameters(), lr=0.1), TensorDataset(x, y),
        loss="cross-entropy", noise_multiplier=1.0, sample_rate=1.0, steps=1,
        expected_batch_size=ROWS, physical_batch_size=ROWS, precision="bf16",
    )  # fmt: skip

    def other_roundings(graph, _):
        def rounded(v):
            noise = torch.Generator().manual_seed(v.numel())
            return v * (1 + 2.0**-8 * (torch.rand(v.shape, generator=noise) - 0.5))

        def run(*given):
            return graph(*[rounded(v) if v.is_floating_point() else v for v in given])

        return run

    private._passed = private._engine.compiled(LOSS, synthetic, other_roundings)
    for batch in private.loader:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiled, "ROUNDING_ALONE", 0.0)
            with pytest.raises(ConfigurationError, match="other values"):
                private.train_on(batch)
        private.train_on(batch)
    assert private.step == 1


@pytest.mark.parametrize("precision", ["bf16", "bf16-kept"])
def test_a_float64_model_has_no_bf16_forward_pass(precision):
    x, y = examples()
    own = network().double()
    with pytest.raises(ValueError, match="for float32 models"):
        make_private(
            own, torch.optim.SGD(own.parameters(), lr=0.1),
            TensorDataset(x.double(), y), loss="cross-entropy", noise_multiplier=1.0,
            sample_rate=0.5, steps=1, expected_batch_size=6, precision=precision,
        )  # fmt: skip


def test_bf16_rounds_the_forward_pass_and_keeps_the_rest():
    """Inputs are kept as autocast rounded them, outputs and sums are float32."""
    x, y = examples()
    private = attach("bf16", x, y)
    for batch in private.loader:
        output = private.model(batch[0])
        assert output.dtype == torch.float32
        (own,) = private._engine._open.recording._calls["0"]
        assert own.tensors()[0].dtype == torch.bfloat16
        private.loss(output, batch[1]).backward()
        private.optimizer.step()
        break
    assert all(p.dtype == torch.float32 for p in private.model.module.parameters())


def test_kept_is_refused_where_a_program_decides_what_is_saved():
    x, y = examples()
    own = network()
    with pytest.raises(ConfigurationError, match="compiled pass") as refusal:
        make_private(
            own, torch.optim.SGD(own.parameters(), lr=0.1), TensorDataset(x, y),
            loss="cross-entropy", noise_multiplier=1.0, sample_rate=0.5, steps=1,
            expected_batch_size=6, precision="bf16-kept", compile=True,
        )  # fmt: skip
    assert "leave compile out" in str(refusal.value)


def test_kept_computes_in_float32_and_keeps_in_bfloat16():
    """The output is that of the model; inputs and output gradients wait rounded."""
    x, y = examples()
    private = attach("kept", x, y)
    for batch in private.loader:
        expected = network()(batch[0])
        output = private.model(batch[0])
        assert torch.equal(output, expected)
        recording = private._engine._open.recording
        (norm,), (last,) = recording._calls["2"], recording._calls["9"]
        assert norm.tensors()[0].dtype == last.tensors()[0].dtype == torch.bfloat16
        private.loss(output, batch[1]).backward()
        assert last._d[0].dtype == torch.bfloat16
        assert not norm.tensors()  # its gradients are written down
        private.optimizer.step()
        break
    assert all(p.dtype == torch.float32 for p in private.model.module.parameters())


def test_large_passes_make_inputs_again(monkeypatch):
    """By bytes that shapes tell; a pass of less, or one that rounds, keeps them."""
    x, y = examples()
    private = attach("remade", x, y)
    for batch in private.loader:
        output = private.model(batch[0])
        recording = private._engine._open.recording
        assert not recording._calls["4"][0].tensors()
        assert recording._calls["2"][0].tensors()
        private.loss(output, batch[1]).backward()
        private.optimizer.step()
        break
    held = private._engine._coverage.activation_bytes * ROWS
    monkeypatch.setattr(passes, "REMADE_FROM", {"cpu": held})
    for options, rows, remakes in (
        ({}, ROWS, True),
        ({}, ROWS - 1, False),
        ({"precision": "bf16"}, ROWS, False),
        ({"precision": "bf16-kept"}, ROWS, False),
    ):
        precision = passes.ForwardPrecision(options.get("precision"), network())
        coverage = private._engine._coverage
        recording = precision.recording(network(), coverage, rows, ())
        assert (recording._remaker is not None) is remakes
    large = passes.ForwardPrecision(None, network())
    assert (large.remade_from, large.as_of_large_passes().remade_from) == (held, 0)
    monkeypatch.setattr(passes, "REMADE_FROM", {})
    never = passes.ForwardPrecision(None, network())
    assert never.remade_from == never.as_of_large_passes().remade_from == math.inf


def test_kept_decides_by_bytes_what_is_written_down():
    """A gradient is float32: it takes less than inputs and gradients in half of it."""
    x, y = examples()

    def ways(**options):
        own = nn.Sequential(
            nn.Flatten(1, 2), nn.Linear(5, 8), nn.Flatten(), nn.Linear(48, 3)
        )
        private = make_private(
            own, torch.optim.SGD(own.parameters(), lr=0.1), TensorDataset(x, y),
            loss="cross-entropy", noise_multiplier=1.0, sample_rate=0.5, steps=1,
            expected_batch_size=6, **options,
        )  # fmt: skip
        return {row.name: row.norms for row in private.explain().rows}

    assert ways() == {"1": "written", "3": "product"}  # 40 elements in place of 78
    assert ways(precision="bf16-kept") == {"1": "instantiate", "3": "product"}
    assert writes_down(DenseShape(1, 4, 10, 5), 50)
    assert not writes_down(DenseShape(1, 4, 10, 5), 99, lean=True)
    assert writes_down(DenseShape(1, 4, 10, 5), 100, lean=True)
