"""What a ledger says: its header, payments and notes, and the epsilon they add up to.

Everything here is read from the file alone, so that anybody can recompute epsilon
without the training code. Writing is in :mod:`curvedp.accounting.ledger`.

Since version 2 the lines are chained: each carries the SHA-256 of the line before it
and of itself, so that an edited, removed, inserted or moved line is found. For a ledger
of version 1 the same chain is computed on reading, so that its head too can be kept
elsewhere and looked for again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from curvedp.accounting._validate import (
    MOST_STEPS,
    check_delta,
    check_epsilon,
    check_repeats,
)
from curvedp.accounting.accountants import Accountant, get_accountant
from curvedp.accounting.chains import chain_of
from curvedp.accounting.events import (
    ComposedEvent,
    Event,
    event_from_json,
    sequential,
    tally,
)
from curvedp.barrier import Relation
from curvedp.errors import (
    ConfigurationError,
    CurvedpError,
    LedgerError,
    NotPrivateError,
)
from curvedp.storage import parse_json
from curvedp.values import is_whole, printable

__all__ = [
    "INDEPENDENT_NOTE",
    "ORACLE_NOTE",
    "UNSAFE_NOTE",
    "LedgerHeader",
    "LedgerRecord",
    "Note",
    "Payment",
    "parse_ledger",
]

#: In the ledger of a run whose curvature comes from private data.
ORACLE_NOTE = (
    "oracle: curvature was taken from the private data without noise; no epsilon holds"
)

#: In the ledger of a run whose noise somebody can compute again.
UNSAFE_NOTE = (
    "unsafe_reproducible_noise: whoever knows the seed can recompute noise and "
    "sampling; there is no guarantee"
)

#: In the ledger of a run that a launcher started beside others.
INDEPENDENT_NOTE = (
    "independent_process: one of several runs; on the same data their epsilons add up"
)

KIND = "curvedp-ledger"
VERSION = 2
_UNCHAINED = 1  # still read, and continued as it is

_MOST_MISSING = 10**6
_MOST_KINDS = 100
_ALWAYS_PRIVATE = frozenset(
    {"loss", "train_loss", "batch_count", "batch_counts", "clip_fraction", "grad_norm"}
)
_SIZES = frozenset({"dataset_size", "num_examples", "train_size", "n_examples"})


@dataclass(frozen=True)
class LedgerHeader:
    """The promise that the payments are held against. Public, all of it.

    Attributes:
        run_id: name of the run, the same in its checkpoints.
        relation: when two datasets count as neighbours.
        delta: the declared delta.
        target_epsilon: the budget, or None when sigma was given instead.
        planned_steps: the declared number of steps, or None.
        accountant: name of the accountant whose epsilon is printed.
        unit: what one epsilon protects.
        notes: remarks that hold for the whole run.
        facts: free-form public facts (recipe, version). No private quantity; the
            dataset's size only under a relation that takes it as public.
    """

    run_id: str
    relation: Relation
    delta: float
    target_epsilon: float | None = None
    planned_steps: int | None = None
    accountant: str = "pld"
    unit: str = "example"
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        check_delta(self.delta)
        if self.target_epsilon is not None:
            check_epsilon(self.target_epsilon)
        if self.planned_steps is not None:
            check_repeats(self.planned_steps, "planned_steps")
        get_accountant(
            self.accountant
        )  # an unknown name is an error now, not at the end
        secret = set(self.facts) & _ALWAYS_PRIVATE
        if not self.relation.size_is_public:
            secret |= set(self.facts) & _SIZES
        if secret:
            raise ConfigurationError(
                f"a ledger holds no private quantity: {', '.join(sorted(secret))}",
                "leave it out; the dataset's size is public only under the relations "
                "zero-out and replace-one",
            )

    def to_json(self) -> dict[str, Any]:
        """The first line of the file."""
        return {
            "kind": KIND,
            "version": VERSION,
            "run_id": self.run_id,
            "relation": self.relation.value,
            "delta": self.delta,
            "unit": self.unit,
            "target_epsilon": self.target_epsilon,
            "planned_steps": self.planned_steps,
            "accountant": self.accountant,
            "notes": list(self.notes),
            "facts": dict(self.facts),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LedgerHeader:
        """Read the first line of the file; its kind and version are checked before."""
        return cls(
            run_id=printable(data["run_id"], ""),
            relation=Relation.parse(data["relation"]),
            delta=data["delta"],
            target_epsilon=data.get("target_epsilon"),
            planned_steps=data.get("planned_steps"),
            accountant=data.get("accountant", "pld"),
            unit=printable(data.get("unit", "example"), ""),
            notes=tuple(printable(str(n), "") for n in data.get("notes", ())),
            facts=MappingProxyType(dict(data.get("facts", {}))),
        )


@dataclass(frozen=True)
class Payment:
    """One event that was paid for, before its noise was drawn."""

    seq: int
    step: int
    attempt: int
    event: Event
    time: str

    def to_json(self) -> dict[str, Any]:
        """The payment as a line of the file."""
        return {
            "seq": self.seq,
            "step": self.step,
            "attempt": self.attempt,
            "event": self.event.to_json(),
            "time": self.time,
        }


@dataclass(frozen=True)
class Note:
    """A remark that whoever reads epsilon has to see."""

    seq: int
    note: str
    time: str = ""

    def to_json(self) -> dict[str, Any]:
        """The note as a line of the file."""
        return {"seq": self.seq, "note": self.note, "time": self.time}


class LedgerRecord:
    """The contents of a ledger, read-only.

    Attributes:
        path: where it was read from.
        header: the run's promise.
        torn: why the last line was left out, or None. It was being written when the
            run stopped, so its noise had not been drawn and nothing was spent on it.
        chained: whether its lines carry a chain of checksums (since version 2).
    """

    def __init__(
        self, path: Path, header: LedgerHeader, torn: str | None = None
    ) -> None:
        self.path = path
        self.header = header
        self.torn = torn
        self.chained = False
        self._chains: list[str] = []  # of the header, then of every line
        self._payments: list[Payment] = []
        self._notes: list[Note] = []
        self._attempts: dict[int, int] = {}

    def payments(self) -> tuple[Payment, ...]:
        """All payments, in the order in which they were made."""
        return tuple(self._payments)

    def count(self) -> int:
        """Number of payments, repeated steps included."""
        return len(self._payments)

    def notes(self) -> tuple[str, ...]:
        """The remarks of the header, then those that were added."""
        return (*self.header.notes, *(n.note for n in self._notes))

    @property
    def is_oracle(self) -> bool:
        """Whether curvature was ever taken from the private data, so nothing holds."""
        return ORACLE_NOTE in self.notes()

    @property
    def is_unsafe(self) -> bool:
        """Whether any of its noise was ever reproducible from a number."""
        return UNSAFE_NOTE in self.notes()

    def next_attempt(self, step: int) -> int:
        """The attempt to pay for next: how often the step was paid for already."""
        return self._attempts.get(step, 0)

    def paid_steps(self) -> tuple[int, ...]:
        """The steps that were paid for at least once, ascending."""
        return tuple(sorted(self._attempts))

    def missing_steps(self, first: int = 0) -> tuple[int, ...]:
        """Steps from ``first`` to the last paid one that nobody paid for.

        Raises:
            LedgerError: there are more of them than any run could have left out.
        """
        last = max(self._attempts, default=first - 1)
        if last - first - len(self._attempts) > _MOST_MISSING:
            raise LedgerError(
                f"{self.path} pays for step {last} and for next to none before it",
                "the ledger was changed or damaged; restore it from a copy",
            )
        return tuple(s for s in range(first, last + 1) if s not in self._attempts)

    def is_gapless(self, first: int = 0) -> bool:
        """Whether every step from ``first`` to the last paid one was paid for."""
        return not self.missing_steps(first)

    def event(self) -> ComposedEvent:
        """Everything that was paid for, with equal events counted."""
        return tally(p.event for p in self._payments)

    def epsilon(self, accountant: Accountant | str | None = None) -> float:
        """Epsilon of all payments at the header's delta, under its relation.

        Args:
            accountant: the header's own when None.

        Raises:
            NotPrivateError: the run took curvature from its private data.
        """
        if self.is_oracle:
            raise NotPrivateError(
                "the run took curvature from its private data (an oracle, for "
                "research): no epsilon holds, whatever was paid",
                "run it with synthetic or public probes for a guarantee",
            )
        chosen = get_accountant(accountant or self.header.accountant)
        total = sequential(self.event())
        if len(total.parts) > _MOST_KINDS:
            raise LedgerError(
                f"{self.path} pays for {len(total.parts)} kinds of noise, and no run "
                f"of ours has more than {_MOST_KINDS}: each is composed by itself, "
                "which takes up to seconds",
                "if you have the time, ask an accountant of curvedp.accounting for "
                "the epsilon of read_ledger(...).event()",
            )
        return chosen.epsilon(total, self.header.relation, self.header.delta)

    def head(self) -> tuple[int, str] | None:
        """``seq`` and chain of the last line (0: the header); None in memory."""
        return (len(self._chains) - 1, self._chains[-1]) if self._chains else None

    def has_head(self, seq: int, chain: str) -> bool:
        """Whether this ledger is the one that once had that head, or goes on from it.

        A ledger that was cut short, or rewritten before that line, is not.
        """
        return 0 <= seq < len(self._chains) and self._chains[seq] == chain

    def _next_seq(self) -> int:
        # The header is line 1, so the line of ``seq`` k is line k + 1.
        return len(self._payments) + len(self._notes) + 1

    def _add(self, entry: Payment | Note) -> None:
        if entry.seq != self._next_seq():
            raise LedgerError(
                f"seq is {entry.seq} where {self._next_seq()} was due: a line is "
                "missing, doubled or moved"
            )
        if isinstance(entry, Note):
            self._notes.append(entry)
            return
        due = self.next_attempt(entry.step)
        if entry.attempt != due:
            raise LedgerError(
                f"attempt {entry.attempt} at step {entry.step}, where {due} was due"
            )
        self._payments.append(entry)
        self._attempts[entry.step] = due + 1


def parse_ledger(path: Path, content: bytes) -> tuple[LedgerRecord, int]:
    """Read and check a whole ledger.

    A last line that does not end is what a crash leaves behind. If it is no JSON it is
    left out and reported in ``torn``. If it is whole, it counts: it may be a payment
    whose newline an editor removed, and epsilon must never be less than the truth.

    Returns:
        The record, and the number of leading bytes that hold it.

    Raises:
        LedgerError: anything else is wrong; names the file and the line.
    """
    lines = content.split(b"\n")
    tail = lines.pop()
    if not lines:
        # A header is renamed into place whole, so half of one is not ours.
        raise _foreign(path, "its first line does not end")
    record = _parse_header(path, lines[0])
    for number, line in enumerate(lines[1:], start=2):
        _parse_line(record, line, number)
    if not tail:
        return record, len(content)
    try:
        json.loads(tail)
    except ValueError:
        record.torn = f"{len(tail)} bytes of an unfinished last line were left out"
        return record, len(content) - len(tail)
    _parse_line(record, tail, len(lines) + 1)
    return record, len(content)


def _parse_header(path: Path, line: bytes) -> LedgerRecord:
    try:
        data = parse_json(line)
    except ValueError as error:
        why = "is not JSON" if isinstance(error, json.JSONDecodeError) else str(error)
        raise _foreign(path, f"its first line {why}") from None
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise _foreign(path, f"its first line does not say kind {KIND!r}")
    if data.get("version") not in (_UNCHAINED, VERSION):
        raise LedgerError(
            f"{path} is a ledger of version {data.get('version')!r}, and this reads "
            f"versions {_UNCHAINED} and {VERSION}",
            "read it with the version of curvedp that wrote it",
        )
    try:
        for name in ("run_id", "relation", "unit", "accountant"):
            if not isinstance(data.get(name, ""), str):
                raise LedgerError(f"{name} is no text")
        record = LedgerRecord(path, LedgerHeader.from_json(data))
        record.chained = data["version"] != _UNCHAINED
        _check_chain(record, data)
        return record
    except KeyError as error:
        raise _damaged(path, 1, LedgerError(f"the header has no {error}")) from None
    except (CurvedpError, TypeError, ValueError) as error:
        raise _damaged(path, 1, error) from error


def _parse_line(record: LedgerRecord, line: bytes, number: int) -> None:
    try:
        data = parse_json(line)
        if not isinstance(data, dict):
            raise LedgerError("it is no JSON object")
        _check_chain(record, data)
        if "note" in data:
            said = printable(str(data["note"]), "")
            record._add(Note(_whole(data, "seq"), said, str(data.get("time", ""))))
            return
        record._add(
            Payment(
                seq=_whole(data, "seq"),
                step=_whole(data, "step"),
                attempt=_whole(data, "attempt"),
                event=event_from_json(data.get("event")),
                time=str(data.get("time", "")),
            )
        )
    except (CurvedpError, TypeError, ValueError, RecursionError) as error:
        raise _damaged(record.path, number, error) from error


def _check_chain(record: LedgerRecord, data: Mapping[str, Any]) -> None:
    """The line follows from those before it, and is as it was written."""
    if not record.chained and "chain" in data:
        raise LedgerError("it has a chain, and a ledger of version 1 has none")
    content = {name: value for name, value in data.items() if name != "chain"}
    due = chain_of(content, record._chains[-1] if record._chains else "")
    if record.chained and data.get("chain") != due:
        raise LedgerError(
            "its chain does not fit: this line was edited, or a line before it was "
            "removed, inserted or moved"
        )
    record._chains.append(due)


def _damaged(path: Path, number: int, error: Exception) -> LedgerError:
    problem = getattr(error, "problem", str(error))
    return LedgerError(
        f"{path}, line {number}: {problem}",
        "the ledger was changed or damaged, and no epsilon can be computed from "
        "it; restore it from a copy",
    )


def _whole(data: Mapping[str, Any], name: str) -> int:
    value = data.get(name)
    if not is_whole(value):
        raise LedgerError(f"{name} is {value!r}, not a whole number")
    if data[name] > MOST_STEPS:
        raise LedgerError(f"{name} is more than any run has")
    return int(data[name])


def _foreign(path: Path, why: str) -> LedgerError:
    return LedgerError(
        f"{path} is not a curvedp ledger: {why}", "give the path of a run's ledger"
    )
