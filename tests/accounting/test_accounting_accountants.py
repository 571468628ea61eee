"""Accountants: known values, order between them, edge cases, refusals."""

import math
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_ndtr

from curvedp.accounting import (
    Accountant,
    ComposedEvent,
    Event,
    GaussianEvent,
    PLDAccountant,
    PoissonGaussianEvent,
    RDPAccountant,
    get_accountant,
    repeated,
)
from curvedp.barrier import Relation
from curvedp.errors import ConfigurationError, UnknownEventError

DELTA = 1e-5
FINE, COARSE, RDP = PLDAccountant(), PLDAccountant(1e-3), RDPAccountant()
BOTH = [FINE, RDP]
RUN = repeated(PoissonGaussianEvent(1.0, 256 / 60000), 1170)
# Steps of ordinary training, where neither the grid nor the orders of RDP are loose.
sigmas = st.floats(0.7, 3.0)
rates = st.floats(0.002, 0.05)
counts = st.integers(100, 3000)
few = settings(max_examples=10, deadline=None, derandomize=True)


def exact_gaussian_delta(mu, epsilon):
    """Closed form for a Gaussian with sensitivity over noise ``mu``."""
    upper = math.exp(log_ndtr(mu / 2 - epsilon / mu))
    return upper - math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu))


def exact_gaussian_epsilon(mu, delta):
    low, high = 0.0, mu * mu / 2 + 40 * mu
    for _ in range(200):
        middle = (low + high) / 2
        if exact_gaussian_delta(mu, middle) > delta:
            low = middle
        else:
            high = middle
    return high


@pytest.mark.parametrize(
    ("accountant", "relation", "expected"),
    [
        (FINE, Relation.ADD_REMOVE, 0.7834),
        (FINE, Relation.ZERO_OUT, 0.7834),
        (FINE, Relation.REPLACE_ONE, 1.2095),
        (COARSE, Relation.ADD_REMOVE, 0.7850),
        (RDP, Relation.ADD_REMOVE, 1.1322),
        (RDP, Relation.ZERO_OUT, 1.1322),
    ],
)
def test_known_values(accountant, relation, expected):
    assert accountant.epsilon(RUN, relation, DELTA) == pytest.approx(expected, abs=6e-5)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
@pytest.mark.parametrize(
    ("relation", "sensitivity"),
    [(Relation.ADD_REMOVE, 1), (Relation.ZERO_OUT, 1), (Relation.REPLACE_ONE, 2)],
)
def test_one_gaussian_matches_the_closed_form_from_above(sigma, relation, sensitivity):
    exact = exact_gaussian_epsilon(sensitivity / sigma, DELTA)
    found = COARSE.epsilon(GaussianEvent(sigma), relation, DELTA)
    assert exact <= found <= exact * 1.001


@pytest.mark.parametrize("delta", [1e-5, 1e-8, 1e-10])
def test_composition_by_fft_stays_an_upper_bound_at_small_delta(delta):
    # Rate just below 1 goes through the FFT but costs what the Gaussian costs. Without
    # a margin for rounding, the result at 1e-10 is below the truth.
    steps = 10_000
    event = repeated(PoissonGaussianEvent(100.0, 1.0 - 1e-12), steps)
    exact = exact_gaussian_epsilon(math.sqrt(steps) / 100.0, delta)
    found = FINE.epsilon(event, Relation.ADD_REMOVE, delta)
    assert exact * (1 - 1e-9) <= found <= exact * 1.03


def test_delta_below_rounding_is_not_certified():
    assert math.isinf(FINE.epsilon(RUN, Relation.ADD_REMOVE, 1e-13))


@pytest.mark.parametrize("accountant", BOTH)
def test_delta_and_epsilon_agree(accountant):
    epsilon = accountant.epsilon(RUN, Relation.ADD_REMOVE, DELTA)
    delta = accountant.delta(RUN, Relation.ADD_REMOVE, epsilon)
    assert delta == pytest.approx(DELTA, rel=1e-3)


@pytest.mark.parametrize("accountant", BOTH)
@pytest.mark.parametrize("event", [ComposedEvent(()), repeated(GaussianEvent(0.0), 0)])
def test_nothing_costs_nothing(accountant, event):
    assert accountant.epsilon(event, Relation.ADD_REMOVE, DELTA) == 0.0


