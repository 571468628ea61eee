"""The auditor finds what it is there to find: planted faults break the claim."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from curvedp import make_private
from curvedp.auditing import Rates, audit_step, audit_worst_case, epsilon_at
from curvedp.auditing.witness import next_sum

from . import planted, shuffling

#: Whole runs of ten steps at sampling rate 0.3, claimed epsilon 2: 500 canaries.
QUICK = {"epsilon": 2.0, "canaries": 250, "runs": 2, "unsafe_reproducible_noise": 5}
#: The same with 12 000 canaries.
FULL = {**QUICK, "canaries": 500, "runs": 24}
SIZES = [QUICK, pytest.param(FULL, marks=pytest.mark.slow)]


@pytest.mark.slow  # the quick one is that of 60 % in test_audit
@pytest.mark.parametrize("size", [QUICK, FULL])
def test_the_honest_run_stays_below_its_claim(size):
    result = audit_worst_case("dp-sgd", **size)
    assert 0 < result.epsilon_lower < result.claim.epsilon


@pytest.mark.parametrize("size", SIZES)
def test_halved_noise_is_found(size, monkeypatch):
    planted.halve_the_noise(monkeypatch)
    result = audit_worst_case("dp-sgd", **size)
    assert not result.holds
    assert result.epsilon_lower > 1.2 * result.claim.epsilon


@pytest.mark.parametrize("size", SIZES)
def test_replacement_counted_as_adding_and_removing_is_found(size):
    result = audit_worst_case("dp-sgd", replaced=True, **size)
    assert result.claim.relation.value == "add-remove"
    assert result.epsilon_lower > 1.2 * result.claim.epsilon


@pytest.mark.parametrize("size", SIZES)
def test_replacement_counted_as_such_stays_below_its_claim(size):
    result = audit_worst_case("dp-sgd", replaced=True, relation="replace-one", **size)
    assert 0 < result.epsilon_lower < result.claim.epsilon


def pulling_both_ways(count):
    """Others pull one way; the last example pulls the other way, far more."""
    x = torch.full((count, 1), 1e3)
    y = torch.ones(count, dtype=torch.int64)
    x[-1], y[-1] = 1e6, 0
    return TensorDataset(x, y)


def step_of(dataset):
    model = nn.Linear(1, 2, bias=False)
    nn.init.zeros_(model.weight)
    return make_private(
        model, torch.optim.SGD(model.parameters(), 0.1), dataset, loss="cross-entropy",
        epsilon=2.0, delta=1e-5, sample_rate=1.0, steps=1, expected_batch_size=5.0,
        unsafe_reproducible_noise=0,
    )  # fmt: skip


def audit_of_a_step():
    data = pulling_both_ways(6)
    others = TensorDataset(*(t[:-1] for t in data.tensors))
    private = step_of(data)
    sums = [next_sum(step_of(others)), next_sum(private)]
    mechanism, delta = private.plan.mechanism(), private.plan.delta
    found = audit_step(mechanism, sums, delta, unsafe_reproducible_noise=1)
    return found, private.plan.epsilon()


def test_a_step_stays_below_its_claim_and_comes_close():
    found, claim = audit_of_a_step()
    assert 0.7 * claim < found.epsilon_lower < claim
    assert found.distance == pytest.approx(1.0, rel=2e-4)


def test_clipping_after_summing_is_found(monkeypatch):
    planted.clip_after_summing(monkeypatch)
    found, claim = audit_of_a_step()
    assert found.epsilon_lower > 1.5 * claim
    assert found.distance == pytest.approx(2.0, rel=1e-5)


def audit_of_batches(runs, *setting):
    frozen = shuffling.Frozen(*setting)
    inside, outside = frozen.scores(runs)
    hits, alarms = (
        sum(score > shuffling.THRESHOLD for score in scores)
        for scores in (inside, outside)
    )
    bound = epsilon_at(Rates(hits, runs, alarms, runs), frozen.claim.delta)
    return bound, frozen.claim.epsilon


#: Runs with and as many without the canary; batches of a pass, noise, delta.
BATCHES = [
    (100, 50, 0.7, 1e-2),
    pytest.param((1500, 100, 0.7, 1e-5), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("setting", BATCHES)
def test_shuffled_batches_accounted_as_poisson_are_found(setting, monkeypatch):
    planted.shuffle(monkeypatch)
    bound, claim = audit_of_batches(*setting)
    assert bound > claim


@pytest.mark.parametrize("setting", [(40, 50, 0.7, 1e-2), *BATCHES[1:]])
def test_the_same_attack_on_poisson_samples_stays_below_the_claim(setting):
    bound, claim = audit_of_batches(*setting)
    assert bound < claim
