"""Bounds against exact binomials, published figures and mechanisms that are known."""

import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from curvedp.accounting import PoissonGaussianEvent, repeated
from curvedp.accounting.accountants import PLDAccountant
from curvedp.auditing import (
    Claim,
    Rates,
    clopper_pearson,
    epsilon_at,
    epsilon_of_mu,
    fitted_epsilon,
    guess,
    judge,
    mu_at,
    one_run_epsilon,
    one_run_p_value,
)
from curvedp.auditing.bounds import _ruled_out
from curvedp.auditing.evidence import disentangled_ratio, likelihood_ratio
from curvedp.barrier import Relation
from curvedp.errors import ConfigurationError

# -- rates -----------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "n"), [(0, 7), (1, 7), (40, 100), (99, 100), (100, 100)])
def test_clopper_pearson_is_what_the_binomial_says(k, n):
    low, high = clopper_pearson(k, n, 0.025)
    if k:
        assert binom.sf(k - 1, n, low) == pytest.approx(0.025)
    if k < n:
        assert binom.cdf(k, n, high) == pytest.approx(0.025)
    assert low <= k / n <= high


def test_clopper_pearson_of_a_textbook():
    """4 of 20 at 95 %: 0.0573 to 0.4366 (Agresti and Coull, 1998, and elsewhere)."""
    assert clopper_pearson(4, 20, 0.025) == pytest.approx((0.0573, 0.4366), abs=1e-4)


def test_both_inequalities_of_differential_privacy_are_used():
    high_side, low_side = Rates(500, 1000, 1, 1000), Rates(999, 1000, 500, 1000)
    assert epsilon_at(high_side, 1e-5) == pytest.approx(epsilon_at(low_side, 1e-5))
    assert epsilon_at(high_side, 1e-5) > 4


def response(epsilon, runs, generator):
    """Randomised response: tells the truth with probability e^eps / (1 + e^eps)."""
    truth = 1 / (1 + math.exp(-epsilon))
    return Rates(
        int(generator.binomial(runs, truth)), runs,
        int(generator.binomial(runs, 1 - truth)), runs,
    )  # fmt: skip


def exceeding(bound, epsilon, runs=200, times=400):
    """How often a bound is above the epsilon of a mechanism that has just that."""
    generator = np.random.default_rng(7)
    return np.mean(
        [bound(response(epsilon, runs, generator)) > epsilon for _ in range(times)]
    )


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 3.0])
def test_randomised_response_stays_below_its_epsilon(epsilon):
    assert exceeding(lambda rates: epsilon_at(rates, 0.0), epsilon) <= 0.05


def test_a_bound_without_intervals_would_be_noticed():
    """The test above can fail: rates as they were counted exceed it half the time."""

    def naive(rates):
        hit = max(rates.hits, 1) / rates.with_canary
        return math.log(hit / (max(rates.alarms, 1) / rates.without))

    assert exceeding(naive, 1.0) > 0.3


def test_an_interval_of_another_error_would_be_noticed():
    """Nor would intervals at 50 % do."""
    assert exceeding(lambda rates: epsilon_at(rates, 0.0, 0.5), 1.0) > 0.05


# -- Gaussians -------------------------------------------------------------------------


@pytest.mark.parametrize("mu", [0.1, 0.5, 1.0, 3.0, 6.0])
def test_epsilon_of_mu_is_what_the_accountant_says(mu):
    event = PoissonGaussianEvent(1 / mu, 1.0)
    exact = PLDAccountant().epsilon(event, Relation.ADD_REMOVE, 1e-5)
    assert epsilon_of_mu(mu, 1e-5) == pytest.approx(exact, rel=2e-3)


def test_epsilon_of_mu_as_published():
    """Noise 4 at delta 1e-5: the analytic Gaussian mechanism has epsilon 0.921."""
    found = epsilon_of_mu(0.25, 1e-5)
    tail = norm.cdf(0.125 - found / 0.25) - math.exp(found) * norm.cdf(
        -0.125 - found / 0.25
    )
    assert tail == pytest.approx(1e-5, rel=1e-6)


def gaussian_rates(mu, runs, threshold, generator):
    return Rates(
        int((generator.normal(mu, 1, runs) > threshold).sum()), runs,
        int((generator.normal(0, 1, runs) > threshold).sum()), runs,
    )  # fmt: skip


