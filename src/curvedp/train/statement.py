"""The privacy statement: what is promised, about what, and what is not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from curvedp._version import __version__
from curvedp.accounting import LedgerRecord
from curvedp.barrier import Relation
from curvedp.plan import Plan
from curvedp.sampling import Views
from curvedp.values import printable

__all__ = ["Statement", "make_statement"]

_RELATIONS = {
    Relation.ADD_REMOVE: "add-remove: one example more or less; the number of examples "
    "is protected too",
    Relation.ZERO_OUT: "zero-out: one example's record replaced by nothing; the number "
    "of examples is public",
    Relation.REPLACE_ONE: "replace-one: one example replaced by any other; the number "
    "of examples is public",
}

_NOT_COVERED = (
    "settings chosen by looking at results on the same private data",
    "anything computed from private data outside of training (validation, statistics "
    "for normalisation, a vocabulary)",
    "other runs on the same data: their budgets add up",
    "whether the run fails or is refused, which a record may decide",
    "the rounding of the sum over a batch, where its bound is measured and not proven "
    '(docs/theory.md, "What the bound rests on")',
    "side channels: timing, memory, and the rounding of floating-point noise",
)
_NOT_COVERED_SECURE = (
    *_NOT_COVERED[:-1],
    "side channels: timing and memory",
)


_SECRET = (
    "whoever reads secret.json in the run's folder while the run goes on: with it, "
    "releases are the private sums"
)


@dataclass(frozen=True)
class Statement:
    """A printable guarantee; ``str()`` for people, ``facts`` for programs."""

    facts: dict[str, Any]
    lines: tuple[tuple[str, str], ...]
    caveats: tuple[str, ...]
    title: str

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.lines)
        # notes may come from a stranger's ledger, and have no lines of their own
        rows = [f"  {n:<{width}}  {printable(t, '')}" for n, t in self.lines]
        caveats = [f"  - {text}" for text in self.caveats]
        return "\n".join([self.title, *rows, "Not covered:", *caveats])


def make_statement(
    plan: Plan,
    ledger: LedgerRecord,
    *,
    unsafe: bool,
    trusted_loss: bool,
    oracle: bool = False,
    public_probe: bool = False,
    views: Views | None = None,
    pretrained: bool = False,
    tried: str = "nothing",
    unchecked: Sequence[str] = (),
) -> Statement:
    """The statement of a run as it stands.

    The epsilon that holds *whenever* the run is stopped is the planned one: a decision
    to stop that looks at what was released is not covered by the epsilon of the steps
    made so far. The latter is given as well, and says what it assumes.
    """
    sampling = plan.sampling
    oracle = oracle or ledger.is_oracle
    # steps before a resume count too, whatever the noise of the later ones
    unsafe = unsafe or ledger.is_unsafe
    planned = None if oracle else _if_accountable(plan.epsilon)
    spent = 0.0 if oracle or not ledger.count() else _if_accountable(ledger.epsilon)
    size = (
        f"; the number of examples, {sampling.public_size}, is public"
        if sampling.public_size is not None
        else ""
    )
    lines = [
        ("guarantee", f"({_text(planned)}, {plan.delta:g})-differential privacy"),
        (
            "spent so far",
            f"epsilon {_text(spent)} for {ledger.count()} of {sampling.steps} planned "
            "steps (if that number was fixed beforehand)",
        ),
        ("unit", _unit(plan, views)),
        ("relation", _RELATIONS[plan.relation]),
        (
            "sampling",
            f"{_sampling(plan)}, divisor {sampling.expected_batch_size:g}{size}",
        ),
        ("mechanism", f"{_mechanism(plan)}; {plan.clipping.describe()}"),
        ("noise source", _noise_source(plan, unsafe)),
        ("accountant", plan.accountant.upper()),
        ("tried at attach", f"{tried}; a schedule that is made later is not tried"),
    ]
    title = f"Privacy statement (curvedp {__version__})"
    caveats = [*(_NOT_COVERED_SECURE if plan.secure else _NOT_COVERED), *unchecked]
    if trusted_loss:
        caveats.insert(
            0,
            "the loss of the training loop, which was not given to make_private: it is "
            "trusted not to mix examples, and its labels were not compared with those "
            "that the loader gave",
        )
    spectrum = None if plan.correlation is None else plan.correlation.spectrum
    if spectrum is not None:
        lines.append(("noise design", _spectrum(spectrum)))
    if public_probe or (spectrum and spectrum["provenance"] == "public"):
        caveats.insert(
            0, "whoever is in the data that was declared public, to probe curvature"
        )
    if plan.correlation is not None:
        caveats.insert(0, _SECRET)
    if pretrained:
        lines.append(("start", "parameters trained on data that was declared public"))
        caveats.insert(
            0, "whoever is in the data that was declared public, to pretrain on"
        )
    if planned is None:
        lines[0] = (
            "guarantee",
            "not computed: dp-accounting is not installed here; on another machine "
            "`curvedp privacy spent` computes it from the ledger",
        )
    elif math.isinf(planned):
        title = "NO PRIVACY GUARANTEE: with this little noise no epsilon holds"
        lines[0] = ("guarantee", f"none (epsilon is infinite at delta {plan.delta:g})")
    if unsafe:
        title = "NO PRIVACY GUARANTEE: the noise was made reproducible"
        lines[0] = (
            "guarantee",
            f"none (it would be epsilon {_text(planned)} with secret noise)",
        )
    if oracle:
        spent = None
        title = "NO PRIVACY GUARANTEE: curvature was taken from the private data"
        lines[0] = ("guarantee", "none: the oracle is for research")
        lines[1] = ("steps", f"{ledger.count()} of {sampling.steps}")
        caveats = ["anything: an oracle is for research on unprotected data"]
    for note in ledger.notes():
        lines.append(("note", note))
    facts = {
        **plan.facts(),
        "noise_source": _noise_source(plan, unsafe),
        "private": not (unsafe or oracle)
        and (planned is None or math.isfinite(planned)),
        "epsilon": _number(planned),
        "epsilon_spent": _number(spent),
        "steps_paid": ledger.count(),
        **({"target_epsilon": None} if oracle else {}),
        "notes": list(ledger.notes()),
        "not_covered": caveats,
        "curvedp": __version__,
    }
    return Statement(facts, tuple(lines), tuple(caveats), title)


def _sampling(plan: Plan) -> str:
    correlation = plan.correlation
    if correlation is None:
        return f"Poisson, declared rate {plan.sampling.sample_rate:.6g}"
    drawn = "of equal size" if plan.sampling.public_size else "that each example draws"
    return (
        f"cyclic Poisson: {correlation.bands} secret groups {drawn}, in turns; Poisson "
        f"within a group, declared rate {plan.event_rate:.6g}; no example is in more "
        f"than {plan.rounds} draws"
    )


def _mechanism(plan: Plan) -> str:
    noise = f"Gaussian noise {plan.noise_multiplier:g} x the bound"
    correlation = plan.correlation
    if correlation is None:
        return noise
    return (
        f"{noise}, correlated over steps by a {correlation.design.kind} strategy of "
        f"{correlation.bands} bands with columns of norm 1"
    )


def _spectrum(found: dict[str, Any]) -> str:
    tail = found["tail"]
    beyond = "" if tail is None else f" of {tail['count']}, the others fitted"
    return (
        f"for {found['eigenvalues']} eigenvalues{beyond} (largest "
        f"{found['largest']:.3g}) of the loss's curvature, from {found['examples']} "
        f"{found['provenance']} examples before the first step"
    )


def _noise_source(plan: Plan, unsafe: bool) -> str:
    if plan.secure:
        return plan.noise_source
    seed = "reproducible from a number (unsafe)" if unsafe else "256-bit OS entropy"
    return f"{plan.noise_source}, {seed}"


def _unit(plan: Plan, views: Views | None) -> str:
    if views is not None:
        return f"one example, with all its views ({views.count} in a step)"
    if plan.examples_per_person is None:
        return "one example"
    return (
        f"one person, with all examples (at most {plan.examples_per_person} of them in "
        "a step); examples below stands for persons"
    )


def _if_accountable(epsilon: Callable[[], float]) -> float | None:
    """Epsilon, or None on a machine that can train but not account."""
    return epsilon() if find_spec("dp_accounting") is not None else None


def _text(epsilon: float | None) -> str:
    return "(not computed)" if epsilon is None else f"{epsilon:.4g}"


def _number(epsilon: float | None) -> float | str | None:
    """For JSON, which has no infinity."""
    return "inf" if epsilon is not None and math.isinf(epsilon) else epsilon
