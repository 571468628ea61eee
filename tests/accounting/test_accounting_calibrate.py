"""Calibration: known values, never beyond the target, and clear refusals."""

import math
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from curvedp.accounting import (
    PLDAccountant,
    calibrate_sigma,
    calibrate_steps,
    epsilon_of,
)
from curvedp.accounting.calibrate import _round_up
from curvedp.errors import ConfigurationError

DELTA = 1e-5
MNIST = 256 / 60000
CIFAR = 4096 / 50000
few = settings(max_examples=6, deadline=None, derandomize=True)


@pytest.mark.parametrize(
    ("epsilon", "rate", "steps", "relation", "expected"),
    [
        (0.5, MNIST, 1170, "add-remove", 1.278),
        (1.0, MNIST, 1170, "add-remove", 0.904),
        (2.0, MNIST, 1170, "add-remove", 0.729),
        (8.0, MNIST, 1170, "add-remove", 0.4902),
        (1.0, MNIST, 1170, "replace-one", 1.1444),
        (1.0, CIFAR, 840, "add-remove", 8.94),
        (2.0, CIFAR, 1320, "add-remove", 6.02),
        (4.0, CIFAR, 1920, "add-remove", 3.9742),
        (8.0, CIFAR, 2640, "zero-out", 2.6409),
    ],
)
def test_known_values_meet_the_target(epsilon, rate, steps, relation, expected):
    run = {"sample_rate": rate, "steps": steps, "relation": relation}
    sigma = calibrate_sigma(epsilon, DELTA, **run)
    assert sigma == pytest.approx(expected, rel=5e-3)
    for accountant in ("pld", PLDAccountant(1e-3)):
        assert epsilon_of(sigma, delta=DELTA, accountant=accountant, **run) <= epsilon
    # and it is not more noise than needed
    assert epsilon_of(sigma * 0.99, delta=DELTA, **run) > epsilon


def test_known_value_with_rdp():
    run = {"sample_rate": MNIST, "steps": 1170, "relation": "add-remove"}
    sigma = calibrate_sigma(1.0, DELTA, accountant="rdp", **run)
    assert sigma > calibrate_sigma(1.0, DELTA, **run)
    assert 0.999 < epsilon_of(sigma, delta=DELTA, accountant="rdp", **run) <= 1.0


@few
@given(
    epsilon=st.floats(0.3, 6.0),
    rate=st.floats(0.001, 0.3),
    steps=st.integers(1, 3000),
    relation=st.sampled_from(["add-remove", "zero-out", "replace-one"]),
)
def test_calibrated_sigma_always_meets_the_target_and_steps_agree(
    epsilon, rate, steps, relation
):
    run = {"sample_rate": rate, "relation": relation}
    sigma = calibrate_sigma(epsilon, DELTA, steps=steps, **run)
    assert epsilon_of(sigma, steps=steps, delta=DELTA, **run) <= epsilon
    found = calibrate_steps(epsilon, DELTA, sigma=sigma, **run)
    assert found >= steps
    assert epsilon_of(sigma, steps=found, delta=DELTA, **run) <= epsilon
    assert epsilon_of(sigma, steps=found + 1, delta=DELTA, **run) > epsilon


@few
@given(
    epsilon=st.floats(0.3, 6.0),
    factor=st.floats(1.05, 3.0),
    rate=st.floats(0.002, 0.1),
    steps=st.integers(50, 3000),
)
def test_sigma_falls_with_epsilon(epsilon, factor, rate, steps):
    def sigma(target):
        return calibrate_sigma(
            target,
            DELTA,
            sample_rate=rate,
            steps=steps,
            relation="add-remove",
            accountant=PLDAccountant(1e-3),
        )

    assert sigma(epsilon * factor) < sigma(epsilon)


def test_a_small_target_is_not_wasted_on_the_coarse_grid():
    # One step costs far less than the grid of the search is wide: its answer alone
    # would spend a third of the target.
    run = {"sample_rate": 0.0043, "steps": 1170, "relation": "add-remove"}
    sigma = calibrate_sigma(0.02, DELTA, **run)
    assert 0.98 * 0.02 < epsilon_of(sigma, delta=DELTA, **run) <= 0.02