@pytest.mark.parametrize("accountant", BOTH)
@pytest.mark.parametrize("sigma", [0.0, 1e-12, 1e-300])
def test_no_noise_costs_infinity(accountant, sigma):
    event = ComposedEvent(((PoissonGaussianEvent(sigma, 0.01), 1), *RUN.parts))
    assert math.isinf(accountant.epsilon(event, Relation.ADD_REMOVE, DELTA))
    assert accountant.delta(event, Relation.ADD_REMOVE, 1.0) == 1.0


@pytest.mark.parametrize("accountant", [COARSE, RDP])
@pytest.mark.parametrize("rate", [0.01, 1.0])
def test_very_little_noise_is_very_dear_and_does_not_crash(accountant, rate):
    last = math.inf
    for sigma in (1e-3, 0.05, 0.2):
        event = repeated(PoissonGaussianEvent(sigma, rate), 100)
        epsilon = accountant.epsilon(event, Relation.ADD_REMOVE, DELTA)
        assert 10.0 < epsilon <= last
        last = epsilon


@pytest.mark.parametrize("accountant", BOTH)
def test_very_much_noise_is_nearly_free(accountant):
    event = repeated(PoissonGaussianEvent(1e9, 0.01), 1000)
    assert 0.0 <= accountant.epsilon(event, Relation.ADD_REMOVE, DELTA) < 1e-3


def test_sample_rate_one_is_no_sampling():
    event = repeated(PoissonGaussianEvent(100.0, 1.0), 10_000)
    exact = exact_gaussian_epsilon(1.0, DELTA)
    found = FINE.epsilon(event, Relation.ADD_REMOVE, DELTA)
    assert exact <= found <= exact * 1.0001


def test_very_many_steps():
    # Ten million steps, in blocks: between the same in one piece and a little more.
    event = PoissonGaussianEvent(3000.0, 0.5)
    bound = RDP.epsilon(repeated(event, 10_000_007), Relation.ADD_REMOVE, DELTA)
    found = FINE.epsilon(repeated(event, 10_000_007), Relation.ADD_REMOVE, DELTA)
    fewer = FINE.epsilon(repeated(event, 9_000_000), Relation.ADD_REMOVE, DELTA)
    assert fewer < found < bound


def test_blocks_cost_what_one_piece_costs(monkeypatch):
    from curvedp.accounting import accountants

    event = PoissonGaussianEvent(1.3, 0.011)
    whole = FINE.epsilon(repeated(event, 2345), Relation.ADD_REMOVE, DELTA)
    monkeypatch.setattr(accountants, "_MAX_POWER", 2000)
    accountants._pld_epsilon.cache_clear()
    blocks = FINE.epsilon(repeated(event, 2345), Relation.ADD_REMOVE, DELTA)
    assert blocks == pytest.approx(whole, rel=1e-6)


def test_a_coarser_grid_is_looser():
    fine, coarse = (a.epsilon(RUN, Relation.ADD_REMOVE, DELTA) for a in (FINE, COARSE))
    assert fine < coarse


@few
@given(sigma=sigmas, rate=rates, count=counts)
def test_order_of_relations_and_accountants(sigma, rate, count):
    run = repeated(PoissonGaussianEvent(sigma, rate), count)
    add_remove = COARSE.epsilon(run, Relation.ADD_REMOVE, DELTA)
    assert COARSE.epsilon(run, Relation.ZERO_OUT, DELTA) == add_remove
    assert COARSE.epsilon(run, Relation.REPLACE_ONE, DELTA) >= add_remove
    assert RDP.epsilon(run, Relation.ADD_REMOVE, DELTA) >= add_remove


@few
@given(sigma=sigmas, rate=rates, count=counts, factor=st.floats(1.1, 3.0))
def test_epsilon_grows_with_steps_and_rate_and_falls_with_noise(
    sigma, rate, count, factor
):
    def cost(s, q, n):
        event = repeated(PoissonGaussianEvent(s, q), n)
        return COARSE.epsilon(event, Relation.ADD_REMOVE, DELTA)

    base = cost(sigma, rate, count)
    assert cost(sigma, rate, math.ceil(count * factor)) > base
    assert cost(sigma, rate * factor, count) > base
    assert cost(sigma * factor, rate, count) < base


