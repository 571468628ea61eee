"""The ledger: payments are on disk, damage is found, crashes are survived."""

import errno
import json
import os
import re
import stat
import subprocess
import sys

import pytest

from curvedp.accounting import (
    GaussianEvent,
    Ledger,
    LedgerHeader,
    PLDAccountant,
    PoissonGaussianEvent,
    epsilon_of,
    read_ledger,
    repeated,
)
from curvedp.barrier import Relation
from curvedp.errors import ConfigurationError, LedgerError, StorageError

STEP = PoissonGaussianEvent(1.0, 256 / 60000)
HEADER = LedgerHeader(
    run_id="run-1",
    relation=Relation.ADD_REMOVE,
    delta=1e-5,
    target_epsilon=1.0,
    planned_steps=1170,
    notes=("a remark",),
    facts={"recipe": "dp-sgd"},
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


@pytest.fixture
def paid(path):
    """A closed ledger with steps 0, 1, 2 and a second attempt at 1."""
    with Ledger.create(path, HEADER) as ledger:
        for step, attempt in [(0, 0), (1, 0), (1, 1), (2, 0)]:
            ledger.pay(step, attempt, STEP)
    return path


@pytest.fixture(params=[1, 2], ids=["version 1", "version 2"])
def either(paid, request):
    """The same ledger as each version writes it."""
    if request.param == 1:
        unchain(paid)
    return paid


def unchain(path):
    """Rewrite a ledger as version 1 wrote it: without the chain."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        del line["chain"]
    lines[0]["version"] = 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def lines_of(path):
    return path.read_bytes().splitlines(keepends=True)


def test_what_is_written_is_read_back(paid):
    record = read_ledger(paid)
    assert record.header == HEADER
    assert record.torn is None
    assert [(p.seq, p.step, p.attempt) for p in record.payments()] == [
        (1, 0, 0),
        (2, 1, 0),
        (3, 1, 1),
        (4, 2, 0),
    ]
    assert all(p.event == STEP for p in record.payments())
    assert record.count() == 4
    assert record.paid_steps() == (0, 1, 2)
    assert [record.next_attempt(s) for s in range(4)] == [1, 2, 1, 0]
    assert record.event().parts == ((STEP, 4),)
    assert record.notes() == ("a remark",)


def test_epsilon_is_recomputed_from_the_file_alone(paid):
    args = {"sample_rate": STEP.sample_rate, "steps": 4, "delta": 1e-5}
    expected = epsilon_of(1.0, relation="add-remove", **args)
    record = read_ledger(paid)
    assert record.epsilon() == expected > 0
    coarse = PLDAccountant(1e-3)
    assert record.epsilon(coarse) == epsilon_of(
        1.0, relation="add-remove", accountant=coarse, **args
    )
    assert record.epsilon("rdp") > record.epsilon()


def test_epsilon_uses_relation_delta_and_accountant_of_the_header(path):
    header = LedgerHeader("r", Relation.REPLACE_ONE, 1e-6)
    with Ledger.create(path, header) as ledger:
        assert ledger.epsilon() == 0.0
        ledger.pay(0, 0, repeated(STEP, 1170))
        found = ledger.epsilon()
    args = {"sample_rate": STEP.sample_rate, "steps": 1170}
    assert found == epsilon_of(1.0, delta=1e-6, relation="replace-one", **args)


def test_the_file_is_plain_json_lines_without_private_quantities(paid):
    header, *rest = [json.loads(line) for line in lines_of(paid)]
    assert header["kind"] == "curvedp-ledger" and header["version"] == 2
    assert header["relation"] == "add-remove" and header["unit"] == "example"
    assert header["facts"] == {"recipe": "dp-sgd"}
    fields = {"seq", "step", "attempt", "event", "time", "chain"}
    assert [set(r) for r in rest] == [fields] * 4
    # Finer times would tell how long a step took, and so how many examples it had.
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:00\+00:00", r["time"]) for r in rest)


def test_a_payment_is_synced_before_pay_returns(path, monkeypatch):
    synced = []
    real = os.fsync
    with Ledger.create(path, HEADER) as ledger:

        def fsync(descriptor):
            synced.append(os.fstat(descriptor).st_size)
            real(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)
        ledger.pay(0, 0, STEP)
        assert synced == [path.stat().st_size]
        assert read_ledger(path).count() == 1


def test_gaps_are_found(path):
    with Ledger.create(path, HEADER) as ledger:
        assert ledger.is_gapless()
        for step in (0, 1, 4):
            ledger.pay(step, 0, STEP)
        assert ledger.missing_steps() == (2, 3)
        assert not ledger.is_gapless()
        ledger.pay(2, 0, STEP)
        ledger.pay(3, 0, STEP)
        assert ledger.is_gapless()
        assert not ledger.is_gapless(first=-1)


def test_notes_stand_between_payments(path):
    with Ledger.create(path, HEADER) as ledger:
        ledger.pay(0, 0, STEP)
        ledger.note("private diagnostics were shown")
        ledger.pay(1, 0, STEP)
    record = read_ledger(path)
    assert record.notes() == ("a remark", "private diagnostics were shown")
    assert [p.seq for p in record.payments()] == [1, 3]


@pytest.mark.parametrize(("step", "attempt"), [(0, 1), (1, 0), (1, 3), (-1, 0)])
def test_paying_for_the_wrong_attempt_is_refused(paid, step, attempt):
    before = paid.read_bytes()
    with Ledger.open(paid) as ledger:
        if (step, attempt) == (0, 1):
            ledger.pay(0, 1, STEP)  # this one is due
            before = paid.read_bytes()
        with pytest.raises(LedgerError, match="due"):
            ledger.pay(step, attempt, STEP)
    assert paid.read_bytes() == before


def test_a_reopened_ledger_goes_on(paid):
    with Ledger.open(paid) as ledger:
        assert ledger.pay(3, 0, GaussianEvent(2.0)).seq == 5
    assert read_ledger(paid).count() == 5


def test_a_ledger_is_never_overwritten(paid):
    before = paid.read_bytes()
    with pytest.raises(LedgerError, match="never overwritten"):
        Ledger.create(paid, HEADER)
    assert paid.read_bytes() == before
    assert os.listdir(paid.parent) == [paid.name]


def test_creation_without_hard_links_is_whole_too(path, monkeypatch):
    def link(*args):
        raise OSError(errno.ENOTSUP, "no hard links here")

    monkeypatch.setattr(os, "link", link)
    with Ledger.create(path, HEADER) as ledger:
        ledger.pay(0, 0, STEP)
    assert read_ledger(path).count() == 1
    assert os.listdir(path.parent) == [path.name]
    with pytest.raises(LedgerError, match="never overwritten"):
        Ledger.create(path, HEADER)


@pytest.mark.parametrize("missing", [1, 5, 30])
def test_a_torn_last_line_is_cut_off_and_reported(paid, missing, caplog):
    whole = lines_of(paid)
    paid.write_bytes(b"".join(whole[:-1]) + whole[-1][: -1 - missing])
    seen = read_ledger(paid)
    assert seen.count() == 3 and "unfinished" in seen.torn
    with Ledger.open(paid) as ledger:
        assert ledger.count() == 3
        assert "unfinished" in ledger.torn
        assert "unfinished" in caplog.text
        assert ledger.next_attempt(2) == 0
        ledger.pay(2, 0, STEP)
    record = read_ledger(paid)
    assert record.torn is None
    assert record.count() == 4
    assert "recovered after a crash" in record.notes()[-1]


def test_zeros_after_a_power_cut_are_a_torn_line(paid):
    with paid.open("ab") as file:
        file.write(b"\0" * 40)
    with Ledger.open(paid) as ledger:
        assert ledger.count() == 4 and ledger.torn
    assert read_ledger(paid).count() == 4


def test_a_whole_last_line_without_newline_still_counts(paid):
    # Cutting it off could take a payment away that was spent.
    paid.write_bytes(paid.read_bytes()[:-1])
    assert read_ledger(paid).count() == 4
    with Ledger.open(paid) as ledger:
        assert ledger.count() == 4 and ledger.torn is None
        ledger.pay(3, 0, STEP)
    assert read_ledger(paid).count() == 5


@pytest.mark.parametrize("open_it", [read_ledger, Ledger.open])
@pytest.mark.parametrize(
    ("line", "edit"),
    [
        (3, lambda text: text.replace('"seq": 2', '"seq": 3')),
        (3, lambda text: text.replace('"seq": 2', '"seq": "2"')),
        (3, lambda text: text.replace('"step": 1', '"step": 0')),
        (3, lambda text: text.replace('"attempt": 0', '"attempt": 1')),
        (3, lambda text: text.replace('"step": 1', '"step": -1')),
        (3, lambda text: text.replace("poisson-gaussian", "laplace")),
        (3, lambda text: text.replace('"noise_multiplier": 1.0', '"noise": 1.0')),
        (
            3,
            lambda text: text.replace(
                '"noise_multiplier": 1.0', '"noise_multiplier": NaN'
            ),
        ),
        (3, lambda text: text.replace("{", "[", 1)),
        (3, lambda text: "\n"),
        (3, lambda text: "3\n"),
        (3, lambda text: ""),
        (3, lambda text: text + text),
        (5, lambda text: text.replace('"seq": 4', '"seq": 4,,')),
        (1, lambda text: re.sub('"version": .', '"version": 3', text)),
        (1, lambda text: text.replace('"run_id"', '"id"')),
        (1, lambda text: text.replace("add-remove", "none")),
        (1, lambda text: text.replace("1e-05", "2")),
        (1, lambda text: text.replace('"pld"', '"gdp"')),
    ],
)
def test_edits_are_found_and_located(either, open_it, line, edit):
    paid = either
    lines = paid.read_text().splitlines(keepends=True)
    changed = edit(lines[line - 1])
    assert changed != lines[line - 1]
    lines[line - 1] = changed
    paid.write_text("".join(lines))
    before = paid.read_bytes()
    with pytest.raises(LedgerError, match=re.escape(str(paid))) as caught:
        open_it(paid)
    if '"version": 3' not in changed:
        # a doubled line is found at the second copy
        assert f"line {line + (changed.count(chr(10)) == 2)}" in str(caught.value)
    assert paid.read_bytes() == before


@pytest.mark.parametrize("open_it", [read_ledger, Ledger.open])
@pytest.mark.parametrize(
    "content",
    [b"", b"step,loss\n1,2\n", b'{"kind": "other"}\n', b"[1]\n", b"\xff\xfe\n"],
)
def test_a_foreign_file_is_said_to_be_foreign(path, open_it, content):
    path.write_bytes(content)
    with pytest.raises(LedgerError, match="not a curvedp ledger"):
        open_it(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("open_it", [read_ledger, Ledger.open])
def test_a_missing_file_is_said_to_be_missing(path, open_it):
    with pytest.raises(LedgerError, match="no ledger at"):
        open_it(path)


def test_a_folder_is_no_ledger(tmp_path):
    with pytest.raises(LedgerError, match="cannot be read"):
        read_ledger(tmp_path)


def full_disk(*args):
    raise OSError(errno.ENOSPC, "No space left on device")


def half_write(real):
    """A disk that fills up in the middle of a line."""
    calls = iter([True])

    def write(descriptor, data):
        if next(calls, False):
            return real(descriptor, data[: len(data) // 2])
        return full_disk()

    return write


@pytest.mark.parametrize("fault", ["write", "half", "fsync"])
def test_a_full_disk_leaves_the_ledger_as_it_was(paid, monkeypatch, fault):
    before = paid.read_bytes()
    with Ledger.open(paid) as ledger:
        with monkeypatch.context() as patch:
            if fault == "half":
                patch.setattr(os, "write", half_write(os.write))
            else:
                patch.setattr(os, fault, full_disk)
            with pytest.raises(StorageError, match="No space left") as caught:
                ledger.pay(3, 0, STEP)
        assert "nothing was spent" in str(caught.value)
        assert paid.read_bytes() == before
        assert ledger.count() == 4 and ledger.next_attempt(3) == 0
        ledger.pay(3, 0, STEP)  # space was freed
    assert read_ledger(paid).count() == 5


def test_when_even_truncation_fails_the_next_open_repairs(paid, monkeypatch):
    before = paid.read_bytes()
    ledger = Ledger.open(paid)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half_write(os.write))
        patch.setattr(os, "ftruncate", full_disk)
        with pytest.raises(StorageError):
            ledger.pay(3, 0, STEP)
    assert len(paid.read_bytes()) > len(before)
    with pytest.raises(LedgerError, match="closed"):
        ledger.pay(3, 0, STEP)
    with Ledger.open(paid) as again:
        assert again.count() == 4 and again.torn


@pytest.mark.parametrize("fault", ["write", "fsync", "open"])
def test_a_full_disk_at_creation_leaves_nothing(path, monkeypatch, fault):
    with monkeypatch.context() as patch:
        patch.setattr(os, fault, full_disk)
        with pytest.raises(StorageError, match="No space left"):
            Ledger.create(path, HEADER)
    assert os.listdir(path.parent) == []


@pytest.mark.skipif(os.name != "posix", reason="folders are synced on POSIX only")
def test_creation_syncs_the_folder_or_leaves_nothing(path, monkeypatch):
    real = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            full_disk()
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(StorageError, match="No space left"):
            Ledger.create(path, HEADER)
    assert os.listdir(path.parent) == []


def test_two_writers_are_refused(paid):
    with Ledger.open(paid):
        with pytest.raises(LedgerError, match="in use"):
            Ledger.open(paid)
        code = (
            "import sys; from curvedp.accounting import Ledger\n"
            "from curvedp.errors import LedgerError\n"
            "try: Ledger.open(sys.argv[1])\n"
            "except LedgerError as error: print(error)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(paid)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert "in use" in done.stdout
        assert read_ledger(paid).count() == 4  # reading is always allowed
    Ledger.open(paid).close()


def test_a_created_ledger_is_locked_from_the_start(path):
    with Ledger.create(path, HEADER), pytest.raises(LedgerError, match="in use"):
        Ledger.open(path)


def test_a_writer_without_locks_is_still_found(paid, monkeypatch):
    monkeypatch.setattr("curvedp.locks.fcntl", None)
    with Ledger.open(paid) as one, Ledger.open(paid) as other:
        one.pay(3, 0, STEP)
        with pytest.raises(LedgerError, match="changed by another"):
            other.pay(3, 0, STEP)
    assert read_ledger(paid).count() == 5


def test_a_ledger_that_vanishes_stops_the_run(paid):
    with Ledger.open(paid) as ledger:
        paid.rename(paid.with_name("elsewhere"))
        with pytest.raises(LedgerError, match="moved or deleted"):
            ledger.pay(3, 0, STEP)


def test_a_killed_run_has_paid_for_what_it_did(path):
    code = (
        "import os, sys\n"
        "from curvedp.accounting import *\n"
        "from curvedp.barrier import Relation\n"
        "header = LedgerHeader('r', Relation.ZERO_OUT, 1e-5)\n"
        "ledger = Ledger.create(sys.argv[1], header)\n"
        "for step in range(3): ledger.pay(step, 0, GaussianEvent(1.0))\n"
        "os._exit(9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert done.returncode == 9
    with Ledger.open(path) as ledger:
        assert ledger.paid_steps() == (0, 1, 2)
        assert ledger.torn is None


def test_closing_twice_is_harmless_and_a_closed_ledger_refuses(paid):
    ledger = Ledger.open(paid)
    ledger.close()
    ledger.close()
    with pytest.raises(LedgerError, match="closed"):
        ledger.note("too late")


@pytest.mark.parametrize("fact", ["loss", "batch_count", "clip_fraction"])
def test_private_facts_are_refused(fact):
    with pytest.raises(ConfigurationError, match=fact):
        LedgerHeader("r", Relation.ZERO_OUT, 1e-5, facts={fact: 1})


def test_the_size_is_a_fact_only_where_it_is_public():
    facts = {"dataset_size": 60000}
    assert LedgerHeader("r", Relation.ZERO_OUT, 1e-5, facts=facts).facts == facts
    with pytest.raises(ConfigurationError, match="dataset_size"):
        LedgerHeader("r", Relation.ADD_REMOVE, 1e-5, facts=facts)


@pytest.mark.parametrize(
    "wrong",
    [
        {"delta": 0.0},
        {"target_epsilon": -1.0},
        {"planned_steps": 1.5},
        {"accountant": "x"},
    ],
)
def test_an_impossible_header_is_refused(wrong):
    with pytest.raises(ConfigurationError):
        LedgerHeader(
            **({"run_id": "r", "relation": Relation.ZERO_OUT, "delta": 0.1} | wrong)
        )


def test_facts_must_be_json(path):
    header = LedgerHeader("r", Relation.ZERO_OUT, 1e-5, facts={"x": {1, 2}})
    with pytest.raises(ConfigurationError, match="JSON"):
        Ledger.create(path, header)
    assert os.listdir(path.parent) == []


def test_unknown_keys_in_version_1_are_let_through(paid):
    unchain(paid)
    lines = paid.read_text().splitlines()
    entry = json.loads(lines[1]) | {"hash": "abc"}
    lines[1] = json.dumps(entry)
    paid.write_text("\n".join(lines) + "\n")
    assert read_ledger(paid).count() == 4
