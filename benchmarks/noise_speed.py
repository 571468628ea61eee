"""Secure noise beside the default: time of adding it to a sum, in one run.

    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/noise_speed.py \
        > benchmarks/results/noise_speed.json

The two are timed in turns, so that both see the same machine. On a machine with a GPU
the same is done for a sum that lies there: the default draws on the GPU, secure noise
is drawn on the CPU and copied.
"""

from __future__ import annotations

import json
import platform
import sys
import time

import torch

from curvedp.barrier import IDENTITY_FRAME, ClippedSum
from curvedp.noise import GaussianMechanism, NoiseState, RandomStreams, SecureStreams

SIZES = (26_010, 1_000_000, 10_000_000)
#: The fastest counts: what is slower was disturbed.
REPEATS = 21


def clock():
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(streams, value, step):
    mechanism = GaussianMechanism(1.0, 1.0)
    clipped = ClippedSum({"w": value}, 1.0, IDENTITY_FRAME, step)
    start = clock()
    mechanism.update(clipped, NoiseState(streams))
    return clock() - start


def row(size, device):
    value = torch.zeros(size, device=device)
    default, secure = RandomStreams(0), SecureStreams(0)
    times = [
        (seconds(default, value, step), seconds(secure, value, step))
        for step in range(REPEATS + 1)
    ][1:]  # the first warms up
    ours, theirs = (min(column) for column in zip(*times, strict=True))
    return {
        "device": device,
        "coordinates": size,
        "default_ms": 1e3 * ours,
        "secure_ms": 1e3 * theirs,
        "secure_million_a_second": size / theirs / 1e6,
        "ratio": theirs / ours,
    }


def main():
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    rows = [row(size, device) for device in devices for size in SIZES]
    for line in rows:
        print(json.dumps(line), file=sys.stderr)
    result = {
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "rows": rows,
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
