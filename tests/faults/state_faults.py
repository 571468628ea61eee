"""Rules 14 and the last part of 16: a fault for each of their guards."""

from __future__ import annotations

from curvedp.layers import anew
from curvedp.layers.held import Scan
from curvedp.layers.state import State
from curvedp.train.built import Built

from . import state_checks as checks
from .mutate import Fault, Patch

FAULTS = [
    Fault(
        "14 buffer written through .data",
        checks.buffer_written_through_data_is_refused,
        (Patch(State.spots, "self._others.changed()", "[]"),),
    ),
    Fault(
        "14 frozen weight written in a pass",
        checks.frozen_weight_written_in_a_pass_is_refused,
        (Patch(State.spots, "self._weights.changed(printed=printed)", "[]"),),
    ),
    Fault(
        "14 weight written in a pass, on a GPU",
        checks.weight_written_in_a_pass_on_a_gpu_is_refused,
        (Patch(State.settle, "if written:", "if False:"),),
    ),
    Fault(
        "14 attribute written in a pass",
        checks.attribute_written_in_a_pass_is_refused,
        (Patch(State._containers, "[] if self._found.same() else", "[] and"),),
    ),
    Fault(
        "14 dictionary written in a pass",
        checks.entry_written_in_a_pass_is_refused,
        (Patch(Scan.same, "not any(self._hollow) and", ""),),
    ),
    Fault(
        "14 what only looks like a cache",
        checks.attribute_written_in_a_pass_is_refused,
        (Patch(State._explained, "self.bits(spot) == bits[spot]", "True"),),
    ),
    Fault(
        "14 written anew and not emptied",
        checks.what_every_pass_writes_anew_is_gone_after_it,
        (Patch(State.close, "if spots:", "if False:"),),
    ),
    Fault(
        "14 attribute that goes on from what it saw",
        checks.running_mean_is_refused_when_attached,
        (Patch(anew.written_anew, "if kept_on or", "if False and"),),
    ),
    Fault(
        "16 hook after attaching",
        checks.hook_after_attaching_is_refused,
        (Patch(Built._compare, "if _same(", "if True or _same("),),
    ),
    Fault(
        "16 forward replaced after attaching",
        checks.forward_replaced_after_attaching_is_refused,
        (Patch(Built._compare, "if _same(", "if True or _same("),),
    ),
    Fault(
        "16 module exchanged after attaching",
        checks.module_exchanged_after_attaching_is_refused,
        (
            Patch(Built._look_closely, "then is not module", "False"),
            Patch(Built._compare, "kind is not kind_now", "False"),
        ),
    ),
]
