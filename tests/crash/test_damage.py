"""Files that were damaged or cut short: refused by name, or made and paid again."""

import json
import shutil

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from curvedp import Trainer
from curvedp.accounting import read_ledger
from curvedp.errors import CheckpointError, LedgerError
from curvedp.storage import clear_leftovers
from curvedp.train.engine import Engine
from curvedp.train.journal import Journal
from curvedp.train.tensors import read_tensors, write_tensors

pytestmark = pytest.mark.fault

STEPS = 8


class Crash(BaseException):
    pass


def fit(folder, resume=False):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 3), torch.arange(24) % 2)
    return Trainer(
        nn.Linear(3, 2), "cross-entropy", noise_multiplier=1.0, delta=1e-2,
        sample_rate=0.25, expected_batch_size=6, steps=STEPS, run_dir=folder,
        checkpoint_every=2, seed=0, unsafe_reproducible_noise=0,
    ).fit(data, resume=resume)  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """Crashed after step 6: checkpoints of 2 and 4, journal from step 2 to 6."""
    original = Engine.apply

    def apply(self, release):
        original(self, release)
        if release.step == 6:
            raise Crash

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "apply", apply)
        with pytest.raises(Crash):
            fit(tmp_path / "run")
    assert checkpoints(tmp_path / "run")[-1].name == "step-00000006"
    assert read_ledger(tmp_path / "run" / "ledger.jsonl").count() == 7
    return tmp_path / "run"


def checkpoints(run):
    return sorted((run / "checkpoints").iterdir())


def ledger_lines(run):
    return (run / "ledger.jsonl").read_text().splitlines(keepends=True)


def entry(run, step):
    return run / "journal" / f"step-{step:08d}.safetensors"


def test_undamaged_it_is_resumed_and_nothing_is_paid_again(run):
    assert fit(run, resume=True).steps == STEPS


def test_the_head_of_the_ledger_is_in_the_checkpoint(run):
    content = json.loads((checkpoints(run)[-1] / "checkpoint.json").read_text())
    line = json.loads(ledger_lines(run)[6])
    assert content["ledger"] == {"seq": 6, "chain": line["chain"]}


@pytest.mark.parametrize("kept", [1, 3, 6])
def test_a_ledger_cut_short_before_the_checkpoint_is_refused(run, kept):
    (run / "ledger.jsonl").write_text("".join(ledger_lines(run)[:kept]))
    with pytest.raises(LedgerError, match=r"line 7 .* cut short") as caught:
        fit(run, resume=True)
    assert "ledger.jsonl" in str(caught.value)
    assert "step-00000006" in str(caught.value)


def test_the_head_of_the_ledger_is_in_every_journal_entry(run):
    journal = Journal(run / "journal")
    for step in (4, 5, 6):
        line = json.loads(ledger_lines(run)[step + 1])
        assert journal.head(step) == (step + 1, line["chain"])


def test_a_ledger_without_the_payment_of_a_journal_entry_is_refused(run):
    (run / "ledger.jsonl").write_text("".join(ledger_lines(run)[:7]))
    with pytest.raises(LedgerError, match="no payment for step 6"):
        fit(run, resume=True)


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("kept", [1, 3, 6])
def test_a_ledger_cut_short_is_refused_whoever_attaches_it(run, kept, resume):
    before = "".join(ledger_lines(run)[:kept])
    (run / "ledger.jsonl").write_text(before + '{"seq": ')  # and a torn line
    with pytest.raises(LedgerError, match="cut short"):
        fit(run, resume=resume)
    assert (run / "ledger.jsonl").read_text() == before + '{"seq": ', "left as it was"


def test_a_journal_without_its_ledger_is_refused(run):
    shutil.rmtree(run / "checkpoints")
    (run / "ledger.jsonl").unlink()
    with pytest.raises(LedgerError, match="has a journal and no ledger"):
        fit(run, resume=True)


