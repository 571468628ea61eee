"""Seconds and MiB of every contestant on one net."""

from __future__ import annotations

import copy
import ctypes
import gc
import statistics
import subprocess
import sys
from pathlib import Path

import torch

from cost.contestants import (
    CONTESTANTS,
    OUR_WAYS,
    OURS,
    PLAIN,
    WHITENED,
    Refused,
    attach,
    check,
    is_opacus,
    is_out_of_memory,
    opacus_version,
    reason,
)

__all__ = [
    "MEMORY_STEPS",
    "MIB",
    "REFRESH_EVERY",
    "child",
    "free",
    "measure",
    "peak",
    "ratios",
    "reset_peak",
    "run_child",
]

WARM_UP, MEMORY_STEPS, MEMORY_RUNS = 3, 2, 2
BLOCKS = 4
#: Steps between two estimates of curvature, by default of the recipe.
REFRESH_EVERY = 100
#: Of a GPU's memory that all contestants together may take to be timed in turns.
SHARE = 0.7
MIB = 2**20


def measure(net, device, repeats, precision, script):
    """One row of the result."""
    field = _Field(net, device, precision)
    if device == "cuda":
        field.measure_memory()
    else:
        field.measure_memory_apart(script)
    order, seconds = _times(field, repeats)
    return {
        "net": net.name,
        "parameters": sum(p.numel() for p in net.model().parameters()),
        "input_shape": net.shape,
        "batch": net.batch,
        "precision": precision,
        "contestants": list(CONTESTANTS[device]),
        "order": order,
        "refused": field.refused,
        "seconds": seconds,
        "peak_mib": field.peaks,
        "refresh_seconds": field.refresh_seconds,
        "refresh_peak_mib": field.refresh_peak,
        "guard_seconds": field.guard_seconds(repeats),
        **summary(seconds, field.peaks, field.refresh_seconds),
    }


class _Field:
    """All contestants on a net that are still in the race, attached."""

    def __init__(self, net, device, precision):
        self.net, self.device, self.precision = net, device, precision
        self.attached, self.refused, self.peaks = {}, {}, {}
        self.refresh_seconds = self.refresh_peak = None
        for name in CONTESTANTS[device]:
            try:
                check(net, name, device)
                self.attached[name] = None
            except Refused as why:
                self.refused[name] = str(why)
            free()

    def attach(self, name):
        """Attach, and estimate curvature where the contestant does; it may fail."""
        x, y = self.net.data(self.device)
        model = self.net.model(for_opacus=is_opacus(name)).to(self.device)
        start = reset_peak(self.device)
        contestant = attach(name, model, x, y, self.precision)
        if contestant.refresh is not None:
            if self.device == "cuda":  # loads libraries, which no later one does
                contestant.refresh()
            self.refresh_seconds = contestant.refresh()
            self.refresh_peak = (peak(self.device) - start) / MIB
        return contestant, start

    def guard_seconds(self, repeats):
        """What a pass takes for looking over the model, by our plain step's."""
        ours = self.attached.get(OURS)
        if ours is None:
            return None
        return statistics.median(ours.guard() for _ in range(WARM_UP + repeats))

    def drop(self, name, error):
        self.attached.pop(name, None)
        self.peaks.pop(name, None)
        self.refused[name] = reason(error)

    def measure_memory(self):
        """On a GPU: the allocator's peak over two steps, for one after the other."""
        for name in list(self.attached):
            try:
                contestant, start = self.attach(name)
                reset_peak(self.device)
                for _ in range(MEMORY_STEPS):
                    contestant.step()
                self.peaks[name] = [(peak(self.device) - start) / MIB]
                contestant.rest()
                self.attached[name] = contestant
            except Exception as error:
                self.drop(name, error)
            contestant = None
            free()

    def measure_memory_apart(self, script):
        """On a CPU: what the system says about a process for each contestant."""
        for name in list(self.attached):
            runs = [run_child(script, self.net, name) for _ in range(MEMORY_RUNS)]
            self.peaks[name] = [steps for _, steps in runs]
            self.attached[name], _ = self.attach(name)
            if name == WHITENED:
                self.refresh_peak = statistics.median(refresh for refresh, _ in runs)


def _times(field, repeats):
    """In turns if all fit into memory together, else each a block at a time."""
    if field.device == "cuda":
        needed = sum(values[0] for values in field.peaks.values())
        if needed * MIB > SHARE * torch.cuda.get_device_properties(0).total_memory:
            return "blocks", _in_blocks(field, repeats)
    try:
        return "in turns", _in_turns(field, repeats)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    free()
    return "blocks", _in_blocks(field, repeats)


