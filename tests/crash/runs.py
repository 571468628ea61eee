"""Starting, watching and judging runs in processes of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import curvedp
from curvedp.accounting import get_accountant, read_ledger, repeated

CHILD = Path(__file__).with_name("child.py")
PATIENCE = 120.0


def start(folder, *arguments, **options):
    # the code under test, also where PYTHONPATH names it by a relative path
    source = str(Path(curvedp.__file__).parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    return subprocess.Popen(
        [sys.executable, str(CHILD), json.dumps(options), *map(str, arguments)],
        cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def end(process):
    """Wait for the end; exit code, output and messages."""
    output, message = process.communicate(timeout=PATIENCE)
    return process.returncode, output, message


def kill(process):
    """As kill -9 does; whether it still ran."""
    process.send_signal(signal.SIGKILL)
    return end(process)[0] == -signal.SIGKILL


def train_flags(blobs, steps, every=7):
    return [
        "train", "--data", blobs, "-D", "num_classes=3", "--model", "logreg",
        "--noise-multiplier", 2, "--delta", "1e-3", "--batch-size", 45, "--epochs",
        steps // 2, "--seed", 1, "--unsafe-reproducible-noise", 5, "--device", "cpu",
        "--checkpoint-every", every, "--run-dir", "run", "--json",
    ]  # fmt: skip


def wait_for(condition, process):
    """Until it holds or the process has ended."""
    deadline = time.monotonic() + PATIENCE
    while not condition() and process.poll() is None:
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.0005)


def lines_in(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def stamp(path):
    return path.stat().st_mtime_ns if path.exists() else 0


def check_account(folder, steps, kills=0):
    """What must hold however often the run was killed."""
    record = read_ledger(folder / "run" / "ledger.jsonl")  # checks seq and chain
    assert record.chained and record.torn is None
    assert record.is_gapless()
    assert record.count() <= steps
    paid = [(p.step, p.attempt) for p in record.payments()]
    assert len(set(paid)) == len(paid)
    again = sum(attempt > 0 for _, attempt in paid)
    assert again <= kills, "more than the step in flight was paid for again"
    draws = folder / "draws"
    lines = [json.loads(line) for line in draws.read_text().splitlines()]
    drawn = Counter((step, attempt) for _, step, attempt in lines)
    assert max(drawn.values()) == 1, "the same noise was drawn twice"
    assert set(drawn) <= set(paid), "noise was drawn that nobody paid for"
    assert len(paid) - len(drawn) <= kills
    check_epsilon(record, len(drawn), steps)
    return record, lines, again


def check_epsilon(record, drawn, steps):
    """The figure covers all that was drawn, and is inside the planned one."""

    def epsilon(count):
        event = repeated(record.payments()[0].event, count)
        return rdp.epsilon(event, record.header.relation, record.header.delta)

    rdp = get_accountant("rdp")  # quick, and monotone in the number of steps
    assert record.header.planned_steps == steps
    assert 0 < epsilon(drawn) <= record.epsilon(rdp) <= epsilon(steps)


def check_tidy(run):
    """Nothing is left of what a killed process was writing."""
    assert list(run.rglob(".*")) == []
