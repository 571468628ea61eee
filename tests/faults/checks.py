"""A check for each rule of the design: it passes, and it fails without its guard."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from curvedp import Trainer
from curvedp.barrier import ClippedSum
from curvedp.errors import (
    BudgetError,
    ConfigurationError,
    CouplingError,
    CoverageError,
    CurvedpError,
)
from curvedp.layers import verify
from curvedp.noise import GaussianMechanism, NoiseState, RandomStreams, Stream

from .cases import (
    CountsBatches,
    FunctionalWeight,
    TimeFirst,
    Unused,
    attach,
    coupled_loss,
    examples,
    linear,
    parameters,
    train,
)
from .checking import clipped_vector, pairs, refused, unusable

# -- rule 1: the divisor is declared, and nothing depends on the number of examples --


def size_does_not_show():
    results = [train(attach(unusable(n))) for n in (24, 23)]
    assert torch.equal(*results), "the parameters tell 24 examples from 23"


# -- rule 2: clipping and noise come from one plan --


def noise_fits_the_bound():
    loose = ClippedSum({"w": torch.zeros(3)}, bound=2.0, frame="identity", step=0)
    state = NoiseState(RandomStreams(0))
    mechanism = GaussianMechanism(1.0, bound=1.0)
    refused(ConfigurationError, "bounded by", lambda: mechanism.update(loose, state))


def size_derived_sampling_is_not_add_remove():
    refused(
        ConfigurationError,
        "make the number of examples public",
        lambda: attach(
            examples(),
            sample_rate=None,
            steps=None,
            expected_batch_size=None,
            batch_size=8,
            epochs=1,
            relation="add-remove",
            delta=1e-3,
        ),
    )


# -- rule 3: a non-finite example contributes exactly zero --


def bad_example_is_as_if_absent():
    good = examples()
    for poison in (float("nan"), float("inf"), 1e30):
        x, y = (t.clone() for t in good.tensors)
        x[5] = poison
        poisoned = train(attach(TensorDataset(x, y), rate=1.0))
        x[5] = 0
        y[5] = 0
        without = torch.arange(len(y)) != 5
        expected = clipped_vector(TensorDataset(x[without], y[without]))
        assert torch.isfinite(poisoned).all(), f"{poison} reached the parameters"
        x[5] = poison
        assert torch.allclose(clipped_vector(TensorDataset(x, y)), expected, atol=1e-6)


# -- rule 4: an empty batch adds noise and counts --


def empty_batches_count():
    private = attach(examples(), rate=1e-9, steps=3, delta=1e-12)
    before = parameters(private.model)
    after = train(private)
    assert private.step == 3, "an empty draw was skipped"
    assert private._engine.ledger.count() == 3
    assert (before != after).all(), "an empty draw got no noise"


# -- rule 5: coverage --


def time_first_is_refused():
    # as many positions as the check has examples: shapes alone show nothing
    data = pairs(torch.randn(12, verify.EXAMPLES, 8))
    refused(CouplingError, "wrong examples", lambda: attach(data, TimeFirst()))


def coupled_loss_is_refused():
    refused(
        CouplingError,
        "the loss couples examples",
        lambda: attach(examples(), loss=coupled_loss),
    )


def changing_buffer_is_refused():
    model = CountsBatches()
    refused(CouplingError, "'mean' changed", lambda: attach(examples(), model))


def unused_layer_is_refused():
    refused(CoverageError, "'forgotten", lambda: attach(examples(), Unused()))


def functional_weight_is_refused():
    data = pairs(torch.randint(0, 11, (12, 5)))
    refused(
        CoverageError,
        "'table.weight'",
        lambda: attach(data, FunctionalWeight(), loss=None),
    )


# -- rule 6: layers that mix examples --


def batch_norm_is_refused_with_the_replacement():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    refused(
        CouplingError, "nn.GroupNorm(min(32, 6), 6)", lambda: attach(examples(), model)
    )


# -- rule 7: pay, then draw; keep, then apply; never draw twice --


def paid_before_drawn():
    private = attach(examples(), steps=2)
    engine = private._engine
    paid_when_drawn = []
    original = RandomStreams.generator

    def spy(self, stream, *address):
        if stream is Stream.NOISE:
            paid_when_drawn.append(engine.ledger.count())
        return original(self, stream, *address)

    RandomStreams.generator = spy
    try:
        train(private)
    finally:
        RandomStreams.generator = original
    assert paid_when_drawn == [1, 2], "noise was drawn before it was paid for"


def kept_before_applied():
    private = attach(examples(), steps=1)
    engine = private._engine
    order = []

    class Spy:
        def write(self, release, groups):
            order.append("kept")

    engine.journal = Spy()
    engine.optimizer.register_step_pre_hook(lambda *_: order.append("applied"))
    train(private)
    assert order == ["kept", "applied"], order


def second_attempt_draws_other_noise():
    releases = []
    for lost in (0, 1):
        private = attach(unusable(4), steps=2)
        for attempt in range(lost):  # a payment whose release was lost in a crash
            private._engine.ledger.pay(0, attempt, private.plan.step_event())
        before = parameters(private.model)
        for x, y in private.loader:
            private.loss(private.model(x), y).backward()
            private.optimizer.step()
            break
        releases.append(parameters(private.model) - before)
    assert not torch.equal(*releases), "the second attempt drew the first one's noise"


def a_step_made_again_is_drawn_again():
    private = attach(examples(200), rate=0.1, steps=8, physical_batch_size=200)
    state = private.state_dict()
    draws = []
    for _ in range(2):
        for x, y in private.loader:
            draws.append(x.clone())
            private.loss(private.model(x), y).backward()
            private.optimizer.step()
            break
        private.load_state_dict(state)  # back to the start; the payment stays
    assert not torch.equal(*draws), "one draw was released twice"


def noise_address_is_used_once():
    streams = RandomStreams(0)
    streams.generator(Stream.NOISE, 3, 0)
    refused(CurvedpError, "drawn before", lambda: streams.generator(Stream.NOISE, 3, 0))


# -- rule 8: no step beyond the budget --


def budget_stops():
    private = attach(examples(), steps=3)
    train(private)
    assert private.steps_left() == 0
    refused(BudgetError, "planned steps are paid for", lambda: train(private))


def lost_steps_are_paid_from_the_same_budget():
    private = attach(examples(), steps=3)
    private._engine.ledger.pay(0, 0, private.plan.step_event())
    train(private)
    assert private._engine.ledger.count() == 3, "more was spent than planned"


# -- rule 10: the training loss is shown only if asked for --


def loss_is_not_reported():
    seen = []
    trainer = Trainer(
        linear(),
        "cross-entropy",
        noise_multiplier=1.0,
        sample_rate=0.5,
        steps=2,
        expected_batch_size=10,
        on_progress=seen.append,
    )
    trainer.fit(examples())
    assert [p.private_loss for p in seen] == [None, None], "a private loss was shown"


def shown_loss_is_noted():
    trainer = Trainer(
        linear(),
        "cross-entropy",
        noise_multiplier=1.0,
        sample_rate=0.5,
        steps=1,
        expected_batch_size=10,
        show_private_training_loss=True,
    )
    notes = trainer.fit(examples()).statement.facts["notes"]
    assert any("training loss was shown" in note for note in notes)


# -- rule 11: secret streams are secret --


def noise_comes_from_the_operating_system():
    draws = [
        RandomStreams(seed=0).generator(Stream.NOISE, 0, 0).standard_normal(4)
        for _ in range(2)
    ]
    assert not np.array_equal(*draws), "two runs drew the same noise"


def streams_are_separate():
    streams = RandomStreams(0, unsafe_reproducible_noise=1)
    noise = streams.generator(Stream.NOISE, 0, 0).standard_normal(4)
    sampling = streams.generator(Stream.SAMPLING, 0, 0).standard_normal(4)
    assert not np.array_equal(noise, sampling), "sampling shows the noise"


# -- rule 12: the bound holds --


def contribution_is_bounded():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 4, generator=generator) * torch.logspace(-3, 6, 40)[:, None]
    for clipping in ("flat", "normalised", "per-layer"):
        for i in range(0, 40, 13):
            one = TensorDataset(x[i : i + 1], torch.zeros(1).long())
            total = clipped_vector(one, clipping=clipping, clip_norm=0.7)
            assert total.double().norm() <= 0.7 * (1 + 1e-6), clipping


# -- rule 13: delta --


def large_delta_is_refused():
    refused(ConfigurationError, "delta", lambda: attach(examples(), delta=0.1))


# -- hand-written loops --


def skipped_batch_is_refused():
    private = attach(examples(), steps=3)

    def skip():
        for _ in private.loader:
            continue

    refused(CurvedpError, "never went through", skip)


def second_pass_is_refused():
    private = attach(examples(), steps=3)

    def twice():
        for x, y in private.loader:
            private.loss(private.model(x), y).backward()
            private.loss(private.model(x), y).backward()
            private.optimizer.step()

    refused(CurvedpError, "counted twice", twice)