def _in_turns(field, repeats):
    names = list(field.attached)
    seconds = {name: [] for name in names}
    for number in range(WARM_UP + repeats):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            seconds[name].append(field.attached[name].step())
            field.attached[name].rest()
    return {name: values[WARM_UP:] for name, values in seconds.items()}


def _in_blocks(field, repeats):
    seconds = {name: [] for name in field.attached}
    each = -(-repeats // BLOCKS)
    for number in range(BLOCKS):
        names = list(field.attached)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            try:
                block = [field.attached[name].step() for _ in range(WARM_UP + each)]
                seconds[name] += block[WARM_UP:]
                field.attached[name].rest()
            except Exception as error:
                field.drop(name, error)
                seconds.pop(name)
            free()
    return seconds


def free():
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# -- memory ----------------------------------------------------------------------------


def run_child(script, net, name):
    command = [sys.executable, script, "--child", net.name, name]
    command += ["--batch", str(net.batch)]
    command += ["--threads", str(torch.get_num_threads())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [float(word) for word in done.stdout.split()[-2:]]


def child(net, name):
    """Print two peaks in MiB: up to the first step, and of the steps."""
    opacus_version()  # in every child, so that imports weigh the same
    x, y = net.data("cpu")
    model = net.model(for_opacus=is_opacus(name))
    attach(PLAIN, copy.deepcopy(model), x[:1], y[:1]).step()
    start = reset_peak("cpu")
    contestant = attach(name, model, x, y)
    if contestant.refresh is not None:
        contestant.refresh()
    before = peak("cpu") - start
    if contestant.refresh is not None:
        reset_peak("cpu")  # curvature is estimated now and then; attaching is not
    for _ in range(MEMORY_STEPS):
        contestant.step()
    print(before / MIB, (peak("cpu") - start) / MIB)


def reset_peak(device):
    """Forget earlier peaks; what is in use now, in bytes."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return peak(device)


def peak(device):
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("there is no VmHWM here; memory is measured on Linux only")


# -- summary ---------------------------------------------------------------------------


def summary(seconds, memory, refresh):
    """Medians; ours against the best mode of Opacus, whitened against ours."""
    median = {name: statistics.median(values) for name, values in seconds.items()}
    peaks = {name: statistics.median(memory[name]) for name in seconds}
    found = {"median_seconds": median, "median_peak_mib": peaks}
    rivals = [name for name in median if is_opacus(name)]
    if rivals:
        found["fastest_mode"] = min(rivals, key=median.__getitem__)
        found["leanest_mode"] = min(rivals, key=peaks.__getitem__)
    for ours in OUR_WAYS:
        if ours not in median:
            continue
        found[ours] = {}
        if PLAIN in median:
            found[ours]["time_over_non_private"] = ratios(seconds, ours, PLAIN)[1]
        if rivals:
            fastest, leanest = found["fastest_mode"], found["leanest_mode"]
            low, middle, high = ratios(seconds, ours, fastest)
            found[ours] |= {
                "time_over_fastest_mode": middle,
                "time_quartiles": [low, middle, high],
                "memory_over_fastest_mode": peaks[ours] / peaks[fastest],
                "memory_over_leanest_mode": peaks[ours] / peaks[leanest],
            }
    for kind in ("", " graph"):
        ours, whitened = f"{OURS}{kind}", f"{WHITENED}{kind}"
        if ours not in median or whitened not in median:
            continue
        low, middle, high = ratios(seconds, whitened, ours)
        found[f"whitened_over_ours{kind}"] = {
            "time": middle,
            "time_quartiles": [low, middle, high],
            "time_with_refresh": middle + refresh / REFRESH_EVERY / median[ours],
            "memory": peaks[whitened] / peaks[ours],
        }
        if rivals:
            over = found[whitened]["time_over_fastest_mode"]
            share = refresh / REFRESH_EVERY / median[found["fastest_mode"]]
            found[f"whitened_over_fastest_mode{kind}"] = {
                "time": over,
                "time_with_refresh": over + share,
                "memory": found[whitened]["memory_over_fastest_mode"],
            }
    return found


def ratios(seconds, one, other):
    """Quartiles of the ratio within a round."""
    pairs = zip(seconds[one], seconds[other], strict=True)
    return statistics.quantiles([a / b for a, b in pairs], n=4)
