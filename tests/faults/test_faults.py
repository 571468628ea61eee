"""Every rule of the design, and every failure seen elsewhere, is checked twice.

As it is, and with its guard removed: a check that passes without its guard checks
nothing.
"""

from __future__ import annotations

import pytest

from . import (
    correlated_faults,
    coupling_faults,
    curvature_faults,
    federated_faults,
    payment_faults,
    peer_faults,
    peer_runs,
    record_faults,
    row_faults,
    rule_faults,
    state_faults,
    stranger_faults,
)
from .mutate import planted
from .peers import PEERS

FAULTS = rule_faults.FAULTS + curvature_faults.FAULTS + peer_faults.FAULTS
FAULTS += correlated_faults.FAULTS + federated_faults.FAULTS + coupling_faults.FAULTS
FAULTS += payment_faults.FAULTS + stranger_faults.FAULTS + state_faults.FAULTS
FAULTS += record_faults.FAULTS + row_faults.FAULTS + peer_runs.FAULTS


@pytest.mark.parametrize("check", dict.fromkeys(f.check for f in FAULTS))
def test_rule_holds(check):
    check()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.rule)
def test_check_fails_when_the_guard_is_removed(fault):
    with planted(*fault.patches), pytest.raises(AssertionError):
        fault.check()
    fault.check()  # and the patch is gone again


def test_faults_have_names_of_their_own():
    names = [fault.rule for fault in FAULTS]
    assert len(set(names)) == len(names)


def test_every_rule_of_the_design_has_a_fault():
    first_words = [fault.rule.split()[0] for fault in FAULTS]
    assert {int(w) for w in first_words if w.isdigit()} >= {*range(1, 21)}


@pytest.mark.parametrize("clause", PEERS, ids=lambda c: c.failure)
def test_every_failure_seen_elsewhere_has_a_check_that_can_fail(clause):
    can_fail = {fault.check for fault in FAULTS}
    assert clause.checks, "nothing guards against it"
    for check in clause.checks:
        assert check in can_fail, f"{check.__name__} has no fault"


def test_every_check_of_a_peers_failure_is_in_the_table():
    listed = {check for clause in PEERS for check in clause.checks}
    faults = peer_faults.FAULTS + peer_runs.FAULTS
    assert {fault.check for fault in faults} <= listed
