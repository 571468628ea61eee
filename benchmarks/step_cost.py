"""Time and memory of one private step: curvedp, Opacus in all its modes, plain PyTorch.

    OMP_NUM_THREADS=1 python benchmarks/step_cost.py --write-docs

All contestants take the same batch through the same net: forward, backward, flat
clipping, noise, SGD. Fetching the batch is not timed. Steps are interleaved: each round
makes one step of every contestant, in an order that rotates, so that a slow moment of
the machine hits all of them. A ratio is the median of the ratios within a round.

"64" takes the batch in parts of 64 rows (what curvedp's loader does, and Opacus's
BatchMemoryManager); a step is all of them.

Memory is measured in a child process for each contestant: the largest resident size
(``VmHWM``; ``ru_maxrss`` would remember the parent's across ``exec``) after three steps
less that after imports, model, data and a plain step on one example, which makes torch
load what it loads at first use. Attaching is included, because a user pays for it too.
On CUDA it is the allocator's peak, likewise less what model and data take.

A mode of Opacus takes part if one step without noise moves every parameter as clipping
the gradients one example at a time does; otherwise the result says why not.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from curvedp import make_private, models

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- step_cost: begin -->", "<!-- step_cost: end -->"
CLIP, NOISE, RATE = 1.0, 1.0, 0.01
OURS, PARTS, PLAIN = "curvedp", "curvedp 64", "non-private"
#: A number at the end: in parts of so many rows.
MODES = ("hooks", "functorch", "ew", "ghost", "ghost 64")
CONTESTANTS = (OURS, PARTS, PLAIN, *(f"opacus {mode}" for mode in MODES))
MEMORY_STEPS, MEMORY_RUNS = 3, 2
WARM_UP = 3
MIB = 2**20


@dataclass(frozen=True)
class Net:
    """A model with the shape of its inputs and its batch size."""

    name: str
    shape: tuple[int, ...]
    batch: int

    def data(self):
        random = torch.Generator().manual_seed(1)
        if self.name == "lstm":
            x = torch.randint(0, 100, (self.batch, *self.shape), generator=random)
        else:
            x = torch.randn(self.batch, *self.shape, generator=random)
        return x, torch.randint(0, 10, (self.batch,), generator=random)

    def model(self, contestant):
        torch.manual_seed(0)
        if self.name != "lstm":
            return models.build(self.name, self.shape, 10)
        return Classifier(contestant.startswith("opacus"))


class Classifier(nn.Module):
    """Tokens, an LSTM, a head on its last output."""

    def __init__(self, opacus):
        super().__init__()
        if opacus:
            from opacus.layers import DPLSTM as LSTM
        else:
            from torch.nn import LSTM
        self.table = nn.Embedding(100, 32)
        self.lstm = LSTM(32, 64, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, ids):
        return self.head(self.lstm(self.table(ids))[0][:, -1])


NETS = {
    net.name: net
    for net in (
        Net("dpkfc-mnist", (1, 28, 28), 256),
        Net("lstm", (32,), 64),
        Net("vit", (3, 32, 32), 32),
        Net("wrn-16-4", (3, 32, 32), 16),
    )
}


class Refused(Exception):
    """A library does not take the net, or takes it and computes something else."""


# -- contestants -----------------------------------------------------------------------


def attach(contestant, model, x, y, steps):
    """A function that makes one step and says how long it took."""
    if contestant in (OURS, PARTS):
        rows = len(x) if contestant == OURS else int(PARTS.split()[1])
        return _ours(model, x, y, steps, min(rows, len(x)))
    if contestant == PLAIN:
        return _plain(model, x, y)
    return _opacus(contestant.removeprefix("opacus "), model, x, y, NOISE, RATE)


def _ours(model, x, y, steps, rows):
    private = make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=RATE),
        TensorDataset(x.cpu(), y.cpu()),
        loss="cross-entropy",
        clipping="flat",
        clip_norm=CLIP,
        noise_multiplier=NOISE,
        sample_rate=1.0,
        steps=steps,
        expected_batch_size=len(x),
        physical_batch_size=rows,
        allow_large_delta=True,
    )
    batches = iter(private.loader)

    def step():
        seconds, whole = 0.0, False
        while not whole:
            part, labels = (t.to(x.device) for t in next(batches))
            whole = private.batch_is_whole
            start = clock(x)
            private.optimizer.zero_grad()
            private.loss(private.model(part), labels).backward()
            private.optimizer.step()
            seconds += clock(x) - start
        return seconds

    return step


def _plain(model, x, y):
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def step():
        start = clock(x)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        return clock(x) - start

    return step


def _opacus(mode, model, x, y, noise, rate):
    from opacus import PrivacyEngine

    mode, *part = mode.split()
    rows = int(part[0]) if part else len(x)
    loader = DataLoader(TensorDataset(x.cpu(), y.cpu()), batch_size=len(x))
    made = PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=rate),
        data_loader=loader,
        noise_multiplier=noise,
        max_grad_norm=CLIP,
        poisson_sampling=False,
        grad_sample_mode=mode,
        criterion=nn.CrossEntropyLoss(),
    )
    private, optimizer = made[0], made[1]
    criterion = made[2] if mode == "ghost" else nn.CrossEntropyLoss()

    def step():
        start = clock(x)
        for first in range(0, len(x), rows):
            if part:  # as BatchMemoryManager does
                optimizer.signal_skip_step(do_skip=first + rows < len(x))
            own = slice(first, first + rows)
            optimizer.zero_grad()
            criterion(private(x[own]), y[own]).backward()
            optimizer.step()
        return clock(x) - start

    return step


def check(net, contestant):
    """Refuse a mode that fails, or whose clipped mean is not the true one."""
    x, y = net.data()
    x, y = x[:4], y[:4]
    model = net.model(contestant)
    if contestant in (OURS, PARTS, PLAIN):
        try:
            attach(contestant, model, x, y, 1)()
        except Exception as error:
            raise Refused(_first_line(error)) from error
        return
    before = copy.deepcopy(model)
    try:
        _opacus(contestant.removeprefix("opacus "), model, x, y, 0.0, 1.0)()
    except Exception as error:
        raise Refused(_first_line(error)) from error
    expected = _clipped_mean(before, x, y)
    pairs = zip(before.parameters(), model.parameters(), expected, strict=True)
    for name, (old, new, mean) in zip(
        dict(before.named_parameters()), pairs, strict=True
    ):
        moved = (old - new).detach()
        if not torch.allclose(moved, mean, rtol=1e-2, atol=1e-5):
            wrong = float((moved - mean).norm() / mean.norm().clamp_min(1e-12))
            raise Refused(
                f"the clipped gradient of {name!r} is wrong by {wrong:.0%} of its norm"
            )


def _clipped_mean(model, x, y):
    parameters = list(model.parameters())
    total = [torch.zeros_like(p) for p in parameters]
    for i in range(len(x)):
        loss = F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        gradient = torch.autograd.grad(loss, parameters)
        norm = torch.stack([g.norm() for g in gradient]).norm()
        for t, g in zip(total, gradient, strict=True):
            t += g * (CLIP / norm).clamp_max(1.0) / len(x)
    return total


def _first_line(error):
    text = str(error).strip() or type(error).__name__
    return f"{type(error).__name__}: {' '.join(text.splitlines()[0].split())[:160]}"


def clock(x):
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


# -- measuring -------------------------------------------------------------------------


def measure(net, device, repeats):
    refused, steps = {}, {}
    for name in CONTESTANTS:
        try:
            check(net, name)
        except Refused as reason:
            refused[name] = str(reason)
            continue
        x, y = (t.to(device) for t in net.data())
        model = net.model(name).to(device)
        steps[name] = attach(name, model, x, y, WARM_UP + repeats)
    names, seconds = list(steps), {name: [] for name in steps}
    for number in range(WARM_UP + repeats):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            seconds[name].append(steps[name]())
    seconds = {name: values[WARM_UP:] for name, values in seconds.items()}
    steps.clear()
    memory = {name: _memory_of(net, name, device) for name in names}
    return {
        "net": net.name,
        "parameters": sum(p.numel() for p in net.model(PLAIN).parameters()),
        "input_shape": net.shape,
        "batch": net.batch,
        "refused": refused,
        "seconds": seconds,
        "peak_mib": memory,
        **summary(seconds, memory),
    }


def summary(seconds, memory):
    """Medians, and ours against the best mode of Opacus for time and for memory."""
    median = {name: statistics.median(values) for name, values in seconds.items()}
    peak = {name: statistics.median(values) for name, values in memory.items()}
    found = {"median_seconds": median, "median_peak_mib": peak}
    rivals = [name for name in median if name.startswith("opacus")]
    if OURS in median:
        found["time_over_non_private"] = _ratio(seconds, OURS, PLAIN)
    if OURS in median and rivals:
        fastest = min(rivals, key=median.__getitem__)
        leanest = min(rivals, key=peak.__getitem__)
        found["fastest_mode"], found["leanest_mode"] = fastest, leanest
        for ours in (OURS, PARTS):
            found[ours] = {
                "time_over_fastest_mode": _ratio(seconds, ours, fastest),
                "time_quartiles": _ratios(seconds, ours, fastest),
                "memory_over_fastest_mode": peak[ours] / peak[fastest],
                "memory_over_leanest_mode": peak[ours] / peak[leanest],
            }
    return found


def _ratio(seconds, one, other):
    return _ratios(seconds, one, other)[1]


def _ratios(seconds, one, other):
    """Quartiles of the ratio within a round."""
    pairs = zip(seconds[one], seconds[other], strict=True)
    return statistics.quantiles([a / b for a, b in pairs], n=4)


def _memory_of(net, contestant, device):
    command = [sys.executable, __file__, "--child", net.name, contestant]
    command += ["--device", device, "--threads", str(torch.get_num_threads())]
    runs = []
    for _ in range(MEMORY_RUNS):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        runs.append(float(done.stdout.split()[-1]))
    return runs


def child(net, contestant, device):
    """Print the peak over three steps, attaching included, in MiB."""
    import opacus  # noqa: F401  (in every child, so that imports weigh the same)

    x, y = (t.to(device) for t in net.data())
    model = net.model(contestant).to(device)
    _plain(copy.deepcopy(model), x[:1], y[:1])()
    start = _peak(device)
    step = attach(contestant, model, x, y, MEMORY_STEPS)
    for _ in range(MEMORY_STEPS):
        step()
    print((_peak(device) - start) / MIB)


def _peak(device):
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("there is no VmHWM here; memory is measured on Linux only")


# -- reporting -------------------------------------------------------------------------


def processor():
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def table(result):
    lines = [
        "| net, batch | contestant | step, ms | over non-private | peak memory, MiB |",
        "|---|---|--:|--:|--:|",
    ]
    for row in result["rows"]:
        label = f"`{row['net']}`, {row['batch']}"
        for name in CONTESTANTS:
            if name in row["refused"]:
                lines.append(f"| {label} | {name} | does not take it | | |")
                continue
            ms = 1e3 * row["median_seconds"][name]
            over = _ratio(row["seconds"], name, PLAIN)
            peak = row["median_peak_mib"][name]
            lines.append(f"| {label} | {name} | {ms:.1f} | {over:.2f} | {peak:.0f} |")
    lines += [
        "",
        "| net | ours | fastest mode of Opacus | our time over its (quartiles) | our "
        "memory over its | leanest mode of Opacus | our memory over its |",
        "|---|---|---|--:|--:|---|--:|",
    ]
    for row in result["rows"]:
        for ours in (OURS, PARTS) if "fastest_mode" in row else ():
            low, middle, high = row[ours]["time_quartiles"]
            lines.append(
                f"| `{row['net']}` | {ours} | {_mode(row['fastest_mode'])} | "
                f"{middle:.2f} ({low:.2f} to {high:.2f}) | "
                f"{row[ours]['memory_over_fastest_mode']:.2f} | "
                f"{_mode(row['leanest_mode'])} | "
                f"{row[ours]['memory_over_leanest_mode']:.2f} |"
            )
    reasons = [
        f"- `{row['net']}`, {name}: {reason}"
        for row in result["rows"]
        for name, reason in row["refused"].items()
    ]
    if reasons:
        lines += ["", "Who does not take a net says:", "", *reasons]
    where = "GPU" if result["device"] != "cpu" else f"{result['threads']} thread(s)"
    lines += [
        "",
        f"{result['machine']}, {where}; torch {result['torch']}, Opacus "
        f"{result['opacus']}, Python {result['python']}; medians of "
        f"{result['repeats']} rounds; {result['date']}.",
    ]
    return "\n".join(lines)


def _mode(contestant):
    return contestant.removeprefix("opacus ")


def write_docs(result):
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(
        f"{head}{BEGIN}\n\n{table(result)}\n\n{END}{tail}", encoding="utf-8"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--nets", nargs="*", default=list(NETS), choices=list(NETS))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--write-docs", action="store_true")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    if options.child:
        name, contestant = options.child
        return child(NETS[name], contestant, options.device)
    cuda = options.device == "cuda"
    result = {
        "device": options.device,
        "machine": torch.cuda.get_device_name() if cuda else processor(),
        "threads": options.threads,
        "torch": torch.__version__,
        "opacus": metadata.version("opacus"),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "repeats": options.repeats,
        "clipping": {"rule": "flat", "clip_norm": CLIP, "noise_multiplier": NOISE},
        "rows": [],
    }
    default = ROOT / "benchmarks" / "results" / f"step_cost_{options.device}.json"
    output = options.output or default
    for name in options.nets:
        row = measure(NETS[name], options.device, options.repeats)
        result["rows"].append(row)
        # after every net, so that what was measured outlives an interruption
        output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        short = {k: v for k, v in row.items() if k not in ("seconds", "peak_mib")}
        print(json.dumps(short), file=sys.stderr, flush=True)
    print(table(result))
    if options.write_docs:
        write_docs(result)


if __name__ == "__main__":
    main()
