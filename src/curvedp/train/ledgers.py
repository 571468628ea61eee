"""The ledger of a run: made, reopened and checked against the plan, or in memory."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from curvedp._version import __version__
from curvedp.accounting import Ledger, LedgerHeader, LedgerRecord, MemoryLedger
from curvedp.accounting.records import INDEPENDENT_NOTE, ORACLE_NOTE, UNSAFE_NOTE
from curvedp.errors import CheckpointError, ConfigurationError, LedgerError
from curvedp.plan import DEFAULT_NOISE_SOURCE, Plan
from curvedp.storage import as_storage_error, clear_leftovers, make_folder
from curvedp.train.journal import Journal
from curvedp.train.witnesses import check_ledger, witnesses

__all__ = [
    "note_lost_releases",
    "open_ledger",
    "open_with",
    "refuse_lost_payments",
    "refuse_other_facts",
]

#: Facts that older versions did not write, because there was nothing but this.
WHEN_UNSAID: dict[str, Any] = {"noise_source": DEFAULT_NOISE_SOURCE, "transforms": {}}


def open_ledger(
    run_dir: Path | None,
    plan: Plan,
    *,
    recipe: str,
    optimiser: str,
    unsafe: bool,
    independent: bool = False,
    oracle: bool = False,
    remarks: Sequence[str] = (),
) -> Ledger | MemoryLedger:
    """The run folder's ledger, made or reopened, or one in memory.

    One that is reopened fits the plan and contains everything that the run's
    checkpoints and journal have seen of it, or it is refused and left as it is.
    """
    notes = [*remarks]
    if independent:
        notes.append(INDEPENDENT_NOTE)
    if unsafe:
        notes.append(UNSAFE_NOTE)
    if oracle:
        notes.append(ORACLE_NOTE)
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
    return open_with(run_dir, header)


def open_with(run_dir: Path | None, header: LedgerHeader) -> Ledger | MemoryLedger:
    """The same for a header that somebody else has made."""
    if run_dir is None:
        return MemoryLedger(header)
    path = run_dir / "ledger.jsonl"
    if not path.exists():
        _refuse_lost_ledger(run_dir)
        with as_storage_error(run_dir, "make the folder"):
            make_folder(run_dir)
        return Ledger.create(path, header)

    def check(record: LedgerRecord) -> None:
        _refuse_other_settings(record, header)
        clear_leftovers(run_dir / "checkpoints")  # the lock is held: they are ours
        check_ledger(record, witnesses(run_dir))

    ledger = Ledger.open(path, check)
    known = {note.partition(":")[0] for note in ledger.notes()}
    for note in header.notes:
        if note.partition(":")[0] not in known:
            ledger.note(note)
    return ledger


def _refuse_lost_ledger(run_dir: Path) -> None:
    checkpoints = (run_dir / "checkpoints").exists()
    if checkpoints or Journal(run_dir / "journal").steps():
        what = "checkpoints" if checkpoints else "a journal"
        raise LedgerError(
            f"{run_dir} has {what} and no ledger.jsonl: nobody can tell what the run "
            "has spent",
            "put the ledger back; a new run needs a folder of its own",
        )


def _refuse_other_settings(record: LedgerRecord, given: LedgerHeader) -> None:
    """A run goes on with the settings that its header promises, and no others."""
    for name, value in _promises(given).items():
        stored = _promises(record.header).get(name, WHEN_UNSAID.get(name))
        if stored != value:
            raise ConfigurationError(
                f"{record.path} belongs to a run with {name} = {stored!r}, and this "
                f"one has {value!r}",
                "give this run a folder of its own, or resume with the old settings",
            )


def _promises(header: LedgerHeader) -> dict[str, Any]:
    own = {
        "unit": header.unit,
        "relation": header.relation.value,
        "delta": header.delta,
        "target_epsilon": header.target_epsilon,
        "planned_steps": header.planned_steps,
        "accountant": header.accountant,
    }
    return own | {k: v for k, v in header.facts.items() if k != "curvedp"}


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


def refuse_lost_payments(ledger: Ledger | MemoryLedger, run: dict[str, Any]) -> None:
    """A state whose payments are not in this ledger would be had for nothing."""
    own = run.get("id") == ledger.header.run_id
    if not own or run.get("payments", 0) > ledger.count():
        raise CheckpointError(
            "the state belongs to a run whose payments are not in this run's "
            "ledger: its steps would be had for nothing",
            "attach with the run folder that it was made with and call resume(); "
            "or carry states between runs that have no folder",
        )


def refuse_other_facts(stored: dict[str, Any], own: dict[str, Any], what: str) -> None:
    """A state is gone on from with the settings that it was made with."""
    for name, value in own.items():
        then = stored.get(name, WHEN_UNSAID.get(name))
        if then != value:
            raise CheckpointError(
                f"{what} was made with {name} = {then!r}, and this run has {value!r}",
                "resume with the settings it was made with",
            )


def _shown(plan: Plan) -> dict[str, Any]:
    """Facts of the plan that the header does not have in fields of its own."""
    own = {"unit", "relation", "delta", "target_epsilon", "planned_steps", "accountant"}
    return {k: v for k, v in plan.facts().items() if k not in own}
