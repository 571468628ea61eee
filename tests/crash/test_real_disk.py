"""A disk that is really full and a folder that is really read-only, nothing patched.

The small disk is mounted in a name space of its own, which needs no rights; root, whom
no permission stops, gives them up in another. Where there are none, tests are skipped.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import curvedp
from curvedp.accounting import read_ledger
from tests.crash.runs import end, lines_in, train_flags, wait_for

pytestmark = pytest.mark.fault

STEPS = 400
PLAIN_USER = ["unshare", "--user"] if os.geteuid() == 0 else []
OWN_DISKS = ["unshare", "--user", "--map-root-user", "--mount"]
CURVEDP = [
    sys.executable, "-c", "import sys; from curvedp.cli import main; sys.exit(main())",
]  # fmt: skip


def start(folder, prefix, *arguments):
    source = str(Path(curvedp.__file__).parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    return subprocess.Popen(
        [*prefix, *map(str, arguments)], cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def need(folder, prefix, *arguments):
    """Skip where the system does not offer this."""
    if prefix and shutil.which(prefix[0]) is None:
        pytest.skip(f"there is no {prefix[0]} on this system")
    code, _, message = end(start(folder, prefix, *arguments))
    if code:
        pytest.skip(f"not possible here: {message.strip()}")


def check_stopped(ended, run, words):
    code, output, message = ended
    assert code == 2 and output == "", message
    assert "Traceback" not in message
    message = " ".join(message.split())
    for word in (*words, "curvedp resume run"):
        assert word in message, message
    record = read_ledger(run / "ledger.jsonl")
    assert 0 < record.count() < STEPS
    return record.count()


def check_finished(ended, run):
    code, output, message = ended
    assert code == 0, message
    assert json.loads(output)["finished"]
    record = read_ledger(run / "ledger.jsonl")
    assert record.count() == STEPS and record.is_gapless()
    again = sum(p.attempt > 0 for p in record.payments())
    assert again <= 1, "more than the step in flight was paid for again"
    assert list(run.rglob(".*")) == []


FILLS_UP = """
mount -t tmpfs -o size=240k disk disk && cd disk || exit 90
head -c 150000 /dev/zero >ballast
{train} >../out.1 2>../err.1
echo $? >../code.1
cp -r run ../stopped
rm ballast
{resume} >../out.2 2>../err.2
echo $? >../code.2
cp -r run ../finished
"""


def test_a_disk_that_fills_up(blobs, tmp_path):
    (tmp_path / "disk").mkdir()
    need(tmp_path, OWN_DISKS, "mount", "-t", "tmpfs", "-o", "size=64k", "disk", "disk")

    def line(*words):
        return " ".join(f"'{word}'" for word in (*CURVEDP, *words))

    script = FILLS_UP.format(
        train=line(*train_flags(blobs, STEPS)), resume=line("resume", "run", "--json")
    )
    code, _, message = end(start(tmp_path, OWN_DISKS, "sh", "-c", script))
    assert code == 0, message

    def ended(number):
        out, err, code = (
            (tmp_path / f"{name}.{number}").read_text()
            for name in ("out", "err", "code")
        )
        return int(code), out, err

    words = ["No space left on device", "free some space"]
    check_stopped(ended(1), tmp_path / "stopped", words)
    check_finished(ended(2), tmp_path / "finished")


@pytest.mark.parametrize(
    "which", ["journal", pytest.param("checkpoints", marks=pytest.mark.slow)]
)
def test_a_folder_that_turns_read_only(blobs, tmp_path, which):
    need(tmp_path, PLAIN_USER, sys.executable, "-c", "")
    run = tmp_path / "run"
    train = start(tmp_path, PLAIN_USER, *CURVEDP, *train_flags(blobs, STEPS))
    wait_for(lambda: lines_in(run / "ledger.jsonl") > 20, train)
    (run / which).chmod(0o555)
    paid = check_stopped(end(train), run, [f"run/{which}", "Permission denied"])
    assert paid >= 20

    resume = (PLAIN_USER, *CURVEDP, "resume", "run", "--json")
    run.chmod(0o555)
    still = check_stopped(end(start(tmp_path, *resume)), run, ["Permission denied"])
    assert still == paid, "nothing can be paid where nothing can be written"

    for folder in (run, run / which):
        folder.chmod(0o755)
    check_finished(end(start(tmp_path, *resume)), run)
