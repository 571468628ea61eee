"""One example moves a sum by no more than is declared, and nothing public at all."""

import pytest
import torch

from curvedp.clipping import bounded
from curvedp.sampling import PhysicalLoader
from curvedp.testing import NeighbourError
from curvedp.train.whitened import CurvatureSource

from ..faults.mutate import Patch, planted
from .replaying import (
    LIMIT,
    PRIVATE,
    Case,
    attach,
    cases,
    replayed,
    through_the_trainer,
)


def few():
    """Every seventh case, and the first with anything that these leave out."""
    found = list(cases())[::7]
    seen = set().union(*map(kinds, found))
    for case in cases():
        if not kinds(case) <= seen:
            found.append(case)
            seen |= kinds(case)
    return found


def kinds(case):
    return {case.recipe, case.net, case.tier, case.passed, *case.options}


#: Of all combinations, every recipe, net, tier and variation at least once.
SHORT = few()


def test_the_short_form_has_everything():
    assert {case.recipe for case in SHORT} == set(PRIVATE)
    assert {case.net for case in SHORT} == {case.net for case in cases()}
    assert {case.tier for case in SHORT} == {"loop", "train_on"}
    assert {case.passed for case in SHORT} == {"", "traced", "graphed", "remade"}
    chosen = {name for case in SHORT for name in case.options}
    assert chosen == {name for case in cases() for name in case.options}


def test_every_case_of_the_long_form_can_be_attached():
    """Variations go round over recipes: one more of them, and other pairs meet."""
    for case in cases():
        assert attach(case)


@pytest.mark.parametrize("case", SHORT, ids=str)
def test_a_neighbour_is_no_further_than_declared(case):
    figures = replayed(case, steps=1, limit=9)
    assert figures.neighbours == 9
    assert 0 < figures.worst <= LIMIT


def test_later_steps_too():
    figures = replayed(Case("dp-kfc", options={"clipping": "adaptive"}), steps=3)
    assert figures.neighbours > 100
    assert 0.9 < figures.worst <= LIMIT


@pytest.mark.parametrize("recipe", ["dp-sgd", "dp-kfc"])
def test_through_the_trainer(recipe):
    assert 0 < through_the_trainer(recipe, limit=2).worst <= LIMIT


def test_norms_that_are_too_small_are_found():
    halved = Patch(bounded.clipped_sum, ".weights(lengths)", ".weights(lengths / 4)")
    with planted(halved):
        assert replayed(Case("dp-sgd"), steps=1, limit=6).worst > 1.9


def test_a_whitener_that_looks_at_the_batch_is_found(monkeypatch):
    own, calls = CurvatureSource.at, []

    def of_the_batch(self, step):
        calls.append(step)
        found = own(self, step)
        vars(found)["frame"] = str(len(calls))
        return found

    monkeypatch.setattr(CurvatureSource, "at", of_the_batch)
    with pytest.raises(NeighbourError, match="differ"):
        replayed(Case("dp-kfc"), steps=1, limit=3)


def test_reading_somebody_who_was_not_drawn_is_found(monkeypatch):
    own = PhysicalLoader._rows

    def and_the_first(self, units, step):
        self._dataset[0]
        return own(self, units, step)

    monkeypatch.setattr(PhysicalLoader, "_rows", and_the_first)
    with pytest.raises(NeighbourError, match="others were read"):
        replayed(Case("dp-sgd"), steps=1, limit=3)


def test_an_example_that_is_not_finite_is_as_if_absent():
    from . import nets
    from .replaying import attach

    replay = attach(Case("dp-sgd"))
    drawn = list(range(nets.DRAWN))
    plain, spoilt = replay.sum_of(drawn), replay.sum_of([*drawn, nets.DRAWN])
    for name, value in plain.values.items():
        torch.testing.assert_close(spoilt.values[name], value, rtol=1e-6, atol=1e-8)