@few
@given(sigma=sigmas, rate=rates, count=counts, share=st.floats(0.1, 0.9))
def test_a_split_run_costs_what_the_whole_run_costs(sigma, rate, count, share):
    event = PoissonGaussianEvent(sigma, rate)
    first = max(1, int(count * share))
    parts = ComposedEvent(((repeated(event, first), 1), (event, count - first)))
    whole = COARSE.epsilon(repeated(event, count), Relation.ADD_REMOVE, DELTA)
    assert COARSE.epsilon(parts, Relation.ADD_REMOVE, DELTA) == whole
    # Nearly the same event is composed separately, by convolution.
    near = PoissonGaussianEvent(sigma * (1 + 1e-9), rate)
    mixed = ComposedEvent(((event, first), (near, count - first)))
    found = COARSE.epsilon(mixed, Relation.ADD_REMOVE, DELTA)
    assert found == pytest.approx(whole, rel=1e-5)


def test_rdp_refuses_replace_one_and_names_the_way_out():
    with pytest.raises(ConfigurationError, match="'pld'"):
        RDP.epsilon(RUN, Relation.REPLACE_ONE, DELTA)
    with pytest.raises(ConfigurationError, match="'pld'"):
        RDP.delta(RUN, Relation.REPLACE_ONE, 1.0)


@dataclass(frozen=True)
class StrangeEvent(Event):
    kind: ClassVar[str] = "strange-for-tests"

    def to_json(self):
        return {"kind": self.kind}

    @classmethod
    def from_json(cls, data):
        return cls()


@pytest.mark.parametrize("accountant", BOTH)
def test_unknown_events_are_refused_also_among_known_ones(accountant):
    event = ComposedEvent((*RUN.parts, (StrangeEvent(), 1)))
    with pytest.raises(UnknownEventError, match="StrangeEvent"):
        accountant.epsilon(event, Relation.ADD_REMOVE, DELTA)


@pytest.mark.parametrize("accountant", BOTH)
@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan, 2])
def test_impossible_delta_is_refused(accountant, delta):
    with pytest.raises(ConfigurationError, match="delta"):
        accountant.epsilon(RUN, Relation.ADD_REMOVE, delta)


@pytest.mark.parametrize("accountant", BOTH)
@pytest.mark.parametrize("epsilon", [-1.0, math.nan, math.inf])
def test_impossible_epsilon_is_refused(accountant, epsilon):
    with pytest.raises(ConfigurationError, match="epsilon"):
        accountant.delta(RUN, Relation.ADD_REMOVE, epsilon)


@pytest.mark.parametrize("width", [0.0, -1e-4, 2.0, math.nan])
def test_impossible_grid_is_refused(width):
    with pytest.raises(ConfigurationError, match="discretization"):
        PLDAccountant(width)


def test_accountants_by_name():
    assert get_accountant("pld") == FINE
    assert get_accountant("rdp") == RDP
    assert get_accountant(COARSE) is COARSE
    assert isinstance(FINE, Accountant) and isinstance(RDP, Accountant)
    with pytest.raises(ConfigurationError, match="pld, rdp"):
        get_accountant("gdp")


def test_upstream_log_level_is_put_back():
    import logging

    logger = logging.getLogger("absl")
    before = logger.level
    RDP.epsilon(RUN, Relation.ADD_REMOVE, DELTA)
    assert logger.level == before


def test_without_dp_accounting_import_works_and_epsilon_says_what_to_do():
    code = textwrap.dedent(
        """
        import sys
        sys.modules["dp_accounting"] = None  # makes its import fail
        from curvedp.accounting import *
        from curvedp.errors import ConfigurationError
        for name in ("pld", "rdp"):
            try:
                epsilon_of(1.0, sample_rate=0.01, steps=10, delta=1e-5,
                           relation="add-remove", accountant=name)
            except ConfigurationError as error:
                print(name, error)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.count("pip install dp-accounting") == 2
    assert done.stdout.count("sigma given instead") == 2


def test_importing_does_not_load_dp_accounting():
    code = "import sys, curvedp.accounting; print('dp_accounting' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
