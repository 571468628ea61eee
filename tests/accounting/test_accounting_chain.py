"""The chain of checksums: what was changed inside a ledger is found on reading it."""

import hashlib
import json
import re

import pytest

from curvedp.accounting import Ledger, MemoryLedger, read_ledger
from curvedp.errors import LedgerError
from tests.accounting.test_accounting_ledger import HEADER, STEP, paid, path, unchain

__all__ = ["paid", "path"]


def entries(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def store(file, lines):
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_chain_is_what_the_documentation_says(paid):
    previous = ""
    for line in entries(paid):
        chain = line.pop("chain")
        text = json.dumps(line, sort_keys=True, separators=(",", ":"))
        previous = hashlib.sha256((previous + text).encode()).hexdigest()
        assert chain == previous
    assert read_ledger(paid).head() == (4, previous)


def edited(lines):  # nothing but the chain can tell
    lines[2]["event"]["noise_multiplier"] = 7.0


def edited_header(lines):
    lines[0]["delta"] = 1e-4


def edited_time(lines):
    lines[4]["time"] = "2020-01-01T00:00+00:00"


def added_key(lines):
    lines[2]["more"] = 1


def removed(lines):
    """Remove the second attempt and number the rest again."""
    del lines[3]
    lines[3]["seq"] = 3


def inserted(lines):
    lines.insert(2, {"seq": 2, "note": "inserted", "time": ""})
    for number, line in enumerate(lines[3:], start=3):
        line["seq"] = number


def moved(lines):
    """Swap two whole lines, chains included, and number them again."""
    lines[1], lines[2] = lines[2], lines[1]
    lines[1]["seq"], lines[2]["seq"] = 1, 2


def unchained_line(lines):
    del lines[3]["chain"]


def downgraded(lines):
    lines[0]["version"] = 1


CHANGES = [
    (edited, 3), (edited_header, 1), (edited_time, 5), (added_key, 3), (removed, 4),
    (inserted, 3), (moved, 2), (unchained_line, 4), (downgraded, 1),
]  # fmt: skip


@pytest.mark.parametrize("open_it", [read_ledger, Ledger.open])
@pytest.mark.parametrize(("change", "line"), CHANGES)
def test_changes_inside_are_found_and_located(paid, open_it, change, line):
    lines = entries(paid)
    store(paid, lines)
    assert read_ledger(paid).count() == 4  # writing it again is no change
    change(lines)
    store(paid, lines)
    before = paid.read_bytes()
    where = re.escape(f"{paid}, line {line}: ")
    with pytest.raises(LedgerError, match=where + ".*chain") as caught:
        open_it(paid)
    assert "restore it from a copy" in str(caught.value)
    assert paid.read_bytes() == before


def test_every_single_bit_flip_is_found_or_changes_nothing(paid):
    content = paid.read_bytes()
    expected = read_ledger(paid)
    for place in range(0, len(content), 3):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 7
        paid.write_bytes(flipped)
        try:
            record = read_ledger(paid)
        except LedgerError:
            continue
        # a space between values, or the newline at the end
        assert record.header == expected.header
        assert record.torn or record.payments() == expected.payments()
        assert record.count() == (3 if record.torn else 4)


def test_a_version_1_ledger_is_read_and_continued_as_it_is(paid):
    unchain(paid)
    with Ledger.open(paid) as ledger:
        before = ledger.head()
        ledger.pay(3, 0, STEP)
        after = ledger.head()
    record = read_ledger(paid)
    assert record.count() == 5 and not record.chained
    assert all("chain" not in line for line in entries(paid))
    # its head can be kept elsewhere all the same
    assert before[0] == 4 and after == record.head() and record.has_head(*before)
    lines = entries(paid)
    edited(lines)
    store(paid, lines)
    assert not read_ledger(paid).has_head(*before)


def test_a_check_comes_before_anything_is_changed(paid):
    torn = paid.read_bytes() + b'{"seq": 5'
    paid.write_bytes(torn)
    seen = []

    def refuse(record):
        seen.append((record.count(), record.torn))
        with pytest.raises(LedgerError, match="in use"):
            Ledger.open(paid)
        raise LedgerError("refused")

    with pytest.raises(LedgerError, match="refused"):
        Ledger.open(paid, refuse)
    assert seen[0][0] == 4 and "unfinished" in seen[0][1]
    assert paid.read_bytes() == torn
    Ledger.open(paid).close()  # the lock is gone
    assert paid.read_bytes() != torn


def test_a_closed_ledger_says_so(paid):
    ledger = Ledger.open(paid)
    ledger.require_open()
    ledger.close()
    with pytest.raises(LedgerError, match="is closed"):
        ledger.require_open()


def test_a_reopened_ledger_continues_the_chain(paid):
    with Ledger.open(paid) as ledger:
        ledger.pay(3, 0, STEP)
        ledger.note("a note")
        head = ledger.head()
    assert head == (6, entries(paid)[-1]["chain"])
    assert read_ledger(paid).head() == head


def test_the_head_finds_a_ledger_that_was_cut_short(paid):
    lines = entries(paid)
    heads = [(n, line["chain"]) for n, line in enumerate(lines)]
    record = read_ledger(paid)
    assert all(record.has_head(*head) for head in heads)
    assert not record.has_head(5, heads[4][1])
    assert not record.has_head(3, heads[4][1])
    assert not record.has_head(-1, heads[4][1])
    store(paid, lines[:-1])
    cut = read_ledger(paid)  # the file alone cannot tell
    assert cut.count() == 3 and cut.has_head(*heads[3])
    assert not cut.has_head(*heads[4])


def test_a_failed_payment_does_not_move_the_chain(paid, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with Ledger.open(paid) as ledger:
        head = ledger.head()
        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", full)
            with pytest.raises(OSError):
                ledger.pay(3, 0, STEP)
        assert ledger.head() == head
        ledger.pay(3, 0, STEP)
    assert read_ledger(paid).head()[0] == head[0] + 1


def test_the_text_of_a_ledger_in_memory_is_chained(tmp_path):
    memory = MemoryLedger(HEADER)
    memory.pay(0, 0, STEP)
    memory.note("a note")
    file = tmp_path / "ledger.jsonl"
    file.write_text(memory.to_text())
    assert read_ledger(file).head()[0] == 2
    other = MemoryLedger(HEADER)
    other.absorb(memory.to_text())
    assert other.payments() == memory.payments() and other.notes() == memory.notes()
    unchain(file)
    older = MemoryLedger(HEADER)
    older.absorb(file.read_text())
    assert older.payments() == memory.payments()
    changed = memory.to_text().replace(
        '"noise_multiplier": 1.0', '"noise_multiplier": 9.0'
    )
    with pytest.raises(LedgerError, match="line 2: its chain"):
        MemoryLedger(HEADER).absorb(changed)
