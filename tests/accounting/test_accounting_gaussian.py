"""The exact account of one Gaussian: tight, from tiny epsilons to large ones."""

import math

import pytest
from scipy.stats import norm

from curvedp.accounting.gaussian import gaussian_epsilon, gaussian_log_delta


def delta_of(epsilon, mu):
    """Balle and Wang 2018, theorem 8, as it is printed."""
    above = norm.cdf(mu / 2 - epsilon / mu)
    return above - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize("mu", [0.02, 0.1, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.01, 0.2, 1.0, 4.0])
def test_log_delta_is_that_of_the_printed_formula(mu, epsilon):
    printed = delta_of(epsilon, mu)
    if printed > 1e-8:  # below, the difference has no digits left
        found = math.exp(gaussian_log_delta(epsilon, mu))
        assert found == pytest.approx(printed, rel=1e-6)


@pytest.mark.parametrize("mu", [0.01, 0.05, 0.2, 0.5, 1.0, 2.0, 5.0, 30.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9])
def test_epsilon_is_the_least_that_delta_allows(mu, delta):
    epsilon = gaussian_epsilon(mu, delta)
    assert gaussian_log_delta(epsilon, mu) <= math.log(delta)
    assert gaussian_log_delta(epsilon * (1 - 1e-6), mu) > math.log(delta)


def test_where_delta_covers_all_epsilon_is_zero():
    assert gaussian_epsilon(1e-6, 1e-3) == 0.0
