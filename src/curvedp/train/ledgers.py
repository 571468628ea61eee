"""The ledger of a run: made, reopened and checked against the plan, or in memory."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from curvedp._version import __version__
from curvedp.accounting import Ledger, LedgerHeader, MemoryLedger
from curvedp.errors import ConfigurationError, LedgerError
from curvedp.plan import Plan
from curvedp.storage import as_storage_error, make_folder
from curvedp.train.journal import Journal

__all__ = ["check_head", "check_paid", "note_lost_releases", "open_ledger"]


def open_ledger(
    run_dir: Path | None, plan: Plan, *, recipe: str, optimiser: str, unsafe: bool
) -> Ledger | MemoryLedger:
    """The run folder's ledger, made or reopened, or one in memory."""
    notes = []
    if unsafe:
        notes.append(
            "unsafe_reproducible_noise: whoever knows the seed can recompute noise and "
            "sampling; there is no guarantee"
        )
    header = LedgerHeader(
        run_id=uuid.uuid4().hex,
        relation=plan.relation,
        delta=plan.delta,
        target_epsilon=plan.target_epsilon,
        planned_steps=plan.sampling.steps,
        accountant=plan.accountant,
        unit=plan.unit,
        notes=tuple(notes),
        facts={
            "curvedp": __version__,
            "recipe": recipe,
            "optimiser": optimiser,
            **_shown(plan),
        },
    )
    if run_dir is None:
        return MemoryLedger(header)
    path = run_dir / "ledger.jsonl"
    if not path.exists():
        if (run_dir / "checkpoints").exists():
            raise LedgerError(
                f"{run_dir} has checkpoints and no ledger.jsonl: nobody can tell what "
                "the run has spent",
                "put the ledger back; a new run needs a folder of its own",
            )
        with as_storage_error(run_dir, "make the folder"):
            make_folder(run_dir)
        return Ledger.create(path, header)
    ledger = Ledger.open(path)
    stored, given = dict(ledger.header.facts), dict(header.facts)
    for name, value in given.items():
        if name != "curvedp" and stored.get(name) != value:
            ledger.close()
            raise ConfigurationError(
                f"{path} belongs to a run with {name} = {stored.get(name)!r}, and this "
                f"one has {value!r}",
                "give this run a folder of its own, or resume with the old settings",
            )
    if unsafe and not any("unsafe_reproducible_noise" in n for n in ledger.notes()):
        ledger.note(notes[0])
    return ledger


def check_head(
    ledger: Ledger | MemoryLedger, head: tuple[int, str] | None, checkpoint: Path
) -> None:
    """Refuse a ledger that lacks lines which it had when the checkpoint was made."""
    if head is not None and not ledger.has_head(*head):
        raise LedgerError(
            f"{ledger.path} does not have the line {head[0] + 1} that it had when "
            f"{checkpoint} was made: it was cut short, exchanged or rewritten",
            "restore the ledger from a copy; without those lines nobody can tell what "
            "the run has spent",
        )


def check_paid(ledger: Ledger | MemoryLedger, journal: Journal, first: int) -> None:
    """Refuse a ledger that lacks the payment of a release in the journal."""
    for step in journal.steps(first):
        if not ledger.next_attempt(step):
            raise LedgerError(
                f"{ledger.path} has no payment for step {step}, whose release is in "
                "the journal: it was cut short or exchanged",
                "restore the ledger from a copy; without its lines nobody can tell "
                "what the run has spent",
            )


def note_lost_releases(
    ledger: Ledger | MemoryLedger, journal: Journal, step: int
) -> None:
    """What the journal still has from ``step`` on cannot be used: make it again."""
    lost = journal.steps(step)
    if lost:
        ledger.note(
            f"the journal's release of step {step} was missing or unreadable after a "
            f"crash; steps from {step} to {lost[-1]} are made and paid for again"
        )
        journal.drop_from(step)


def _shown(plan: Plan) -> dict[str, Any]:
    """Facts of the plan that the header does not have in fields of its own."""
    own = {"unit", "relation", "delta", "target_epsilon", "planned_steps", "accountant"}
    return {k: v for k, v in plan.facts().items() if k not in own}
