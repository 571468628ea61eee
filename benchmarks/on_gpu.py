"""Every figure that needs a GPU, in one command that can be stopped and gone on with.

    python benchmarks/on_gpu.py --seconds 540 --copy-to folder

Runs the other scripts one after the other, what matters most first, and begins none
for which too little time is left. The long ones keep what they have measured and, on
the same kind of machine, go on from there; for the others, ``--only`` says what is
still to be run. On a machine that has torch, numpy and scipy alone, put Opacus and
opt_einsum as package folders into ``benchmarks/carried`` (``docs/performance.md``).
Results are the files in ``benchmarks/results``; ``--copy-to`` gathers those that were
written, for a machine that is given back.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

BENCHMARKS = Path(__file__).parent
RESULTS = BENCHMARKS / "results"


@dataclass(frozen=True)
class Job:
    """A script with its arguments.

    Attributes:
        script: in this folder.
        arguments: of its command line.
        writes: the file that its output goes to; None if it writes its own.
        limited: whether it takes ``--seconds`` and leaves the rest for the next time.
        needs: seconds that must be left to begin it.
    """

    script: str
    arguments: tuple[str, ...] = ()
    writes: str | None = None
    limited: bool = False
    needs: float = 60.0

    @property
    def name(self) -> str:
        return " ".join((self.script, *self.arguments))


def step_cost(*nets, needs=90.0):
    return Job(
        "step_cost.py", ("--device", "cuda", "--nets", *nets), limited=True, needs=needs
    )


JOBS = (
    step_cost("wrn-16-4", "vit-6x384", needs=150.0),
    Job("graph_check.py", writes="graph_check.json", needs=90.0),
    Job(
        "step_cost.py",
        ("--device", "cuda", "--largest-batch", "8", "--nets", "wrn-16-4", "vit-6x384"),
        needs=120.0,
    ),
    step_cost("dpkfc-mnist", "resnet-20", "lstm"),
    Job("modes_check.py", ("--nets", "dpkfc-mnist", "wrn-16-4"), "modes_cuda.json"),
    Job("scaling.py", ("--device", "cuda")),
    step_cost("vit-b", "bert-base", needs=150.0),
    Job("gpu_check.py", writes="gpu_check.json"),
)


def environment():
    """The package and what is carried, found by every script."""
    found = [str(BENCHMARKS.parent / "src"), str(BENCHMARKS / "carried")]
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([*found, *([before] if before else [])])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def run(job, left):
    """Run a job within the time that is left; whether it came to its end."""
    if left < job.needs:
        print(f"left for the next time: {job.name}", flush=True)
        return False
    limit = ("--seconds", f"{left - job.needs:.0f}") if job.limited else ()
    command = [sys.executable, str(BENCHMARKS / job.script), *job.arguments, *limit]
    print(f"{job.name}, {left:.0f} s left", flush=True)
    try:
        done = subprocess.run(
            command,
            env=environment(),
            stdout=subprocess.PIPE,
            timeout=left,
            check=False,
        )
    except subprocess.TimeoutExpired:
        print(f"stopped: {job.name}", flush=True)
        return False
    if done.returncode:
        print(f"failed with {done.returncode}: {job.name}", flush=True)
    elif job.writes is not None:
        (RESULTS / job.writes).write_bytes(done.stdout)
    return not done.returncode


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1e6, help="for all of them")
    parser.add_argument("--copy-to", type=Path, help="folder for what was written")
    parser.add_argument("--only", nargs="*", help="scripts, by name without .py")
    asked = parser.parse_args()
    begun, began_at = time.perf_counter(), time.time()
    complete = True
    for job in JOBS:
        if asked.only and job.script.removesuffix(".py") not in asked.only:
            continue
        left = asked.seconds - (time.perf_counter() - begun)
        complete &= run(job, left)
        if asked.copy_to is not None:
            asked.copy_to.mkdir(parents=True, exist_ok=True)
            for path in RESULTS.iterdir():
                if path.stat().st_mtime >= began_at:
                    shutil.copy(path, asked.copy_to / path.name)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