def test_mu_is_seldom_too_large_and_close_with_many_runs():
    generator = np.random.default_rng(3)
    found = [mu_at(gaussian_rates(1.0, 300, 0.5, generator)) for _ in range(400)]
    assert np.mean(np.array(found) > 1.0) <= 0.05
    assert mu_at(gaussian_rates(1.0, 10**6, 0.5, generator)) > 0.99


def claim_of(noise_multiplier, sample_rate, steps, relation=Relation.ADD_REMOVE):
    event = repeated(PoissonGaussianEvent(noise_multiplier, sample_rate), steps)
    epsilon = PLDAccountant().epsilon(event, relation, 1e-5)
    return Claim(epsilon, 1e-5, noise_multiplier, sample_rate, steps, relation)


def test_the_fit_at_sampling_rate_one_is_that_of_two_gaussians():
    rates = Rates(700, 1000, 150, 1000)
    fitted = fitted_epsilon(rates, claim_of(3.0, 1.0, 10))
    assert fitted == pytest.approx(epsilon_of_mu(mu_at(rates), 1e-5), rel=0.02)
    assert fitted <= epsilon_of_mu(mu_at(rates), 1e-5)


def sampled_scores(claim, runs, included, generator):
    """Log likelihood ratios of runs of the mechanism, by the definition."""
    s, q = claim.noise_multiplier, claim.sample_rate
    y = generator.normal(0, s, (runs, claim.steps))
    if included:
        y += generator.random((runs, claim.steps)) < q
    ratios = likelihood_ratio(y, np.ones_like(y), s**2, q)
    return ratios.sum(1)


def test_the_fit_of_a_sampled_mechanism_is_below_its_epsilon_and_close():
    claim, generator = claim_of(1.0, 0.2, 10), np.random.default_rng(0)
    inside, outside = (
        sampled_scores(claim, 20_000, included, generator) for included in (True, False)
    )
    found = judge(inside, outside, claim)
    assert 0.8 * claim.epsilon < found.fitted.epsilon < claim.epsilon
    assert 0 < found.clopper_pearson.epsilon < claim.epsilon


def test_the_fit_seldom_rules_out_the_noise_that_was_there():
    """The bound is above the claim just if the claimed noise itself is ruled out."""
    claim, generator, runs = claim_of(1.0, 0.2, 10), np.random.default_rng(8), 300
    wrong, careless = 0, 0
    for _ in range(300):
        hits, alarms = (
            int((sampled_scores(claim, runs, included, generator) > 0.3).sum())
            for included in (True, False)
        )
        rates = Rates(hits, runs, alarms, runs)
        wrong += _ruled_out(claim, 1.0, *rates.bounds(0.95))
        careless += _ruled_out(claim, 1.0, hits / runs, max(alarms, 1) / runs)
    assert wrong <= 0.05 * 300
    assert careless > 0.05 * 300  # or the test could not fail


def test_the_likelihood_ratio_is_that_of_the_densities():
    y, q, s = np.array([-1.0, 0.3, 2.0]), 0.3, 0.8
    mixture = (1 - q) * norm.pdf(y, 0, s) + q * norm.pdf(y, 1, s)
    expected = np.log(mixture / norm.pdf(y, 0, s))
    assert likelihood_ratio(y, np.ones(3), s**2, q) == pytest.approx(expected)
    assert likelihood_ratio(y, np.ones(3), s**2, 1.0) == pytest.approx(
        norm.logpdf(y, 1, s) - norm.logpdf(y, 0, s)
    )


def test_overlapping_canaries_are_told_apart_by_the_definition():
    """Against the covariance of the others written out, one canary at a time."""
    generator, q, t = np.random.default_rng(4), 0.3, 0.7
    v = generator.normal(size=(5, 8))
    v[1] = v[0] + 0.1 * v[1]
    r = generator.normal(size=8)
    found = disentangled_ratio(v @ r, v @ v.T, t, q)
    for i in range(5):
        others = np.delete(v, i, 0)
        inverse = np.linalg.inv(t * np.eye(8) + q / 2 * (1 - q / 2) * others.T @ others)
        rest = r - q / 2 * others.sum(0)
        shift = v[i] @ inverse @ (rest - v[i] / 2)
        assert found[i] == pytest.approx(np.log(1 - q + q * np.exp(shift)))


