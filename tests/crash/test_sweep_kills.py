"""kill -9 on sweeps, and two workers on one study: no trial is lost or made twice."""

import json
import random
import re
import time

import pytest

from curvedp.accounting import read_ledger
from tests.crash.runs import check_tidy, end, kill, lines_in, start, wait_for

pytestmark = pytest.mark.fault

STEPS = 100


def sweep_flags(blobs, trials, *more):
    return [
        "sweep", "--data", blobs, "-D", "num_classes=3", "--model", "logreg",
        "--noise-multiplier", 2, "--delta", "1e-3", "--batch-size", 30, "--epochs",
        STEPS // 2, "--seed", 1, "--device", "cpu", "--validation", 0.3,
        "--validation-is-public", "--trials", trials, "--run-dir", "sweep", "--json",
        *more,
    ]  # fmt: skip


def ledgers(folder):
    return sorted((folder / "sweep" / "trials").glob("trial-*/ledger.jsonl"))


def payments(folder):
    return sum(map(lines_in, ledgers(folder)))


def check_trials(folder, trials, kills=0):
    """Every trial is there once, finished, and paid for within its budget."""
    numbers = [path.parent.name for path in ledgers(folder)]
    assert numbers == [f"trial-{k:05d}" for k in range(trials)]
    again = 0
    for path in ledgers(folder):
        record = read_ledger(path)
        assert record.is_gapless() and record.count() == record.header.planned_steps
        again += sum(p.attempt > 0 for p in record.payments())
        assert json.loads((path.parent / "result.json").read_text())["finished"]
        check_tidy(path.parent)
    assert again <= kills, "more than the steps in flight were paid for again"
    check_tidy(folder / "sweep")


def trained(messages):
    """Trials that a worker said it trains."""
    return [int(number) for number in re.findall(r"training trial (\d+)", messages)]


def test_a_killed_sweep_goes_on_where_it_was(blobs, tmp_path):
    chance, trials, kills = random.Random(4), 3, 4
    process = start(tmp_path, *sweep_flags(blobs, trials))
    wait_for((tmp_path / "sweep" / "run.json").exists, process)
    messages = ""
    for _ in range(kills):
        if chance.random() < 0.3:
            time.sleep(chance.uniform(0, 2.5))  # also before the first step
        else:
            before = payments(tmp_path) + chance.randrange(5, 60)
            wait_for(lambda: payments(tmp_path) >= before, process)  # noqa: B023
        assert kill(process), "the sweep ended before it could be killed"
        process = start(tmp_path, "resume", "sweep", "--json")
    code, output, messages = end(process)
    assert code == 0, messages
    document = json.loads(output)
    assert sorted(t["trial"] for t in document["trials"]) == list(range(trials))
    assert all(t["state"] == "finished" for t in document["trials"])
    check_trials(tmp_path, trials, kills)


def test_two_workers_share_the_trials(blobs, tmp_path):
    trials = 6
    flags = sweep_flags(blobs, trials)
    at = flags.index("--seed")
    del flags[at : at + 2]  # they have to agree on one
    two = [start(tmp_path, *flags) for _ in range(2)]
    ended = [end(process) for process in two]
    assert [code for code, _, _ in ended] == [0, 0], ended
    one, other = (trained(messages) for _, _, messages in ended)
    assert one and other, "one of them did everything"
    assert sorted(one + other) == list(range(trials)), "a trial was lost or repeated"
    first, second = (json.loads(output) for _, output, _ in ended)
    assert first == second
    check_trials(tmp_path, trials)


@pytest.mark.slow
def test_the_other_worker_takes_over_from_one_that_was_killed(blobs, tmp_path):
    trials = 4
    one = start(tmp_path, *sweep_flags(blobs, trials))
    wait_for(lambda: payments(tmp_path) > 20, one)
    two = start(tmp_path, *sweep_flags(blobs, trials))
    wait_for(lambda: len(ledgers(tmp_path)) > 1, two)
    assert kill(one)
    code, output, messages = end(two)
    assert code == 0, messages
    assert len(json.loads(output)["trials"]) == trials
    check_trials(tmp_path, trials, kills=1)


@pytest.mark.slow
def test_a_counted_sweep_that_is_killed_pays_once_for_all(blobs, tmp_path):
    flags = sweep_flags(blobs, 3, "--count-tuning", "--repeats", "geometric")
    process = start(tmp_path, *flags)
    wait_for((tmp_path / "sweep" / "ledger.jsonl").exists, process)
    killed = process.poll() is None and kill(process)
    paid = (tmp_path / "sweep" / "ledger.jsonl").read_bytes()
    code, output, messages = end(start(tmp_path, "resume", "sweep", "--json"))
    assert code == 0, messages
    assert killed, "the sweep ended before it could be killed"
    document = json.loads(output)
    record = read_ledger(tmp_path / "sweep" / "ledger.jsonl")
    assert (tmp_path / "sweep" / "ledger.jsonl").read_bytes().startswith(paid)
    assert record.count() == 1 and record.epsilon() == document["epsilon"]
    assert "trial-" not in output and "trial 0" not in messages
    check_trials(tmp_path, len(ledgers(tmp_path)), kills=1)
