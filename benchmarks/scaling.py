"""How the cost of a step grows: with batch, width, depth and sequence length.

    OMP_NUM_THREADS=1 python benchmarks/scaling.py --write-docs
    PYTHONPATH=src python benchmarks/scaling.py --device cuda

One size of a net is changed at a time. Each round makes one step of every contestant
(non-private, curvedp, curvedp dp-kfc) at every size of a sweep, in an order that
rotates, so that a slow moment of the machine hits all of them. The time of a size is
the median over the rounds, and the exponent is the slope of a least-squares line
through the logarithms of sizes and times. "counted" is the same line through the
products that the planner counts (``private.explain()``): what is left when launches,
memory and other work on the machine are taken out.

It also reports, for every net of ``step_cost.py``, the layer whose whitening takes most
beside its own forward and backward pass: by counting, and timed on a CPU for nets where
that is cheap.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from cost.contestants import OURS, PLAIN, WHITENED, attach, clock_kind, private
from cost.counting import counted, timed
from cost.machine import ROOT, processor
from cost.nets import CELLS, Net
from cost.scaling_docs import write_scaling_docs

CONTESTANTS = (PLAIN, OURS, WHITENED)
WARM_UP = 2
SEED = 0
#: Layers are timed one by one where a whole net takes less than a second a step.
TIMED = ("dpkfc-mnist", "resnet-20")


@dataclass(frozen=True)
class Sweep:
    """One size that is changed, and the nets that this makes."""

    name: str
    of: str
    sizes: tuple[int, ...]
    net: object


def tokens(length=64, dim=128, depth=2, batch=16):
    options = {"dim": dim, "depth": depth, "heads": 4}
    return Net(f"tokens-{length}x{dim}x{depth}", (length,), batch, None, options, 1000)


SWEEPS = {
    "cpu": (
        Sweep("batch", "dpkfc-mnist", (32, 64, 128, 256, 512),
              lambda n: Net("dpkfc-mnist", (1, 28, 28), n, "dpkfc-mnist")),
        Sweep("batch of tokens", "transformer 2x128, 64 tokens", (16, 32, 64, 128),
              lambda n: tokens(batch=n)),
        Sweep("width", "transformer of 2 blocks, 64 tokens", (64, 128, 256, 512),
              lambda n: tokens(dim=n)),
        Sweep("depth", "transformer of width 128, 64 tokens", (1, 2, 4, 8),
              lambda n: tokens(depth=n)),
        Sweep("sequence length", "transformer 2x128", (32, 64, 128, 256, 512),
              lambda n: tokens(length=n)),
    ),
    "cuda": (
        Sweep("batch", "dpkfc-mnist", (256, 512, 1024, 2048, 4096),
              lambda n: Net("dpkfc-mnist", (1, 28, 28), n, "dpkfc-mnist")),
        Sweep("batch of tokens", "transformer 6x384, 64 tokens", (64, 128, 256, 512),
              lambda n: tokens(64, 384, 6, n)),
        Sweep("width", "transformer of 4 blocks, 64 tokens", (256, 512, 1024, 2048),
              lambda n: tokens(64, n, 4, 128)),
        Sweep("depth", "transformer of width 384, 64 tokens", (2, 4, 8, 16),
              lambda n: tokens(64, 384, n, 128)),
        Sweep("sequence length", "transformer 4x384", (32, 64, 128, 256, 512),
              lambda n: tokens(n, 384, 4, 64)),
    ),
}  # fmt: skip


def measure(sweep, device, repeats):
    """One row of the result: seconds, work and exponents of a sweep."""
    attached, flops = {}, {name: [] for name in CONTESTANTS}
    for size in sweep.sizes:
        net = sweep.net(size)
        x, y = net.data(device)
        for name in CONTESTANTS:
            model = net.model().to(device)
            attached[name, size] = attach(name, model, x, y, probe_batches=1)
            flops[name].append(_work(name, net))
    seconds = {key: [] for key in attached}
    order = list(attached)
    for number in range(WARM_UP + repeats):
        turn = number * len(CONTESTANTS) % len(order)
        for key in order[turn:] + order[:turn]:
            seconds[key].append(attached[key].step())
            attached[key].rest()
    rows = {
        name: [statistics.median(seconds[name, n][WARM_UP:]) for n in sweep.sizes]
        for name in CONTESTANTS
    }
    return {
        "sweep": sweep.name,
        "of": sweep.of,
        "sizes": list(sweep.sizes),
        "seconds": rows,
        "all_seconds": {
            name: [seconds[name, n][WARM_UP:] for n in sweep.sizes]
            for name in CONTESTANTS
        },
        "flops": flops,
        "exponent": {name: exponent(sweep.sizes, rows[name]) for name in CONTESTANTS},
        "counted_exponent": {
            name: exponent(sweep.sizes, flops[name]) for name in CONTESTANTS
        },
    }


def _work(name, net):
    """Flops of a step in layers with weights, as the planner counts them."""
    x, y = net.data("cpu")
    recipe = "dp-kfc" if name == WHITENED else "dp-sgd"
    probing = {"probe_size": 32, "probe_batches": 1} if name == WHITENED else {}
    plan = private(net.model(), x[:2], y[:2], recipe, **probing).explain()
    whole = 0.0
    for row in plan.rows:
        whole += net.batch * row.forward_backward.flops + row.once.flops
        if name != PLAIN:
            whole += net.batch * (row.norm + row.whitening).flops + row.mapping.flops
    return whole


def exponent(sizes, costs):
    """Slope of the least-squares line through logarithms."""
    a, b = [math.log(n) for n in sizes], [math.log(c) for c in costs]
    return statistics.linear_regression(a, b).slope


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--sweeps", nargs="*", help="some of them, by name")
    parser.add_argument("--again", action="store_true", help="measure all anew")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--write-docs", action="store_true")
    return parser.parse_args()


def main():
    options = parse()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    torch.manual_seed(SEED)
    device = options.device
    default = ROOT / "benchmarks" / "results" / f"scaling_{device}.json"
    output = options.output or default
    cuda = device == "cuda"
    result = {
        "device": device,
        "machine": torch.cuda.get_device_name() if cuda else processor(),
        "threads": options.threads,
        "clock": clock_kind(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "repeats": options.repeats,
        "seed": SEED,
        "rows": [],
        "whitening": [],
        "timed": [],
    }
    if output.exists() and not options.again:
        stored = json.loads(output.read_text(encoding="utf-8"))
        same = ("device", "machine", "threads", "clock", "torch", "repeats")
        if all(stored.get(name) == result[name] for name in same):
            kept = ("date", "rows", "whitening", "timed")  # the day it was measured
            result |= {name: stored[name] for name in kept}

    def keep():  # after every part, so that what was measured outlives an interruption
        result["date"] = time.strftime("%Y-%m-%d")
        output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    known = {row["sweep"] for row in result["rows"]}
    for sweep in SWEEPS[device]:
        wanted = options.sweeps is None or sweep.name in options.sweeps
        if not wanted or sweep.name in known:
            continue
        row = measure(sweep, device, options.repeats)
        result["rows"].append(row)
        print(sweep.name, json.dumps(row["exponent"]), file=sys.stderr, flush=True)
        keep()
    known = {row["net"] for row in result["whitening"]}
    # counts are of no machine: of all nets at the batch that a GPU takes
    for net in CELLS["cuda"].values():
        if net.name not in known:
            result["whitening"].append(counted(net))
            keep()
    known = {row["net"] for row in result["timed"]}
    for name in TIMED if device == "cpu" else ():
        if name not in known:
            result["timed"].append(timed(CELLS[device][name]))
            keep()
    if options.write_docs:
        write_scaling_docs(result)


if __name__ == "__main__":
    main()
