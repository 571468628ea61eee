"""An accuracy on private validation examples, as a release that is paid for.

The validation examples of a run are not among those it is trained on. The number of
right answers among them moves by at most 1 with one example, so with Gaussian noise of
standard deviation s it is a Gaussian mechanism with multiplier s:

    accuracy = (right answers + N(0, s^2)) / declared number of validation examples

Whoever is in the training part pays for training, whoever is in the validation part
pays for this; nobody is in both, so the run promises each of them the larger of the two
costs and not their sum. The payment is in a ledger of its own beside the run's.
"""

from __future__ import annotations

import uuid
from pathlib import Path

import torch

from curvedp.accounting import GaussianEvent, Ledger, LedgerHeader
from curvedp.accounting.records import UNSAFE_NOTE
from curvedp.errors import ConfigurationError
from curvedp.experiments.building import BuiltRun
from curvedp.plan import Plan
from curvedp.train.metrics import METRICS, predict

__all__ = ["PAID_NOTE", "SCORE_LEDGER", "paid_accuracy"]

#: The ledger of the validation part.
SCORE_LEDGER = "score-ledger.jsonl"

PAID_NOTE = (
    "the accuracy was computed on a validation part of the private data, with noise; "
    f"what that costs the people in it is in {SCORE_LEDGER} (they are not among those "
    "trained on)"
)


def paid_accuracy(built: BuiltRun, folder: Path) -> dict[str, float]:
    """The noisy accuracy; its payment is on disk before the noise is drawn.

    A process that was killed in between has stored no accuracy and shown none, so that
    the next one draws for the same payment; whoever has an accuracy does not get here
    again, because the result is on disk then.
    """
    noise = built.config.validation_noise
    if noise is None or built.held_out is None:
        raise ConfigurationError("there is no noisy accuracy to compute")
    plan = built.config.privacy_settings().plan(
        built.config.configured_recipe(), len(built.train)
    )
    with _open(folder / SCORE_LEDGER, built, plan) as ledger:
        if not ledger.count():
            ledger.pay(0, 0, GaussianEvent(float(noise)))
    outputs, targets = predict(built.model, built.held_out)
    right = METRICS["accuracy"](outputs, targets) * len(targets)
    streams = plan.streams(
        unsafe_reproducible_noise=built.config.unsafe_reproducible_noise
    )
    noisy, _ = streams.add_gaussian(
        {"right": torch.tensor([right], dtype=torch.float64)},
        float(noise),
        1.0,
        plan.sampling.steps,  # an address that no step of training has
        0,
    )
    return {"accuracy": float(noisy["right"][0]) / declared_size(built, plan)}


def declared_size(built: BuiltRun, plan: Plan) -> float:
    """The number that the right answers are divided by.

    The true one where sizes are public, otherwise what the declared sampling implies:
    under add-remove the number of examples is a secret.
    """
    share = built.config.validation
    assert built.held_out is not None and share is not None
    if plan.relation.size_is_public:
        return float(len(built.held_out))
    trained_on = plan.sampling.expected_batch_size / plan.sampling.sample_rate
    return trained_on * share / (1 - share)


def _open(path: Path, built: BuiltRun, plan: Plan) -> Ledger:
    if path.exists():
        return Ledger.open(path)
    unsafe = built.config.unsafe_reproducible_noise is not None
    header = LedgerHeader(
        run_id=uuid.uuid4().hex,
        relation=plan.relation,
        delta=plan.delta,
        planned_steps=1,
        accountant=plan.accountant,
        unit=plan.unit,
        notes=(UNSAFE_NOTE,) if unsafe else (),
        facts={"part": "validation", "share": built.config.validation},
    )
    return Ledger.create(path, header)
