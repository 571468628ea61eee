"""Ledgers and states from somewhere else: what they print, and what they may cost."""

from __future__ import annotations

import io
import json
import time

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from curvedp.accounting import (
    ComposedEvent,
    Ledger,
    LedgerHeader,
    PoissonGaussianEvent,
    read_ledger,
)
from curvedp.accounting import ledger as ledger_module
from curvedp.accounting.chains import LONGEST_LINE, dump_lines
from curvedp.barrier import Relation
from curvedp.cli import output
from curvedp.cli.app import app
from curvedp.errors import (
    CheckpointError,
    ConfigurationError,
    CurvedpError,
    LedgerError,
)
from curvedp.noise import restore_release

from ..faults.cases import attach, examples, train

#: Goes up two lines and writes over them; sets the title; hides the rest; C1's CSI.
ESCAPES = ["\x1b[2A\x1b[2K", "\x1b]0;x\x07", "\x1b[8m", "\x9b2K", "\r", "\u202e"]
STEP = PoissonGaussianEvent(1.0, 0.01)


def header(**other):
    given = {"run_id": "run", "relation": Relation.ADD_REMOVE, "delta": 1e-5}
    return LedgerHeader(**{**given, **other})


def run_cli(*words):
    done = CliRunner().invoke(app, words)
    return done.stdout, done.stderr, done.exit_code


def is_safe(text):
    return all(c.isprintable() or c == "\n" for c in text)


def forged(folder):
    """A ledger whose every text commands the terminal."""
    folder.mkdir(parents=True)
    wild = "".join(ESCAPES)
    facts = {"recipe": wild, "view": "each-client"}
    path = folder / "ledger.jsonl"
    given = header(run_id=wild, unit=wild, notes=(f"{wild}spent 0.01",), facts=facts)
    with Ledger.create(path, given) as ledger:
        ledger.pay(0, 0, STEP)
        ledger.note(f"fine\nspent  epsilon 0.01{wild}")
    return path


def test_what_a_ledger_says_does_not_command_the_terminal(tmp_path):
    path = forged(tmp_path / "run\x1b[2K")
    for words in ([], ["--json"], ["--debug"]):
        out, err, code = run_cli("privacy", "spent", str(path), *words)
        assert code == 0 and is_safe(out) and is_safe(err), (out, err)
        assert out.count("\nspent") <= 1  # a note has no lines of its own


def test_errors_about_a_strangers_file_are_printable(tmp_path):
    path = tmp_path / "a\x1b[2Kb.jsonl"
    wild = "".join(ESCAPES)
    bad = header().to_json() | {"version": wild}
    path.write_text(json.dumps(bad) + "\n")
    with pytest.raises(CurvedpError) as refusal:
        read_ledger(path)
    assert is_safe(str(refusal.value))
    out, err, code = run_cli("privacy", "spent", str(path), "--debug")
    assert code == 2 and is_safe(out) and is_safe(err)


def test_every_line_of_the_consoles_is_printable(monkeypatch):
    for console in (output.results, output.log):
        assert type(console) is not Console
        file = io.StringIO()
        monkeypatch.setattr(console, "_file", file)
        console.print("".join(ESCAPES), markup=False)
        console.print(output.rows_of([("".join(ESCAPES), "".join(ESCAPES))]))
        assert is_safe(file.getvalue()) and "x1b" in file.getvalue()


def test_a_statement_of_a_strangers_ledger_is_printable(tmp_path):
    run = tmp_path / "run"
    with attach(examples(), run_dir=run) as private:
        private.note("fine\n  guarantee     (0.01, 1e-9)" + "".join(ESCAPES))
        text = str(private.statement())
    assert is_safe(text) and text.count("\n  guarantee") == 1
    assert is_safe("".join(read_ledger(run / "ledger.jsonl").notes()))


@pytest.mark.parametrize("begins", [b"", None])
def test_a_ledger_with_a_hole_is_refused_before_it_fills_the_memory(tmp_path, begins):
    path = tmp_path / "ledger.jsonl"
    start = dump_lines([header()])[0] if begins is None else begins
    path.write_bytes(start)
    with path.open("r+b") as file:
        file.truncate(20 << 30)
    began = time.process_time()
    with pytest.raises(LedgerError, match="longer than"):
        read_ledger(path)
    with pytest.raises(LedgerError, match="longer than"):
        Ledger.open(path)
    assert time.process_time() - began < 1


