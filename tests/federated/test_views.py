"""Epsilon by who sees what: published values, exact twins, and simulated rounds."""

import math

import numpy as np
import pytest

from curvedp.accounting import (
    GaussianAccountant,
    GaussianEvent,
    PLDAccountant,
    PoissonGaussianEvent,
    SeenGaussianEvent,
    event_from_json,
    repeated,
)
from curvedp.accounting.gaussian import gaussian_epsilon, gaussian_log_delta
from curvedp.barrier import Relation
from curvedp.errors import ConfigurationError, UnknownEventError
from curvedp.federated import FederatedPlan, Federation, Observer, Unit, View

EACH, SECURE, TRUSTED = "each-client", "secure-aggregate", "trusted-aggregate"
RELATIONS = list(Relation)
#: Rounding in the simulations below: some 10^6 draws.
SAMPLING_ERROR = 0.01


def twenty(relation=Relation.ADD_REMOVE, sizes=(2500.0,) * 20, rounds=70, **facts):
    return Federation(tuple(sizes), rounds, relation=relation, **facts)


def noise_for(federation, view, epsilon=1.0, delta=1e-5):
    plan = FederatedPlan.make(federation, view, bound=1.0, delta=delta, epsilon=epsilon)
    return plan.noise_multiplier


# -- the published values: 20 clients, 70 rounds, epsilon 1, delta 1e-5 ----------------


@pytest.mark.parametrize(
    ("relation", "view", "expected"),
    [
        (Relation.REPLACE_ONE, EACH, 279.18),
        (Relation.REPLACE_ONE, SECURE, 62.43),
        (Relation.REPLACE_ONE, TRUSTED, 62.43),
        (Relation.ADD_REMOVE, EACH, 139.59),
        (Relation.ADD_REMOVE, SECURE, 31.21),
        (Relation.ADD_REMOVE, TRUSTED, 31.21),
        (Relation.ZERO_OUT, EACH, 139.59),
        (Relation.ZERO_OUT, SECURE, 31.21),
    ],
)
def test_noise_of_each_view_and_relation(relation, view, expected):
    assert noise_for(twenty(relation), view) == pytest.approx(expected, rel=0.001)


@pytest.mark.parametrize("relation", RELATIONS)
def test_an_observer_who_sees_less_needs_less_noise_by_the_root_of_n(relation):
    each, secure = (noise_for(twenty(relation), v) for v in (EACH, SECURE))
    assert each / secure == pytest.approx(math.sqrt(20), rel=1e-4)


@pytest.mark.parametrize("colluding", [1, 5, 19])
@pytest.mark.parametrize("name", [SECURE, TRUSTED])
def test_colluders_take_their_noise_away(colluding, name):
    view = View.of(name, colluding=colluding)
    expected = 31.2128 * math.sqrt(20 / (20 - colluding))
    assert noise_for(twenty(), view) == pytest.approx(expected, rel=1e-4)


def test_dropouts_are_covered_in_a_secure_aggregate_and_made_up_for_by_a_trusted_one():
    secure = noise_for(twenty(), View.of(SECURE, colluding=1, dropouts=3))
    assert secure == pytest.approx(31.2128 * math.sqrt(20 / 16), rel=1e-4)
    trusted = noise_for(twenty(), View.of(TRUSTED, dropouts=3))
    assert trusted == pytest.approx(31.2128, rel=1e-4)


def test_unequal_sizes_follow_the_formula():
    sizes = (100.0, 400.0, 400.0, 2000.0, 50.0)
    federation = twenty(sizes=sizes)
    seen = federation.seen_noise(View.of(SECURE), 10.0)
    inverse = [1 / n for n in sizes]
    factor = max(inverse) / math.sqrt(sum(x * x for x in inverse) / len(sizes))
    assert 1 / seen == pytest.approx(factor / 10.0, rel=1e-12)
    # every client's own share hides its records alike, whatever its size
    own = federation.seen_noise(View(), 10.0)
    assert own == pytest.approx(10.0 / math.sqrt(5), rel=1e-12)


