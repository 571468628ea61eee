"""A compiled pass: the same numbers as without, tried out, or refused in words.

Most of it needs no code generator: the graph that would be compiled is run as it is
(torch's own "eager" backend), which is what a compiler is given. Two cases are compiled
for good; ``test_modes.py`` has their norms, sums and bounds.
"""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from curvedp import Trainer, make_private
from curvedp.errors import ConfigurationError, CouplingError, LoopError
from curvedp.layers import Batch
from curvedp.train import compiled as module
from curvedp.train.losses import LOSSES

from .test_whitened_recipes import PRIVATE, attach, examples, model

LOSS = LOSSES["cross-entropy"]

#: Of the weights after a run: the traced graph adds up in the same order.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def synthetic(size, generator):
    x = torch.rand(size, 1, 6, 5, generator=generator)
    return Batch(x, torch.randint(0, 3, (size,), generator=generator))


def programmed(private, backend="eager", synthesiser=synthetic):
    private._passed = private._engine.compiled(LOSS, synthesiser, backend)
    return private


def train(private):
    losses = [float(private.train_on(batch)) for batch in private.loader]
    return losses, [p.detach().clone() for p in private.model.module.parameters()]


def same(ours, theirs):
    torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("recipe", PRIVATE)
def test_a_program_gives_the_run_that_eager_mode_gives(recipe):
    losses, weights = train(attach(examples(), recipe))
    private = programmed(attach(examples(), recipe))
    found, compiled = train(private)
    same(found, losses)
    same(compiled, weights)
    assert len(private._passed._programs) == 1  # a refresh of the map needs no other


def test_an_example_that_is_not_finite_adds_nothing():
    data = examples()
    data.tensors[0][5] = float("nan")
    data.tensors[0][6] = float("inf")
    _, weights = train(attach(data, "dp-kfc"))
    _, compiled = train(programmed(attach(data, "dp-kfc")))
    same(compiled, weights)
    assert all(bool(w.isfinite().all()) for w in compiled)


def test_dropout_and_modes_are_not_frozen():
    own = nn.Sequential(
        nn.Flatten(), nn.Linear(30, 8), nn.Dropout(0.5), nn.Linear(8, 3)
    )
    private = programmed(attach(examples(), "dp-sgd", own, steps=4))
    draws = set()
    for number, batch in enumerate(private.loader):
        own[2].training = number % 2 == 0
        draws.add(float(private.train_on(batch)))
    assert len(private._passed._programs) == 2
    assert len(draws) > 2


def test_buffers_are_read_anew():
    """A constant of the trace would be the value that it had then."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model()
            self.register_buffer("scale", torch.tensor(1.0))

        def forward(self, x):
            return self.inner(x) * self.scale

    own = Scaled()
    private = programmed(attach(examples(), "dp-sgd", own, steps=4))
    losses = []
    for batch in private.loader:
        losses.append(float(private.train_on(batch)))
        own.scale.zero_()
    assert losses[-1] == pytest.approx(float(torch.tensor(3.0).log()))
    assert len(private._passed._programs) == 1


class Looks(nn.Module):
    """Looks at a value, in one of the ways in which models do."""

    def __init__(self, how):
        super().__init__()
        self.inner, self.how = model(), how
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, x):
        if self.how == "if" and x.abs().sum() < 0:
            return self.inner(-x)
        if self.how == "item":
            x = x * self.scale.item()
        if self.how == "mask":
            x = x.clone()
            x[x > 1] = 1.0
        return self.inner(x)


def test_a_model_that_branches_on_values_is_refused():
    private = programmed(attach(examples(), "dp-sgd", Looks("if")))
    with pytest.raises(ConfigurationError, match=r"(?s)cannot be compiled.*leave comp"):
        train(private)
    assert private.step == 0
    assert private.epsilon() == 0.0


@pytest.mark.parametrize("how", ["item", "mask"])
def test_values_that_a_model_looks_at_are_not_frozen(how):
    def losses(private):
        found = []
        for batch in private.loader:
            found.append(float(private.train_on(batch)))
            private.model.module.scale += 1
        return found

    eager = losses(attach(examples(), "dp-sgd", Looks(how)))
    same(losses(programmed(attach(examples(), "dp-sgd", Looks(how)))), eager)


def test_a_buffer_that_carries_data_is_refused():
    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model()
            self.register_buffer("seen", torch.zeros(()))
            self.remember = False

        def forward(self, x):
            if self.remember:
                self.seen += x.sum()
            return self.inner(x)

    own = Remembers()
    private = programmed(attach(examples(), "dp-sgd", own))
    own.remember = True  # after the check of attaching
    with pytest.raises(CouplingError, match="'seen' changed during a private forward"):
        train(private)
    assert float(own.seen) == 0


def test_a_compiler_that_mixes_examples_is_found_on_synthetic_data():
    def mixing(graph, inputs):
        def run(*given):
            found = graph(*given)
            return [x.roll(1, 0) if x.dim() else x for x in found]

        return run

    private = programmed(attach(examples(), "dp-sgd"), mixing)
    with pytest.raises(ConfigurationError, match="does not compute what the model"):
        train(private)
    assert private.step == 0


def test_a_backend_that_fails_says_so():
    def broken(graph, inputs):
        raise RuntimeError("No working C++ compiler found")

    private = programmed(attach(examples(), "dp-sgd"), broken)
    with pytest.raises(ConfigurationError, match=r"C\+\+ compiler found"):
        train(private)


def test_programs_are_kept_for_few_shapes(monkeypatch):
    monkeypatch.setattr(module, "MOST_PROGRAMS", 1)
    private = programmed(attach(examples(), "dp-sgd"))
    for number, batch in enumerate(private.loader):
        private.model.module[4].training = number % 2 == 0
        private.train_on(batch)
        if number == 2:
            break
    assert len(private._passed._programs) == 1


def test_a_loop_that_calls_the_model_itself_is_refused():
    private = programmed(attach(examples(), "dp-sgd"))
    for x, _ in private.loader:
        with pytest.raises(LoopError, match=r"use private\.train_on"):
            private.model(x)
        break
    with pytest.raises(LoopError, match="without a batch from"):
        attached = programmed(attach(examples(), "dp-sgd"))
        attached.train_on((x, torch.zeros(len(x), dtype=torch.int64)))


def test_without_a_loss_there_is_nothing_to_compile(tmp_path):
    own = model()
    with pytest.raises(ConfigurationError, match="compiles the loss too"):
        make_private(
            own, torch.optim.SGD(own.parameters(), lr=0.1), examples(), compile=True,
            noise_multiplier=1.0, sample_rate=0.5, steps=1, expected_batch_size=20,
            run_dir=tmp_path / "run",
        )  # fmt: skip
    assert not (tmp_path / "run").exists()


def small():
    torch.manual_seed(2)
    return nn.Sequential(nn.Flatten(), nn.Linear(30, 4), nn.GELU(), nn.Linear(4, 3))


def test_the_trainer_compiles_for_good():
    def weights(**options):
        own = small()
        Trainer(
            own, "cross-entropy", "dp-sgd", noise_multiplier=1.0, sample_rate=0.5,
            steps=2, expected_batch_size=20, physical_batch_size=8, seed=1,
            unsafe_reproducible_noise=1, **options,
        ).fit(TensorDataset(*examples().tensors))  # fmt: skip
        return [p.detach() for p in own.parameters()]

    same(weights(compile=True), weights())
