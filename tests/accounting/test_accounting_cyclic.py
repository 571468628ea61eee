"""Groups that take turns: what a run with correlated noise costs."""

import json

import pytest

from curvedp.accounting import (
    ComposedEvent,
    CyclicGaussianEvent,
    GaussianEvent,
    PLDAccountant,
    PoissonGaussianEvent,
    RDPAccountant,
    RepeatAndSelectEvent,
    calibrate_sigma,
    epsilon_of,
    event_from_json,
    repeated,
    sequential,
    tally,
)
from curvedp.barrier import Relation
from curvedp.errors import ConfigurationError

#: N = 45000, B = 450, T = 2000, delta 1e-5, published check values.
CHECKED = {1: {1: 1.8428, 2: 1.1493, 5: 0.7556, 8: 0.6433},
           10: {1: 5.43, 2: 3.01, 5: 1.5108, 8: 1.13}}  # fmt: skip


def turns(steps, groups, sigma=1.0, rate=0.1, assignment=""):
    return [
        CyclicGaussianEvent(sigma, rate, groups, step % groups, assignment)
        for step in range(steps)
    ]


@pytest.mark.parametrize("bands", CHECKED)
@pytest.mark.parametrize("epsilon", [1, 2, 5, 8])
def test_the_noise_of_published_runs(bands, epsilon):
    sigma = calibrate_sigma(
        epsilon,
        1e-5,
        sample_rate=450 / (45000 // bands),
        steps=-(-2000 // bands),
        relation="add-remove",
        accountant=PLDAccountant(1e-3),
    )
    assert sigma == pytest.approx(CHECKED[bands][epsilon], rel=0.005)


class TestTurns:
    def test_a_run_costs_its_rounds(self):
        for steps, rounds in ((20, 2), (21, 3), (29, 3), (30, 3), (31, 4)):
            event = tally(turns(steps, 10))
            assert sequential(event).parts == (
                (PoissonGaussianEvent(1.0, 0.1), rounds),
            )

    def test_all_accountants_say_so(self):
        event = tally(turns(25, 10))
        plain = repeated(PoissonGaussianEvent(1.0, 0.1), 3)
        for accountant in (PLDAccountant(1e-3), RDPAccountant()):
            for relation in (Relation.ADD_REMOVE, Relation.ZERO_OUT):
                assert accountant.epsilon(event, relation, 1e-5) == (
                    accountant.epsilon(plain, relation, 1e-5)
                )
                assert accountant.delta(event, relation, 1.0) == (
                    accountant.delta(plain, relation, 1.0)
                )

    def test_a_step_made_again_counts_for_its_group(self):
        again = [*turns(20, 10), CyclicGaussianEvent(1.0, 0.1, 10, 3)]
        assert sequential(tally(again)).parts[0][1] == 3

    def test_groups_drawn_anew_add_up(self):
        twice = [*turns(15, 10), *turns(15, 10, assignment="other")]
        assert sequential(tally(twice)).parts[0][1] == 4

    def test_other_noise_adds_up(self):
        other = [*turns(10, 10), *turns(10, 10, sigma=2.0), GaussianEvent(3.0)]
        assert dict(sequential(tally(other)).parts) == {
            GaussianEvent(3.0): 1,
            PoissonGaussianEvent(1.0, 0.1): 1,
            PoissonGaussianEvent(2.0, 0.1): 1,
        }

    def test_it_adds_to_plain_events_of_the_same_kind(self):
        mixed = [*turns(10, 10), PoissonGaussianEvent(1.0, 0.1)]
        assert sequential(tally(mixed)).parts == ((PoissonGaussianEvent(1.0, 0.1), 2),)

    def test_the_best_of_several_trials(self):
        trial = tally(turns(25, 10))
        plain = repeated(PoissonGaussianEvent(1.0, 0.1), 3)
        found, expected = (
            RDPAccountant().epsilon(
                RepeatAndSelectEvent(e, 5.0, 1.0), Relation.ADD_REMOVE, 1e-5
            )
            for e in (trial, plain)
        )
        assert found == expected

    def test_nothing_at_all(self):
        assert sequential(ComposedEvent(())).parts == ()

    def test_epsilon_grows_by_rounds(self):
        at = dict(sample_rate=0.1, delta=1e-5, relation="add-remove")
        costs = [
            PLDAccountant().epsilon(tally(turns(n, 4)), Relation.ADD_REMOVE, 1e-5)
            for n in (4, 5, 8, 9)
        ]
        assert costs[0] == epsilon_of(1.0, steps=1, **at)
        assert costs[1] == costs[2] == epsilon_of(1.0, steps=2, **at)
        assert costs[3] == epsilon_of(1.0, steps=3, **at)


class TestStored:
    def test_through_json(self):
        event = CyclicGaussianEvent(1.5, 0.25, 8, 7, "a1")
        assert event_from_json(json.loads(json.dumps(event.to_json()))) == event

    @pytest.mark.parametrize("change", [{"group": 8}, {"groups": 0}, {"group": -1},
                                        {"assignment": None}, {"groups": "8"},
                                        {"sample_rate": 0}])  # fmt: skip
    def test_nonsense_is_refused(self, change):
        stored = CyclicGaussianEvent(1.5, 0.25, 8, 7, "a1").to_json() | change
        with pytest.raises(ConfigurationError):
            event_from_json(stored)
