"""SIGTERM and Ctrl-C in a process of their own: stop, resume, same bits."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from curvedp.accounting import read_ledger
from curvedp.experiments import load_trained

pytestmark = pytest.mark.fault

STEPS = 240
PATIENCE = 120.0


def start(*arguments, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", "import sys; from curvedp.cli import main; "
         "sys.exit(main())", *map(str, arguments)],
        cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def train_flags(blobs, run):
    return [
        "train", "--data", blobs, "-D", "num_classes=3", "--model", "logreg",
        "--noise-multiplier", 2, "--delta", "1e-3", "--batch-size", 45, "--epochs",
        STEPS // 2, "--seed", 1, "--unsafe-reproducible-noise", 5, "--device", "cpu",
        "--checkpoint-every", 50, "--run-dir", run, "--json",
    ]  # fmt: skip


def wait_for_payments(ledger: Path, count: int, process) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        if ledger.exists() and ledger.read_bytes().count(b"\n") > count:
            return
        time.sleep(0.001)


def stop_and_resume(blobs, folder, places):
    """Stop at every place by SIGTERM, then let it finish."""
    ledger = folder / "broken" / "ledger.jsonl"
    process = start(*train_flags(blobs, "broken"), folder=folder)
    for place in places:
        wait_for_payments(ledger, place, process)
        process.send_signal(signal.SIGTERM)
        _, message = process.communicate(timeout=PATIENCE)
        assert process.returncode == 143, message
        assert "curvedp resume broken" in message
        process = start("resume", "broken", "--json", folder=folder)
    output, message = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, message
    return output


def check_same_as_unbroken(blobs, folder):
    unbroken = start(*train_flags(blobs, "unbroken"), folder=folder)
    assert unbroken.wait(timeout=PATIENCE) == 0
    unbroken.communicate()
    one, other = (
        load_trained(folder / name).model.state_dict()
        for name in ("broken", "unbroken")
    )
    assert all(torch.equal(one[k], other[k]) for k in other)
    ledger = read_ledger(folder / "broken" / "ledger.jsonl")
    assert ledger.is_gapless()
    assert ledger.count() == STEPS


def test_stopped_by_sigterm_and_resumed_it_ends_with_the_same_bits(blobs, tmp_path):
    place = random.Random(1).randrange(5, 120)
    stop_and_resume(blobs, tmp_path, [place])
    check_same_as_unbroken(blobs, tmp_path)


@pytest.mark.slow
def test_stopped_ten_times_it_ends_with_the_same_bits(blobs, tmp_path):
    # apart by more than a step or two, which the signal may take to be noticed
    places = sorted(20 * k + random.Random(k).randrange(8) for k in range(10))
    stop_and_resume(blobs, tmp_path, places)
    check_same_as_unbroken(blobs, tmp_path)


def test_a_signal_before_the_first_step_leaves_a_run_to_resume(blobs, tmp_path):
    process = start(*train_flags(blobs, "run"), folder=tmp_path)
    while not (tmp_path / "run" / "run.json").exists() and process.poll() is None:
        time.sleep(0.0005)
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, message
    assert "curvedp resume run" in message
    resumed = start("resume", "run", folder=tmp_path)
    output, message = resumed.communicate(timeout=PATIENCE)
    assert resumed.returncode == 0, message
    assert "NO PRIVACY GUARANTEE" in output
