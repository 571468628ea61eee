"""Rows of a hand-written loop (rule 15): checks, and a fault for each guard."""

from __future__ import annotations

from functools import partial

from curvedp.errors import ConfigurationError, LoopError
from curvedp.layers import Batch
from curvedp.sampling import PhysicalLoader
from curvedp.train import Private
from curvedp.train.engine import Engine
from curvedp.train.losses import LOSSES
from curvedp.train.rows import GivenRows, _Given

from .cases import attach, examples
from .checking import refused
from .mutate import Fault, Patch

_ELSE = "was not given what private.loader gave"


def _train(private, change, by_hand):
    for batch in private.loader:
        x, y = change(*batch)
        if by_hand:
            private.loss(private.model(x), y).backward()
            private.optimizer.step()
        else:
            private.train_on((x, y))


def _refused(change, by_hand=True, private=None):
    private = private or attach(examples(), steps=1)
    refused(LoopError, _ELSE, partial(_train, private, change, by_hand))
    assert private._engine.ledger.count() == 0, "it was paid for"


def _sorted_by_length(x, y):
    order = x.norm(dim=1).argsort()
    return x[order], y[order]


def _centred_in_place(x, y):
    x.data -= x.mean(0)
    return x, y


def sorted_rows_are_refused():
    _refused(_sorted_by_length)


def rows_written_in_place_are_refused():
    _refused(_centred_in_place)


def labels_of_other_rows_are_refused():
    _refused(lambda x, y: (x, y.flip(0)))


def centred_outputs_are_refused():
    private = attach(examples(), steps=1)

    def centred():
        for x, y in private.loader:
            output = private.model(x)
            private.loss(output - output.mean(0), y).backward()
            private.optimizer.step()

    refused(LoopError, "what private.model gave", centred)


def a_number_of_the_batch_is_refused():
    private = attach(examples(), steps=1)

    def scaled():
        for x, y in private.loader:
            private.loss(private.model(x, float(x.mean())), y).backward()

    refused(LoopError, _ELSE, scaled)


def sorted_rows_are_refused_in_a_program():
    private = attach(examples(), steps=1)

    def synthetic(size, generator):
        return Batch(*examples(size).tensors)

    loss = LOSSES["cross-entropy"]
    private._passed = private._engine.compiled(loss, synthetic, "eager")
    _refused(_sorted_by_length, by_hand=False, private=private)


def a_prepare_that_mixes_rows_is_refused():
    mixing = lambda batch: _sorted_by_length(*batch)  # noqa: E731
    refused(
        ConfigurationError, "mixes rows", lambda: attach(examples(), prepare=mixing)
    )


FAULTS = [
    Fault(
        "15 loop: rows in another order",
        sorted_rows_are_refused,
        (Patch(GivenRows._compare, "self._find(argument)", "..."),),
    ),
    Fault(
        "15 loop: rows written in place",
        rows_written_in_place_are_refused,
        (Patch(_Given.differs, "differ(now, self.kept)", "False"),),
    ),
    Fault(
        "15 loop: labels of other rows",
        labels_of_other_rows_are_refused,
        (
            Patch(
                Private.loss,
                'self._engine.require_rows("private.loss", {"targets": targets})',
                "...",
            ),
        ),
    ),
    Fault(
        "15 loop: centred outputs",
        centred_outputs_are_refused,
        (Patch(Private.loss, "self._engine.require_made(output)", "..."),),
    ),
    Fault(
        "15 loop: a number of the batch",
        a_number_of_the_batch_is_refused,
        (Patch(GivenRows.require, "not self._has(leaf)", "False"),),
    ),
    Fault(
        "15 loop: rows in another order, in a program",
        sorted_rows_are_refused_in_a_program,
        (
            Patch(
                Engine._unpassed, 'self.require_rows("private.train_on", values)', "..."
            ),
        ),
    ),
    Fault(
        "15 loop: a prepare= that mixes rows",
        a_prepare_that_mixes_rows_is_refused,
        (Patch(PhysicalLoader.__init__, "if prepare is not None:", "if False:"),),
    ),
]
