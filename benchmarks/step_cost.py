"""Time and memory of one private step: curvedp, Opacus in all its modes, plain PyTorch.

    OMP_NUM_THREADS=1 python benchmarks/step_cost.py --write-docs
    PYTHONPATH=src python benchmarks/step_cost.py --device cuda

All contestants take the same batch through the same net: forward, backward, clipping,
noise, SGD. Fetching the batch is not timed. "curvedp" is plain DP-SGD with flat
clipping, as Opacus's modes are; "curvedp dp-kfc" whitens, with all the defaults of that
recipe. Its estimate of curvature, due every 100 steps, is timed apart and reported
beside the step.

Steps are made in turns: each round makes one step of every contestant, in an order that
rotates, so that a slow moment of the machine hits all of them. Where a GPU's memory
does not hold all contestants together, each makes blocks of steps, in an order that
rotates as well. A ratio is the median of the ratios within a round.

"64" takes the batch in parts of 64 rows (what curvedp's loader does, and Opacus's
BatchMemoryManager); a step is all of them. "graph" records the step as CUDA graphs,
"kept" computes in float32 and keeps in bfloat16 (``precision="bf16-kept"``).

Memory is measured on the CPU in a child process for each contestant: the largest
resident size (``VmHWM``) over two steps and attaching, less that after imports, model,
data and a plain step on one example, which makes torch load what it loads at first use.
On CUDA it is the allocator's peak over two steps, less what model and data take. The
peak of an estimate of curvature stands apart. A contestant that runs out of memory is
left out, and the result says so.

Precision is float32 for everybody, without TF32 in products and convolutions, unless
``--tf32`` or ``--bf16`` (autocast in the forward pass) says otherwise.

A mode of Opacus takes part if one step without noise moves every parameter as clipping
the gradients one example at a time does; otherwise the result says why not. It needs
torch, numpy and scipy alone: on a machine where nothing can be installed, its package
folder on PYTHONPATH is enough.

``--largest-batch GIB`` finds the largest batch of each contestant within that memory
instead, and ``--epochs 5 --nets dpkfc-mnist`` times training as a user writes it, with
sampling, loading and estimates of curvature.

Cells (a net with its batch and precision) that the output file has from the same
machine and the same versions are not measured again.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import torch
from cost.contestants import (
    CLIP,
    CONTESTANTS,
    NOISE,
    clock_kind,
    opacus_version,
    set_precision,
)
from cost.epochs import run_epochs
from cost.largest import contestants_of, find_largest
from cost.machine import PAGE, ROOT, processor
from cost.measuring import child, measure
from cost.nets import CELLS
from cost.reporting import table, write_docs, write_epochs_docs, write_largest_docs

REPEATS = {"cpu": 15, "cuda": 20}
#: What a stored result must have in common with this run to be gone on with.
SAME = ("device", "machine", "threads", "clock", "torch", "opacus", "python", "repeats")


def header(options):
    cuda = options.device == "cuda"
    return {
        "device": options.device,
        "machine": torch.cuda.get_device_name() if cuda else processor(),
        "threads": options.threads,
        "clock": clock_kind(options.device),
        "torch": torch.__version__,
        "opacus": opacus_version(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "repeats": options.repeats,
        "clipping": {"rule": "flat", "clip_norm": CLIP, "noise_multiplier": NOISE},
        "rows": [],
    }


def stored_rows(output, result):
    """Rows of an earlier run that this one would only repeat."""
    if not output.exists():
        return []
    stored = json.loads(output.read_text(encoding="utf-8"))
    if any(stored.get(name) != result[name] for name in SAME):
        return []
    expected = list(CONTESTANTS[result["device"]])
    return [row for row in stored["rows"] if row.get("contestants") == expected]


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, help="rounds; 15, on CUDA 20")
    parser.add_argument("--nets", nargs="*", help="some of the device's nets")
    precision = parser.add_mutually_exclusive_group()
    for name in ("tf32", "bf16"):
        precision.add_argument(
            f"--{name}", dest="precision", action="store_const", const=name
        )
    parser.add_argument("--seconds", type=float, help="begin no net after so many")
    parser.add_argument("--again", action="store_true", help="measure all cells anew")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--write-docs", action="store_true")
    parser.add_argument("--batch", type=int, help="instead of each net's own")
    parser.add_argument(
        "--largest-batch",
        type=float,
        metavar="GIB",
        help="find the largest batch within so much memory, in place of timing",
    )
    parser.add_argument(
        "--epochs",
        type=int,
        help="time so many epochs of the first net on 60 000 examples, in place",
    )
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.precision = options.precision or "float32"
    options.repeats = options.repeats or REPEATS[options.device]
    options.nets = options.nets or list(CELLS[options.device])
    unknown = set(options.nets) - set(CELLS[options.device])
    if unknown:
        parser.error(
            f"there is no net {sorted(unknown)[0]!r} for {options.device}; there are: "
            + ", ".join(CELLS[options.device])
        )
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here")
    return options


def chosen(options):
    """The nets of this run, with the batch that was asked for."""
    nets = [CELLS[options.device][name] for name in options.nets]
    return [replace(net, batch=options.batch or net.batch) for net in nets]


def results_file(options, name):
    return ROOT / "benchmarks" / "results" / f"{name}_{options.device}.json"


def stored_or(output, result):
    """What an earlier run on the same machine has found, to be gone on with."""
    if not output.exists():
        return result
    stored = json.loads(output.read_text(encoding="utf-8"))
    same = all(stored.get(name) == result[name] for name in SAME if name != "repeats")
    return stored if same else result


def largest_batches(options):
    output = options.output or results_file(options, "largest_batch")
    limit = 1024 * options.largest_batch
    fresh = header(options)
    result = fresh if options.again else stored_or(output, fresh)

    def keep():
        output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    for net in chosen(options):
        for name in contestants_of(options.device):
            key = {"net": net.name, "contestant": name, "limit_mib": limit}
            key["precision"] = options.precision
            rows = result["rows"]
            same = [r for r in rows if all(r.get(k) == v for k, v in key.items())]
            row = same[0] if same else key
            if not same:
                rows.append(row)
            find_largest(net, name, options.device, limit, row, keep, __file__)
            found = row.get("rows", row.get("refused"))
            print(f"{net.name}, {name}: {found}", file=sys.stderr, flush=True)
    if options.write_docs:
        write_largest_docs(result, PAGE)


def epochs(options):
    output = options.output or results_file(options, "epochs")
    result = header(options)
    row = run_epochs(chosen(options)[0], options.epochs, options.repeats)
    result["rows"] = [row]
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(row["epochs_seconds"]), json.dumps(row["over_opacus"]))
    if options.write_docs:
        write_epochs_docs(result, PAGE)


def main():
    begun = time.perf_counter()
    options = parse()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    if options.child:
        name, contestant = options.child
        net = CELLS["cpu"][name]
        return child(replace(net, batch=options.batch or net.batch), contestant)
    set_precision(options.precision)
    if options.largest_batch:
        return largest_batches(options)
    if options.epochs:
        return epochs(options)
    result = header(options)
    output = options.output or results_file(options, "step_cost")
    result["rows"] = [] if options.again else stored_rows(output, result)
    known = {(row["net"], row["batch"], row["precision"]) for row in result["rows"]}
    for net in chosen(options):
        name = net.name
        if (name, net.batch, options.precision) in known:
            print(f"{name}: measured before, see {output}", file=sys.stderr)
            continue
        if options.seconds and time.perf_counter() - begun > options.seconds:
            print(f"{name}: left for the next run, the time is up", file=sys.stderr)
            continue
        row = measure(net, options.device, options.repeats, options.precision, __file__)
        row["date"] = result["date"]
        result["rows"].append(row)
        # after every net, so that what was measured outlives an interruption
        output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        short = {k: v for k, v in row.items() if k not in ("seconds", "peak_mib")}
        print(json.dumps(short), file=sys.stderr, flush=True)
    print(table(result))
    if options.write_docs:
        write_docs(result, PAGE)


if __name__ == "__main__":
    main()
