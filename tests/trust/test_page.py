"""The short form of the page, and that it says so when something is wrong."""

import copy

import pytest

from .attacks import ATTACKS
from .mutants import ROOT
from .page import SHORT, measured, page, verdict


@pytest.fixture(scope="module")
def result():
    return measured(SHORT)


def test_the_short_form_is_as_promised(result):
    assert verdict(result) == []
    assert result["neighbours"]["neighbours"] > 100
    assert result["planted_bugs"]["killed"] == result["planted_bugs"]["planted"] >= 6


def test_the_page_has_every_figure(result):
    result = result | {
        "mutants": {"killed": 9, "mutants": 10, "too_slow": 0, "of": 1000},
        "crash": {"passed": 5, "failed": 0},
        "hostile": {"passed": 0, "failed": 0},
    }
    text = page(result)
    for words in (
        "neighbours replayed", "measured / declared", "planted bugs killed",
        "9 of 10 (0 too slow to tell), drawn from 1000", "faults survived | 5 of 5",
        "hostile inputs refused | not measured", "variance of the secure noise",
        "| dp-sgd |", "Poisson draws",
    ):  # fmt: skip
        assert words in text, words


def test_the_verdict_names_what_is_wrong(result):
    wrong = copy.deepcopy(result)
    wrong["fuzz"]["worst"] = 1.00001
    wrong["planted_bugs"]["alive"] = ["12 bound"]
    wrong["noise"][0]["fits"] = False
    wrong["audits"][0]["epsilon_lower"] = 99.0
    wrong["crash"] = {"passed": 1, "failed": 1}
    assert len(verdict(wrong)) == 5


def test_every_kind_of_attack_is_there():
    for kind, place in ATTACKS.items():
        assert (ROOT / "tests" / place).exists(), kind
    assert len(set(ATTACKS.values())) == len(ATTACKS)