# -- simulated rounds -----------------------------------------------------------------


def simulated_means(federation, noise, record_of, missing, rng, draws=400_000):
    """The mean of all updates along the direction of one record, without and with it.

    Written from the protocol, not from the formula: sums, shares, divisors, mean.
    What colluders and drop-outs add is known or absent, so it is left out.
    """
    n = federation.clients
    without, with_it = np.zeros(draws), np.zeros(draws)
    for i, size in enumerate(federation.sizes):
        if i in missing:
            continue
        for total, present in ((without, False), (with_it, True)):
            share = rng.normal(0.0, noise / math.sqrt(n), draws)
            own = 1.0 if present and i == record_of else 0.0
            total += (own + share) / size / n
    return without, with_it


@pytest.mark.parametrize("lost", [(), (3,), (3, 1)])
def test_simulated_rounds_of_unequal_clients_cost_what_is_claimed(lost):
    sizes, noise, rounds = (40.0, 300.0, 90.0, 50.0, 1000.0), 2.0, 1
    federation = twenty(sizes=sizes, rounds=rounds)
    view = View.of(SECURE, colluding=len(lost))
    rng = np.random.default_rng(3)
    worst = 0.0
    for owner in range(len(sizes)):
        if owner in lost:
            continue
        a, b = simulated_means(federation, noise, owner, lost, rng)
        spread = (a.std() + b.std()) / 2
        worst = max(worst, (b.mean() - a.mean()) / spread)
    claimed = 1.0 / federation.seen_noise(view, noise)
    # the clients that were lost are those whose loss is worst, so the bound is met
    expected = claimed if lost != (3, 1) else None
    if expected is not None:
        assert worst == pytest.approx(claimed, rel=SAMPLING_ERROR)
    assert worst <= claimed * (1 + SAMPLING_ERROR)


def test_simulated_privacy_loss_has_the_claimed_delta():
    sizes, noise = (40.0, 300.0, 90.0, 50.0), 2.5
    federation = twenty(sizes=sizes, rounds=1)
    rng = np.random.default_rng(5)
    a, b = simulated_means(federation, noise, 0, (), rng, draws=1_000_000)
    mid, var = (a.mean() + b.mean()) / 2, (a.var() + b.var()) / 2
    loss = (b.mean() - a.mean()) * (b - mid) / var
    epsilon = 0.5
    measured = np.maximum(0.0, 1 - np.exp(epsilon - loss)).mean()
    event = federation.round_event(View.of(TRUSTED), noise)
    claimed = GaussianAccountant().delta(event, Relation.ADD_REMOVE, epsilon)
    assert measured == pytest.approx(claimed, rel=0.03)


def test_the_smallest_size_in_both_places_is_not_conservative():
    sizes = (50.0, 5000.0, 5000.0, 5000.0)
    seen = twenty(sizes=sizes).seen_noise(View.of(SECURE), 10.0)
    as_if_equal = 10.0
    assert seen < 0.6 * as_if_equal


# -- sampling -------------------------------------------------------------------------


def test_records_drawn_in_secret_amplify_in_every_view():
    for view in (EACH, SECURE, TRUSTED):
        event = twenty(record_rate=0.1).round_event(View.of(view), 20.0)
        assert isinstance(event, PoissonGaussianEvent)
        assert event.sample_rate == 0.1
    assert noise_for(twenty(record_rate=0.1), EACH) < 0.2 * noise_for(twenty(), EACH)


@pytest.mark.parametrize("view", [EACH, SECURE])
@pytest.mark.parametrize("unit", list(Unit))
def test_a_draw_of_the_adversary_counts_for_nothing(view, unit):
    """The server draws: it may take the same client every time, and it knows whom."""
    facts = {"relation": Relation.ZERO_OUT, "unit": unit}
    drawn, asked = twenty(client_rate=0.2, **facts), twenty(**facts)
    event = drawn.round_event(View.of(view), 20.0)
    assert event == asked.round_event(View.of(view), 20.0)
    assert isinstance(event, GaussianEvent)
    assert noise_for(drawn, view) == noise_for(asked, view)


