"""The best of a random number of trials: its cost, its noise, and the number itself."""

import json
import math
from collections import Counter

import dp_accounting as dp
import pytest
from dp_accounting import dp_event, rdp

from curvedp.accounting import (
    GaussianEvent,
    PLDAccountant,
    PoissonGaussianEvent,
    RDPAccountant,
    RepeatAndSelectEvent,
    Repeats,
    calibrate_selected_sigma,
    event_from_json,
    repeated,
)
from curvedp.barrier import Relation
from curvedp.errors import ConfigurationError, UnknownEventError

RATE, STEPS, DELTA = 0.1, 60, 1e-5
LAWS = ("poisson", "geometric", "logarithmic")
UPSTREAM = {
    Relation.ADD_REMOVE: dp.NeighboringRelation.ADD_OR_REMOVE_ONE,
    Relation.ZERO_OUT: dp.NeighboringRelation.REPLACE_SPECIAL,
}


def direct(sigma, mean, shape, relation):
    """As dp-accounting computes it, without our code."""
    step = dp.PoissonSampledDpEvent(RATE, dp.GaussianDpEvent(sigma))
    trial = dp.SelfComposedDpEvent(step, STEPS)
    accountant = rdp.RdpAccountant(neighboring_relation=UPSTREAM[relation])
    accountant.compose(dp_event.RepeatAndSelectDpEvent(trial, mean, shape))
    return accountant.get_epsilon(DELTA)


def event_of(sigma, repeats):
    return repeats.event(repeated(PoissonGaussianEvent(sigma, RATE), STEPS))


@pytest.mark.parametrize("relation", UPSTREAM)
@pytest.mark.parametrize("law", LAWS)
def test_epsilon_is_that_of_dp_accounting(law, relation):
    repeats = Repeats(8, law)
    ours = RDPAccountant().epsilon(event_of(2.0, repeats), relation, DELTA)
    assert ours == direct(2.0, 8, repeats.shape, relation)
    alone = repeated(PoissonGaussianEvent(2.0, RATE), STEPS)
    assert ours > RDPAccountant().epsilon(alone, relation, DELTA)


@pytest.mark.parametrize("law", LAWS)
def test_calibrated_noise_is_the_least_that_stays_inside(law):
    repeats = Repeats(6, law)
    sigma = calibrate_selected_sigma(
        2.0, DELTA, repeats=repeats, sample_rate=RATE, steps=STEPS, relation="zero-out"
    )
    spent = direct(sigma, 6, repeats.shape, Relation.ZERO_OUT)
    assert 1.99 < spent <= 2.0
    assert direct(0.999 * sigma, 6, repeats.shape, Relation.ZERO_OUT) > 2.0


def test_one_gaussian_can_be_calibrated_too():
    repeats = Repeats(6, "geometric")
    sigma = calibrate_selected_sigma(
        2.0, DELTA, repeats=repeats, sample_rate=1.0, steps=1, relation="add-remove"
    )
    event = repeats.event(GaussianEvent(sigma))
    assert 1.99 < RDPAccountant().epsilon(event, Relation.ADD_REMOVE, DELTA) <= 2.0


def test_only_rdp_knows_it_and_not_under_replace_one():
    event = event_of(2.0, Repeats(4))
    with pytest.raises(UnknownEventError, match="best of several trials"):
        PLDAccountant().epsilon(event, Relation.ADD_REMOVE, DELTA)
    with pytest.raises(ConfigurationError, match="replace-one"):
        RDPAccountant().epsilon(event, Relation.REPLACE_ONE, DELTA)


def test_without_noise_it_costs_infinity():
    event = event_of(0.0, Repeats(4, "geometric"))
    assert RDPAccountant().epsilon(event, Relation.ADD_REMOVE, DELTA) == math.inf


@pytest.mark.parametrize("law", LAWS)
def test_json_there_and_back(law):
    event = event_of(1.5, Repeats(3, law))
    text = json.dumps(event.to_json(), allow_nan=False)
    assert event_from_json(json.loads(text)) == event


@pytest.mark.parametrize(
    ("mean", "shape"), [(0.5, 1.0), (math.nan, 1.0), (2.0, -1.0), (2.0, math.nan)]
)
def test_impossible_laws_are_refused(mean, shape):
    with pytest.raises(ConfigurationError):
        RepeatAndSelectEvent(GaussianEvent(1.0), mean, shape)


def test_unknown_laws_and_means_are_refused():
    with pytest.raises(ConfigurationError, match="poisson, geometric, logarithmic"):
        Repeats(5, "uniform")
    with pytest.raises(ConfigurationError, match="1 or more"):
        Repeats(0.5)


def probability(k, repeats):
    """From the paper's definitions, with g found by another way than the code's."""
    if repeats.law == "poisson":
        return math.exp(-repeats.mean) * repeats.mean**k / math.factorial(k)
    if k == 0:
        return 0.0
    if repeats.law == "geometric":
        return (1 - 1 / repeats.mean) ** (k - 1) / repeats.mean
    g = rdp.rdp_privacy_accountant._gamma_truncated_negative_binomial(0, repeats.mean)
    return (1 - g) ** k / (k * math.log(1 / g))


@pytest.mark.parametrize("law", LAWS)
def test_the_number_of_trials_has_the_law(law):
    repeats, draws = Repeats(4, law), 20_000
    counts = Counter(repeats.draw() for _ in range(draws))
    for k in range(12):
        expected = draws * probability(k, repeats)
        # five standard deviations: one failure in a hundred thousand runs
        assert abs(counts[k] - expected) <= 5 * math.sqrt(expected) + 1e-9, k


def test_a_mean_of_one_is_one_trial():
    assert {Repeats(1, law).draw() for law in ("geometric", "logarithmic")} == {1}
