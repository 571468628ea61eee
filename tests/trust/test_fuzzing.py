"""A short search for an example that reaches further than is declared."""

import math

from curvedp.clipping import rules
from curvedp.layers import rounding

from .fuzzing import fuzz_runs, fuzz_sums
from .replaying import LIMIT


def test_no_made_up_layer_moves_a_sum_further_than_declared():
    figures, where = fuzz_sums(150)
    assert figures.neighbours > 300
    assert 0.9 < figures.worst <= LIMIT, where


def test_no_made_up_run_moves_a_sum_further_than_declared():
    figures, where = fuzz_runs(8)
    assert figures.neighbours > 50
    assert 0.1 < figures.worst <= LIMIT, where


def test_the_search_finds_sums_that_round_too_much(monkeypatch):
    monkeypatch.setattr(rounding, "REACH", dict.fromkeys(rounding.REACH, math.inf))
    # about every second search of this length comes upon one
    assert any(fuzz_sums(200, number)[0].worst > 1.0001 for number in range(30))


def test_the_search_finds_a_bound_that_is_a_little_too_large(monkeypatch):
    monkeypatch.setattr(rules, "SHRINK", 1.001)
    assert fuzz_sums(60)[0].worst > LIMIT