def test_what_the_server_could_learn_is_not_lowered_by_its_own_draw():
    plan = FederatedPlan.make(
        twenty(client_rate=0.2), TRUSTED, bound=1.0, delta=1e-5, noise_multiplier=20.0
    )
    whole = FederatedPlan.make(
        twenty(), TRUSTED, bound=1.0, delta=1e-5, noise_multiplier=20.0
    )
    looks = "if the server looks"
    assert dict(plan.statement())[looks] == dict(whole.statement())[looks]


def test_an_honest_draw_of_clients_does_not_amplify_for_a_record():
    event = twenty(client_rate=0.2).round_event(View.of(TRUSTED), 20.0)
    assert isinstance(event, SeenGaussianEvent)
    # never less than what a record in exactly the mean number of rounds costs
    plan = FederatedPlan.make(
        twenty(client_rate=0.2), TRUSTED, bound=1.0, delta=1e-5, noise_multiplier=20.0
    )
    certain = FederatedPlan.make(
        twenty(rounds=14), TRUSTED, bound=1.0, delta=1e-5, noise_multiplier=20.0
    )
    assert certain.epsilon() < plan.epsilon() < 2 * certain.epsilon()


def test_a_record_whose_client_is_drawn_visibly_costs_what_simulation_says():
    # the client's other records put its sum far away: the coin shows
    rate, rounds, mu, epsilon = 0.3, 5, 0.8, 1.0
    rng = np.random.default_rng(11)
    drawn = rng.random((400_000, rounds)) < rate
    noise = rng.normal(size=drawn.shape)
    loss = (drawn * (mu * noise + mu**2 / 2)).sum(1)
    measured = np.maximum(0.0, 1 - np.exp(epsilon - loss)).mean()
    event = repeated(SeenGaussianEvent(1 / mu, rate), rounds)
    claimed = GaussianAccountant().delta(event, Relation.ADD_REMOVE, epsilon)
    assert measured == pytest.approx(claimed, rel=0.03)
    # and that is more than secret sampling of the record alone would cost
    secret = repeated(PoissonGaussianEvent(1 / mu, rate), rounds)
    assert PLDAccountant().delta(secret, Relation.ADD_REMOVE, epsilon) < claimed / 2


def test_drawing_clients_amplifies_for_clients_of_a_trusted_aggregator_alone():
    facts = {"unit": Unit.CLIENT, "client_rate": 0.1, "relation": Relation.ZERO_OUT}
    federation = twenty(sizes=(100.0,) * 100, **facts)
    trusted = federation.round_event(View.of(TRUSTED), 20.0)
    assert trusted == PoissonGaussianEvent(20.0, 0.1)
    assert federation.round_event(View.of(SECURE), 20.0) == GaussianEvent(20.0)


def test_a_client_as_the_unit_has_the_same_weight_whatever_its_size():
    facts = {"unit": Unit.CLIENT, "relation": Relation.ZERO_OUT}
    federation = twenty(sizes=(10.0, 1000.0, 500.0, 20.0), **facts)
    assert federation.seen_noise(View.of(SECURE), 10.0) == pytest.approx(10.0)


# -- the formula itself ---------------------------------------------------------------


def test_delta_agrees_with_many_digits():
    mpmath = pytest.importorskip("mpmath")
    for mu in (1e-4, 1e-2, 0.1, 0.5, 1, 3, 10):
        for epsilon in (0.0, 1e-3, 0.1, 1, 5, 30):
            with mpmath.workdps(300):
                m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
                upper = mpmath.ncdf(m / 2 - e / m)
                exact = upper - mpmath.e**e * mpmath.ncdf(-m / 2 - e / m)
                if exact <= 0 or mpmath.log(exact) < -4e4:
                    continue
                logarithm = float(mpmath.log(exact))
            error = gaussian_log_delta(epsilon, mu) - logarithm
            assert -1e-11 * max(1, -logarithm) < error < 2e-10


