"""The largest batch that goes through at once within a limit of memory.

On a GPU torch's allocator is held to the limit, and a batch fits if attaching and two
steps go through. On a CPU it fits if the peak of a process of its own stays within it.
Peaks of two small batches give a first guess, and bisection does the rest, until what
fits and what does not are within 3 % of each other. Every probe is kept in the result,
so that a search that was broken off is gone on with.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import torch

from cost.contestants import (
    CONTESTANTS,
    PARTS,
    Refused,
    attach,
    check,
    is_opacus,
    is_out_of_memory,
)
from cost.measuring import MEMORY_STEPS, MIB, free, peak, reset_peak, run_child

__all__ = ["contestants_of", "find_largest"]

CLOSE = 1.03
FIRST = {"cpu": 8, "cuda": 32}
MOST = 2**17


def contestants_of(device):
    """All that take a batch as a whole."""
    whole = [name for name in CONTESTANTS[device] if not name.endswith(" 64")]
    return [name for name in whole if name != PARTS]


def find_largest(net, name, device, limit_mib, row, keep, script):
    """Fill ``row`` and ``keep`` it; its ``probes``: rows to MiB, None for too much."""
    if "rows" in row or "refused" in row:
        return
    if "probes" not in row:
        try:
            check(net, name, device)
        except Refused as why:
            row["refused"] = str(why)
            keep()
            return
        row["probes"] = {}
    probes = row["probes"]

    def fits(rows):
        key = str(rows)
        if key not in probes:
            probes[key] = _probe(replace(net, batch=rows), name, device, script)
            keep()
        return probes[key] is not None and probes[key] <= limit_mib

    if device == "cuda":
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(limit_mib * MIB / whole)
    row["rows"] = _search(fits, probes, FIRST[device], limit_mib)
    keep()


def _search(fits, probes, first, limit_mib):
    low, high = 0, None
    if fits(first):
        low = first
    else:
        high = first
    if high is None and fits(2 * first):
        low = 2 * first
        small, large = probes[str(first)], probes[str(2 * first)]
        each = max((large - small) / first, 1e-6)
        guess = min(MOST, int((limit_mib - small) / each) + first)
        # a little below and above the guess: mostly that is the answer
        for rows in (int(0.98 * guess), int(1.02 * guess)):
            if low < rows and (high is None or rows < high):
                low, high = (rows, high) if fits(rows) else (low, rows)
    elif high is None:
        high = 2 * first
    while high is None and low < MOST:
        low, high = (2 * low, None) if fits(2 * low) else (low, 2 * low)
    while high is not None and high > low + 1 and high > CLOSE * low:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _probe(net, name, device, script):
    """Peak in MiB, or None where it does not go through."""
    if device == "cpu":
        try:
            return run_child(script, net, name)[1]
        except subprocess.CalledProcessError as error:
            print(error.stderr[-500:], file=sys.stderr)
            return None
    contestant = None
    try:
        x, y = net.data(device)
        model = net.model(for_opacus=is_opacus(name)).to(device)
        reset_peak(device)
        contestant = attach(name, model, x, y)
        for _ in range(MEMORY_STEPS):
            contestant.step()
        return peak(device) / MIB
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None
    finally:
        del contestant
        x = y = model = None
        free()