def test_a_line_that_no_run_writes_is_refused(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(dump_lines([header()])[0] + b" " * (LONGEST_LINE + 1) + b"\n")
    with pytest.raises(LedgerError, match="longer than"):
        read_ledger(path)


def test_nothing_is_written_that_could_not_be_read_again(tmp_path, monkeypatch):
    path = tmp_path / "ledger.jsonl"
    with Ledger.create(path, header()) as ledger:
        with pytest.raises(ConfigurationError, match="longer than"):
            ledger.note("x" * LONGEST_LINE)
        monkeypatch.setattr(ledger_module, "LONGEST", path.stat().st_size + 300)
        with pytest.raises(LedgerError, match="longer than"):
            for step in range(9):
                ledger.pay(step, 0, STEP)
        assert ledger.count() >= 1
    assert read_ledger(path).count() == ledger.count()
    with pytest.raises(ConfigurationError, match="longer than"):
        Ledger.create(tmp_path / "b", header(notes=("x" * LONGEST_LINE,)))


def ledger_of(path, events):
    with Ledger.create(path, header()) as ledger:
        for step, event in enumerate(events):
            ledger.pay(step, 0, event)
    return read_ledger(path)


def test_more_kinds_of_noise_than_anybody_waits_for_are_refused(tmp_path):
    many = tuple((PoissonGaussianEvent(1.0 + i / 1000, 0.01), 1) for i in range(3000))
    record = ledger_of(tmp_path / "a.jsonl", [ComposedEvent(many)])
    began = time.process_time()
    with pytest.raises(LedgerError, match="3000 kinds"):
        record.epsilon()
    assert time.process_time() - began < 1
    few = ComposedEvent(many[:3])
    assert ledger_of(tmp_path / "b.jsonl", [few]).epsilon() > 0


@pytest.mark.parametrize("count", [10**6, 2**31])
def test_many_steps_of_one_kind_cost_no_time(tmp_path, count):
    record = ledger_of(tmp_path / "a.jsonl", [ComposedEvent(((STEP, count),))])
    began = time.process_time()
    record.epsilon()
    assert time.process_time() - began < 3


def test_more_steps_together_than_any_run_makes_are_refused(tmp_path):
    most = ComposedEvent(((STEP, 2**31),))
    record = ledger_of(tmp_path / "a.jsonl", [ComposedEvent(((most, 2**31),)), most])
    with pytest.raises(CurvedpError, match="more than any run"):
        record.epsilon()


# -- a state never stands further than its ledger has paid ----------------------------


def test_a_state_beyond_its_payments_is_refused():
    private = attach(examples())
    train(private)
    state = private.state_dict()
    paid = attach(examples(), steps=4)
    for x, y in paid.loader:
        paid.loss(paid.model(x), y).backward()
        paid.optimizer.step()
        if paid.step == 1:
            break
    state["ledger"], state["run"] = paid.state_dict()["ledger"], {}
    fresh = attach(examples())
    before = {n: p.clone() for n, p in fresh.model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"step 4.*paid for 1"):
        fresh.load_state_dict(state)
    after = fresh.model.state_dict()
    assert all(torch.equal(after[n], p) for n, p in before.items())


def test_a_step_written_into_a_state_by_hand_is_refused(tmp_path):
    with attach(examples(), run_dir=tmp_path / "run") as private:
        state = private.state_dict()
        state["step"] = 3
        with pytest.raises(CheckpointError, match=r"step 3.*paid for 0"):
            private.load_state_dict(state)


def test_a_checkpoint_beyond_the_ledger_is_refused(tmp_path):
    run = tmp_path / "run"
    with attach(examples(), run_dir=run) as private:
        private._engine.step = 2  # sealed and whole, with the head of this ledger
        private.save()
    with (
        attach(examples(), run_dir=run) as again,
        pytest.raises(CheckpointError, match=r"step 2.*paid for 0"),
    ):
        again.resume()


def test_a_release_that_nobody_paid_for_is_not_replayed(tmp_path):
    run = tmp_path / "run"
    with attach(examples(), run_dir=run) as private:
        values = {n: torch.ones_like(p) for n, p in private._engine.parameters.items()}
        release = restore_release(values, "identity", 0, noise_std=1.0)
        private._engine.journal.write(release, [{"lr": 0.1}])
        with pytest.raises(CheckpointError, match=r"step 1.*paid for 0"):
            private.resume()


def test_a_state_that_goes_back_is_welcome():
    private = attach(examples())
    states = [private.state_dict()]
    train(private)
    private.load_state_dict(states[0])
    assert private.step == 0


def test_configuration_errors_are_printable_too():
    assert is_safe(str(ConfigurationError("\x1b[2K", "\x1b[2K")))