@pytest.mark.parametrize("relation", RELATIONS)
def test_epsilon_agrees_with_pld_from_below(relation):
    event = repeated(GaussianEvent(30.0), 70)
    exact = GaussianAccountant().epsilon(event, relation, 1e-5)
    pld = PLDAccountant().epsilon(event, relation, 1e-5)
    assert pld / exact == pytest.approx(1.0, abs=2e-3)
    assert exact <= pld


def test_epsilon_is_the_inverse_of_delta():
    for mu in (0.01, 0.3, 2.0, 20.0):
        epsilon = gaussian_epsilon(mu, 1e-6)
        if epsilon:
            found = math.exp(gaussian_log_delta(epsilon, mu))
            assert found == pytest.approx(1e-6, rel=1e-7)
            assert found <= 1e-6


def test_edges_of_the_exact_accountant():
    exact = GaussianAccountant()
    nothing = repeated(GaussianEvent(1.0), 0)
    assert exact.epsilon(nothing, Relation.ADD_REMOVE, 1e-5) == 0.0
    silent = repeated(GaussianEvent(0.0), 3)
    assert math.isinf(exact.epsilon(silent, Relation.ADD_REMOVE, 1e-5))
    assert exact.delta(silent, Relation.ADD_REMOVE, 1.0) == 1.0
    with pytest.raises(UnknownEventError, match="pld"):
        exact.epsilon(PoissonGaussianEvent(1.0, 0.1), Relation.ADD_REMOVE, 1e-5)
    seen = SeenGaussianEvent(2.0, 0.25)
    assert event_from_json(seen.to_json()) == seen
    with pytest.raises(UnknownEventError):  # PLD has no rule for it and says so
        PLDAccountant().epsilon(seen, Relation.ADD_REMOVE, 1e-5)


# -- what is printed, what is refused -------------------------------------------------


def test_every_printed_epsilon_names_its_view():
    plan = FederatedPlan.make(
        twenty(), View.of(TRUSTED, colluding=2), bound=1.0, delta=1e-5, epsilon=1.0
    )
    shown = dict(plan.statement())
    assert "trusted" in shown["against"]
    assert "2 client(s)" in shown["against"]
    assert "record" in shown["unit"]
    assert "add-remove" in shown["unit"]
    # and what the server itself could learn
    assert "each-client" in shown["if the server looks"]
    assert plan.epsilon(view=EACH) > 4 * plan.epsilon()
    assert plan.promises()["view"] == TRUSTED


def test_the_digest_changes_with_whatever_matters():
    def digest(federation=None, view=EACH, bound=1.0):
        plan = FederatedPlan.make(
            federation or twenty(), view, bound=bound, delta=1e-5, epsilon=1.0
        )
        return plan.digest()

    seen = {
        digest(),
        digest(view=SECURE),
        digest(bound=2.0),
        digest(twenty(rounds=71)),
        digest(twenty(Relation.REPLACE_ONE)),
        digest(twenty(sizes=(2501.0,) + (2500.0,) * 19)),
    }
    assert len(seen) == 6


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: View.of("everything"), "each-client"),
        (lambda: View(Observer.SECURE_AGGREGATE, colluding=-1), "colluding"),
        (lambda: noise_for(twenty(), View.of(SECURE, colluding=20)), "leave no noise"),
        (lambda: noise_for(twenty(), View(colluding=1)), "noise of others"),
        (lambda: twenty(sizes=()), "sizes"),
        (lambda: twenty(sizes=(0.0, 3.0)), "sizes"),
        (lambda: twenty(rounds=0), "rounds"),
        (lambda: twenty(client_rate=0.0), "client_rate"),
        (lambda: twenty(unit=Unit.CLIENT, record_rate=0.5), "amplifies nothing"),
        (lambda: noise_for(twenty(unit=Unit.CLIENT), EACH, delta=1e-3), "zero-out"),
        (lambda: noise_for(twenty(), EACH, delta=1e-3), "delta"),
    ],
)
def test_refusals(make, words):
    with pytest.raises(ConfigurationError, match=words):
        make()
