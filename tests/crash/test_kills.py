"""kill -9 at random moments: nothing is drawn twice, nothing goes unpaid."""

import json
import random
import time

import pytest

from curvedp.accounting import Ledger
from tests.crash.runs import (
    check_account,
    check_tidy,
    end,
    kill,
    lines_in,
    stamp,
    start,
    train_flags,
    wait_for,
)

pytestmark = pytest.mark.fault


def moment(chance, run, process):
    """Wait for a random moment: at the start of a sitting, or between its steps."""
    ledger, settings = run / "ledger.jsonl", run / "run.json"
    if chance.random() < 0.3:
        before = stamp(settings)
        wait_for(lambda: stamp(settings) != before, process)
        time.sleep(chance.uniform(0, 0.3))
    else:
        lines = lines_in(ledger) + chance.randrange(1, 6)
        wait_for(lambda: lines_in(ledger) >= max(lines, 2), process)
        time.sleep(chance.uniform(0, 0.01))


def killed_run(blobs, folder, kills, steps, seed):
    chance = random.Random(seed)
    run, draws = folder / "run", str(folder / "draws")
    done, began = 0, time.monotonic()
    process = start(folder, *train_flags(blobs, steps), draws=draws)
    wait_for((run / "run.json").exists, process)
    while done < kills:
        moment(chance, run, process)
        assert kill(process), "the run ended before it could be killed"
        done += 1
        process = start(folder, "resume", "run", "--json", draws=draws)
    code, output, message = end(process)
    assert code == 0, message
    result = json.loads(output)
    assert result["finished"] and (run / "result.json").exists()
    record, lines, again = check_account(folder, steps, kills)
    assert record.count() == steps  # all of the budget was used
    assert result["steps"] == steps - again
    assert len({pid for pid, *_ in lines}) > 1  # several processes drew
    check_tidy(run)
    Ledger.open(run / "ledger.jsonl").close()  # no lock was left behind
    seconds = time.monotonic() - began
    print(f"{kills} kills: {again} steps paid again, {len(lines)} draws of noise for "
          f"{record.count()} payments, {seconds:.0f} s")  # fmt: skip


def test_killed_four_times_the_account_is_right(blobs, tmp_path):
    killed_run(blobs, tmp_path, kills=4, steps=240, seed=2)


@pytest.mark.slow
def test_killed_fifty_times_the_account_is_right(blobs, tmp_path):
    killed_run(blobs, tmp_path, kills=50, steps=1200, seed=3)


def test_a_second_resume_is_refused_while_the_first_runs(blobs, tmp_path):
    draws = str(tmp_path / "draws")
    first = start(tmp_path, *train_flags(blobs, 4000), draws=draws)
    ledger = tmp_path / "run" / "ledger.jsonl"
    wait_for(lambda: lines_in(ledger) > 2, first)
    assert kill(first)
    two = [start(tmp_path, "resume", "run", draws=draws) for _ in range(2)]
    wait_for(lambda: two[0].poll() is not None, two[1])
    loser, winner = sorted(two, key=lambda p: p.poll() is None)
    code, _, message = end(loser)
    assert code == 2
    assert "run is in use by another run" in message
    assert "wait until it ends" in message
    assert winner.poll() is None, "the other one goes on"
    assert kill(winner)
    check_account(tmp_path, 4000, kills=2)