@pytest.mark.parametrize("sigma", [1.23451, 0.490149, 62.00001, 0.0123412, 1.0, 3.9742])
def test_rounding_is_up_and_keeps_four_digits(sigma):
    rounded = _round_up(sigma)
    assert sigma <= rounded <= sigma * (1 + 1.1e-3)
    assert len(Decimal(repr(rounded)).normalize().as_tuple().digits) <= 6
    assert _round_up(rounded) == rounded


def test_one_full_batch_step_matches_the_gaussian():
    # The inverse of the closed form: mu = 0.26806 at epsilon 1, delta 1e-5.
    sigma = calibrate_sigma(1.0, DELTA, sample_rate=1.0, steps=1, relation="add-remove")
    assert sigma == pytest.approx(3.7306, abs=2e-3)
    twice = calibrate_sigma(
        1.0, DELTA, sample_rate=1.0, steps=1, relation="replace-one"
    )
    assert twice == pytest.approx(2 * sigma, rel=1e-3)


def test_zero_steps_cost_nothing():
    assert (
        epsilon_of(1.0, sample_rate=0.1, steps=0, delta=DELTA, relation="zero-out")
        == 0.0
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epsilon", 0.0),
        ("epsilon", -1.0),
        ("epsilon", math.inf),
        ("epsilon", math.nan),
        ("delta", 0.0),
        ("delta", 1.0),
        ("delta", math.nan),
        ("sample_rate", 0.0),
        ("sample_rate", 1.1),
        ("sample_rate", math.nan),
        ("steps", 0),
        ("steps", 2.0),
        ("steps", True),
        ("relation", "neighbours"),
        ("accountant", "gdp"),
    ],
)
def test_impossible_settings_are_named(name, value):
    settings = {
        "epsilon": 1.0,
        "delta": DELTA,
        "sample_rate": 0.01,
        "steps": 10,
        "relation": "add-remove",
    }
    with pytest.raises(ConfigurationError, match=name):
        calibrate_sigma(**(settings | {name: value}))
    if name != "steps":
        del settings["steps"]
        with pytest.raises(ConfigurationError, match=name):
            calibrate_steps(**(settings | {"sigma": 1.0, name: value}))


def test_a_delta_that_hides_the_whole_run_is_refused():
    with pytest.raises(ConfigurationError, match="sampled at all"):
        calibrate_sigma(1.0, 1e-5, sample_rate=1e-7, steps=10, relation="add-remove")


def test_an_epsilon_that_promises_nothing_is_refused():
    with pytest.raises(ConfigurationError, match="promises nothing"):
        calibrate_sigma(1e7, DELTA, sample_rate=0.5, steps=10, relation="add-remove")


def test_a_delta_that_cannot_be_certified_is_refused():
    with pytest.raises(ConfigurationError, match="no sigma"):
        calibrate_sigma(1.0, 1e-13, sample_rate=0.01, steps=1000, relation="add-remove")


def test_steps_when_even_one_is_too_dear():
    with pytest.raises(ConfigurationError, match="one step"):
        calibrate_steps(0.5, DELTA, sigma=0.5, sample_rate=0.5, relation="add-remove")
    with pytest.raises(ConfigurationError, match="one step"):
        calibrate_steps(0.5, DELTA, sigma=0.0, sample_rate=0.5, relation="add-remove")


def test_steps_when_the_budget_is_no_limit():
    with pytest.raises(ConfigurationError, match="no limit"):
        calibrate_steps(1.0, DELTA, sigma=1e7, sample_rate=1.0, relation="add-remove")


def test_replace_one_with_rdp_is_refused():
    with pytest.raises(ConfigurationError, match="'pld'"):
        calibrate_sigma(
            1.0,
            DELTA,
            sample_rate=0.01,
            steps=10,
            relation="replace-one",
            accountant="rdp",
        )