def test_canaries_that_do_not_overlap_are_told_apart_as_if_alone():
    v, r = np.diag([1.0, 2.0, 3.0]), np.array([0.3, -1.0, 2.0])
    together = disentangled_ratio(v @ r, v @ v.T, 0.5, 0.4)
    alone = likelihood_ratio(v @ r, np.array([1.0, 4.0, 9.0]), 0.5, 0.4)
    assert together == pytest.approx(alone)


def test_the_threshold_is_not_chosen_on_the_runs_it_is_judged_by():
    """Equal scores in both worlds: the best threshold in hindsight proves nothing."""
    generator, claim = np.random.default_rng(5), claim_of(1.0, 1.0, 1)
    proved = []
    for _ in range(60):
        inside, outside = generator.normal(size=(2, 80))
        proved.append(judge(inside, outside, claim).best.epsilon)
    assert np.mean(np.array(proved) > 0) <= 0.05


@pytest.mark.parametrize("scores", [[math.nan] * 20, [0.0] * 3])
def test_scores_that_prove_nothing_are_refused(scores):
    with pytest.raises(ConfigurationError):
        judge(scores, [0.0] * 20, claim_of(1.0, 1.0, 1))


# -- one run ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("canaries", "guesses", "right", "delta", "published"),
    [
        (100, 100, 75, 0.0, 0.702),
        (100, 100, 75, 1e-4, 0.699),
        (1000, 100, 75, 1e-4, 0.673),
        (100_000, 1510, 1439, 1e-5, 2.675),
    ],
)
def test_one_run_as_published(canaries, guesses, right, delta, published):
    """Steinke et al. 2023, appendix D and section 7."""
    found = one_run_epsilon(canaries, guesses, right, delta)
    assert found == pytest.approx(published, abs=1e-3)


def test_the_p_value_is_its_definition():
    m, r, v, epsilon, delta = 50, 30, 24, 0.8, 1e-3
    p = math.exp(epsilon) / (1 + math.exp(epsilon))
    law = [binom.pmf(k, r, p) for k in range(r + 1)]
    slope = max(sum(law[v - i : v]) / i for i in range(1, v + 1))
    expected = sum(law[v:]) + 2 * m * delta * slope
    assert one_run_p_value(m, r, v, epsilon, delta) == pytest.approx(expected)
    assert one_run_p_value(m, r, v, epsilon, 0.0) == pytest.approx(sum(law[v:]))


def test_guesses_about_randomised_response_stay_below_its_epsilon():
    generator, epsilon = np.random.default_rng(1), 1.0
    truth = 1 / (1 + math.exp(-epsilon))
    proved = []
    for _ in range(100):
        coins = generator.random(200) < 0.5
        told = np.where(generator.random(200) < truth, coins, ~coins)
        scores = told + 0.1 * generator.random(200)
        proved.append(guess(scores, coins, 0.0).epsilon)
    assert np.mean(np.array(proved) > epsilon) <= 0.05
    assert np.mean(proved) > 0.4  # and it proves something


def test_sure_guesses_prove_more_than_many():
    """A mechanism that betrays a few canaries for sure: abstaining from the others."""
    generator = np.random.default_rng(2)
    coins = generator.random(1000) < 0.5
    scores = generator.normal(size=1000)
    scores[:150] += np.where(coins[:150], 100, -100)
    found = guess(scores, coins, 1e-6)
    assert found.made < 200
    assert found.epsilon > 1.0 > one_run_epsilon(1000, 1000, 530, 1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scores_that_are_no_numbers_prove_nothing(value):
    """They sort to one end, and would all be called "in" or all "out"."""
    scores, coins = np.arange(40.0), np.arange(40) % 2 == 0
    scores[7] = value
    with pytest.raises(ConfigurationError, match="not a finite number"):
        guess(scores, coins, 1e-6)


@pytest.mark.parametrize("numbers", [(10, 12, 5), (10, 5, 7), (10, 5, -1)])
def test_impossible_counts_are_refused(numbers):
    with pytest.raises(ConfigurationError):
        one_run_p_value(*numbers, 1.0, 0.0)
