"""Designs of correlated noise: error and time, beside those of jax-privacy.

    python benchmarks/noise_design.py --jax-python PATH

PATH is the Python of an environment with jax-privacy; without it, only our own designs
are timed. jax-privacy's L-BFGS ends by default as soon as a projected gradient is
small, which is too early for some workloads. Here it also goes on until fifty steps
gain less than 1e-6, so that what is compared is what it can find; both are given.

Errors are ``tr(W X^-1)`` with columns of norm 1, computed alike for both in float64.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from curvedp.noise.strategies import (
    Momentum,
    NoiseCurve,
    PrefixSums,
    optimise_banded,
    optimise_toeplitz,
)

RESULTS = Path(__file__).parent / "results" / "noise_design.json"
SPECTRUM = NoiseCurve.of(1.0 / np.arange(1, 301) ** 0.9, 0.5)

#: Workload, steps, bands: designed by both.
CASES = {
    "prefix, 200 steps": (PrefixSums(), 200, 10),
    "momentum 0.9, 200 steps": (Momentum(0.9), 200, 10),
    "noise curve, 200 steps": (SPECTRUM, 200, 10),
    "prefix, 1000 steps": (PrefixSums(), 1000, 20),
}
#: Ours alone: the times that are promised on two cores.
TIMED = {
    "banded, 2000 steps, 20 bands": lambda: optimise_banded(PrefixSums(), 2000, 20),
    "toeplitz, 10000 steps, 50 bands": lambda: optimise_toeplitz(
        PrefixSums(), 10_000, 50
    ),
}

#: Runs in the other environment: from A and bands to C and the times.
RIVAL = """
import sys, time
import numpy as np
import jax
from jax_privacy.matrix_factorization import dense

given = np.load(sys.argv[1])
root, bands, limit = given["root"], int(given["bands"]), float(given["limit"])
n = root.shape[1]
with jax.enable_x64():
    A = jax.numpy.asarray(root, dtype=jax.numpy.float64)
    started = time.monotonic()
    early = np.asarray(dense.optimize(n, bands=bands, equal_norm=True, A=A))
    early_seconds = time.monotonic() - started
    losses, ended = [], []
    started = time.monotonic()

    def stop(info):
        losses.append(float(info.loss))
        if time.monotonic() - started > limit:
            ended.append("time")
        elif len(losses) > 50 and losses[-51] - losses[-1] < 1e-6 * losses[-1]:
            ended.append("converged")
        return bool(ended)

    found = np.asarray(
        dense.optimize(n, bands=bands, equal_norm=True, A=A, callback=stop)
    )
    seconds = time.monotonic() - started
np.savez(sys.argv[2], early=early, early_seconds=early_seconds, found=found,
         seconds=seconds, steps=len(losses), converged="converged" in ended)
"""


def error(workload, c):
    """``tr(W X^-1)``, with the longest column scaled to norm 1."""
    c = c / np.linalg.norm(c, axis=0).max()
    return float(np.square(workload.root(len(c)) @ np.linalg.inv(c)).sum())


def rival(python, workload, steps, bands, limit):
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder) / "given.npz", Path(folder) / "found.npz"
        root = workload.root(steps)
        np.savez(given, root=root, bands=bands, limit=limit)
        subprocess.run([python, "-c", RIVAL, given, found], check=True)
        with np.load(found) as stored:
            return {name: stored[name] for name in stored}


def compare(python, limit):
    rows = []
    for name, (workload, steps, bands) in CASES.items():
        started = time.monotonic()
        own = optimise_banded(workload, steps, bands)
        row = {
            "case": name,
            "steps": steps,
            "bands": bands,
            "error": error(workload, own.materialize()),
            "independent_noise": error(workload, np.eye(steps)),
            "seconds": round(time.monotonic() - started, 2),
        }
        if python:
            theirs = rival(python, workload, steps, bands, limit)
            best = error(workload, theirs["found"])
            row["jax_privacy"] = {
                "error": best,
                "seconds": round(float(theirs["seconds"]), 2),
                "iterations": int(theirs["steps"]),
                "converged": bool(theirs["converged"]),
                "error_at_its_own_stop": error(workload, theirs["early"]),
                "seconds_to_its_own_stop": round(float(theirs["early_seconds"]), 2),
            }
            row["error_by_theirs"] = row["error"] / best
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jax-python", help="Python that has jax-privacy")
    parser.add_argument("--limit", type=float, default=900, help="seconds per case")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    compared = compare(options.jax_python, options.limit)
    timed = []
    for name, work in TIMED.items():
        started = time.monotonic()
        work()
        timed.append({"design": name, "seconds": round(time.monotonic() - started, 2)})
        print(json.dumps(timed[-1]), flush=True)
    document = {
        "compared": compared,
        "timed": timed,
        "threads": int(os.environ.get("OMP_NUM_THREADS", "0")) or os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
    }
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