def test_a_ledger_rewritten_without_a_chain_is_refused(run):
    lines = [json.loads(line) for line in ledger_lines(run)]
    for line in lines:
        del line["chain"]
    lines[0]["version"] = 1
    (run / "ledger.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert read_ledger(run / "ledger.jsonl").count() == 7
    with pytest.raises(LedgerError, match="rewritten"):
        fit(run, resume=True)


@pytest.mark.parametrize("change", ["edited", "removed"])
def test_a_changed_ledger_is_refused_with_its_line(run, change):
    lines = ledger_lines(run)
    if change == "edited":
        lines[3] = lines[3].replace(
            '"noise_multiplier": 1.0', '"noise_multiplier": 9.0'
        )
    else:
        del lines[3]
    (run / "ledger.jsonl").write_text("".join(lines))
    with pytest.raises(LedgerError, match=r"ledger.jsonl, line 4: its chain"):
        fit(run, resume=True)


FILES = ["model.safetensors", "state.safetensors", "checkpoint.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "missing"])
def test_a_damaged_checkpoint_is_refused_by_name_and_can_be_removed(run, name, damage):
    newest = checkpoints(run)[-1]
    content = bytearray((newest / name).read_bytes())
    if damage == "flipped":
        place = content.index(b'"step": 6') + 8 if name in FILES[2:] else -1
        content[place] ^= 1
    keep = {"truncated": len(content) // 2, "empty": 0}.get(damage, len(content))
    (newest / name).write_bytes(content[:keep])
    if damage == "missing":
        (newest / name).unlink()
    with pytest.raises(CheckpointError, match="step-00000006 cannot be used") as caught:
        fit(run, resume=True)
    assert "remove that folder" in str(caught.value)
    if damage == "flipped":
        assert f"{name} does not match its checksum" in str(caught.value)
    shutil.rmtree(newest)
    assert fit(run, resume=True).steps == STEPS  # the journal reaches back


def test_a_checkpoint_of_version_1_is_still_read(run):
    for folder in checkpoints(run):
        file = folder / "checkpoint.json"
        content = json.loads(file.read_text()) | {"version": 1}
        del content["seal"], content["ledger"]
        file.write_text(json.dumps(content))
    assert fit(run, resume=True).steps == STEPS


DAMAGES = ["empty", "torn", "foreign", "value flipped", "settings flipped"]


def damage_entry(run, step, damage):
    content = bytearray(entry(run, step).read_bytes())
    if damage == "foreign":
        content = entry(run, step - 1).read_bytes()
    elif damage == "value flipped":
        content[-2] ^= 0x40
    elif damage == "settings flipped":  # the learning rate that it was applied with
        place = content.index(b'\\"lr\\",') + 8
        content[place] = ord("9") if content[place] != ord("9") else ord("8")
    else:
        content = content[: {"empty": 0, "torn": 200}[damage]]
    entry(run, step).write_bytes(content)


def payments(run):
    record = read_ledger(run / "ledger.jsonl")
    return [(p.step, p.attempt) for p in record.payments()], record.notes()


ONCE = [(step, 0) for step in range(7)]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_release_that_others_follow_is_refused_by_name(run, damage):
    shutil.rmtree(checkpoints(run)[-1])  # back to step 4; 4, 5 and 6 in the journal
    damage_entry(run, 5, damage)
    with pytest.raises(CheckpointError, match=r"step-00000005\S* cannot be") as caught:
        fit(run, resume=True)
    assert "steps from 5 to 6, which were paid for" in str(caught.value)
    if "flipped" in damage:
        assert "not match" in str(caught.value)
    assert payments(run)[0] == ONCE, "nothing is spent without being asked"
    assert Journal(run / "journal").steps(6) == [6]
    entry(run, 5).unlink()  # the way out that the message names
    result = fit(run, resume=True)
    paid, notes = payments(run)
    assert paid == [*ONCE, (5, 1)]  # the budget ends here
    assert result.steps == 6 and result.finished
    assert "release of step 5 was missing or unreadable" in notes[-1]
    assert "steps from 5 to 6 are made and paid for again" in notes[-1]
    assert Journal(run / "journal").steps(6) == []  # the stale one is gone


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_last_release_is_made_and_paid_for_again(run, damage):
    damage_entry(run, 6, damage)
    result = fit(run, resume=True)
    paid, notes = payments(run)
    assert paid == [*ONCE, (6, 1)] and result.steps == 7
    assert "steps from 6 to 6 are made and paid for again" in notes[-1]


def rewritten(run, step, change):
    """The entry with other facts in its header."""
    values, facts = read_tensors(entry(run, step))
    change(facts)
    write_tensors(entry(run, step), values, facts)


def test_a_release_of_version_1_is_still_read(run):
    def without_checksums(facts):
        for name in ("version", "ledger", "values", "seal"):
            del facts[name]

    rewritten(run, 6, without_checksums)
    assert fit(run, resume=True).steps == STEPS


@pytest.mark.parametrize("name", ["version", "ledger", "values", "seal", "noise_std"])
def test_no_part_of_a_releases_header_can_go_missing(run, name):
    rewritten(run, 6, lambda facts: facts.pop(name))
    journal = Journal(run / "journal")
    assert journal.read(6) is None and journal.head(6) is None


def test_leftovers_of_a_killed_process_are_ignored_and_cleared(run):
    for place in (
        "checkpoints/.step-00000008.1.tmp",
        "checkpoints/.step-00000002.replaced",
    ):
        (run / place).mkdir()
        (run / place / "model.safetensors").touch()
    (run / "journal" / ".step-00000007.safetensors.1.tmp").touch()
    (run / ".ledger.jsonl.0123abcd.tmp").touch()
    shutil.move(checkpoints(run)[-1], run / "checkpoints" / ".step-00000006.replaced")
    (run / "checkpoints" / "step-00000002").mkdir(exist_ok=True)
    assert fit(run, resume=True).steps == STEPS
    assert list(run.rglob(".*")) == []
    assert [p.name for p in checkpoints(run)] == ["step-00000006", "step-00000008"]


def test_what_the_tensor_writer_left_behind_is_cleared(tmp_path):
    for name in (".tmpA1b2C3", ".step-00000004.safetensors.12.tmp"):
        (tmp_path / name).write_bytes(b"half")
    kept = tmp_path / "step-00000003.safetensors"
    kept.write_bytes(b"whole")
    clear_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [kept]
