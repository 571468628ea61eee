"""What a step takes on a GPU, counted on a machine that has none.

    python benchmarks/counted_memory.py --write-docs

Every contestant makes one step on a CPU with the net's batch for a GPU, and curvedp
plans it as for a GPU: chunks, what is written down, what is made again. All tensors
that are alive are counted after every operation. That is what a GPU's allocator counts,
but for scratch memory inside of one operation, which only libraries there have:
workspaces of cuDNN are not in the figures. Up to one gradient too much is counted where
branches of a net meet (:mod:`curvedp.testing.live`).

Whitening estimates its curvature from few probes here: shapes are all that counts.

A contestant that is known to take more than this machine has is left out
(``--most-gib``). Rows that the output file has are not counted again, whatever code
they are of, unless ``--again`` says so.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from cost.contestants import attach, is_opacus, opacus_version
from cost.machine import PAGE, ROOT
from cost.nets import CELLS
from cost.reporting import between_marks

from curvedp.layers.planned import planned_for
from curvedp.testing.live import LiveBytes
from curvedp.train import passes

OUTPUT = ROOT / "benchmarks" / "results" / "counted_memory.json"
MEASURED = ROOT / "benchmarks" / "results" / "step_cost_cuda.json"
NETS = ("wrn-16-4", "vit-6x384", "resnet-20", "dpkfc-mnist")
CONTESTANTS = (
    "curvedp",
    "curvedp dp-kfc",
    "curvedp kept",
    "curvedp dp-kfc kept",
    "non-private",
    "opacus hooks",
    "opacus ghost",
)
FEW_PROBES = {"probe_size": 32, "probe_batches": 1}
MIB = 2**20
#: Pieces of memory that are named, of those that are alive at the peak.
NAMED = 12


def count(net, name):
    """Peak of a step in MiB, and what was alive then."""
    x, y = net.data("cpu")
    model = net.model(for_opacus=is_opacus(name))
    gc.collect()
    probing = FEW_PROBES if "dp-kfc" in name else {}
    as_on_gpu = {"cpu": passes.REMADE_FROM["cuda"]}
    with mock.patch.dict(passes.REMADE_FROM, as_on_gpu):
        contestant = attach(name, model, x, y, **probing)
    if contestant.refresh is not None:
        contestant.refresh()  # or the step would
    known = [*model.parameters(), *model.buffers(), x, y]
    with planned_for("cuda"), LiveBytes(known) as live:
        contestant.step()
    sizes = Counter()
    for piece in live.at_peak:
        kind = str(piece.dtype).removeprefix("torch.")
        sizes[f"{piece.operation} {list(piece.shape)} {kind}"] += piece.size
    named = {what: round(size / MIB, 1) for what, size in sizes.most_common(NAMED)}
    return {"peak_mib": round(live.peak / MIB, 1), "at_peak_mib": named}


def measured():
    """Peaks of a GPU's allocator by net and contestant, MiB."""
    stored = json.loads(MEASURED.read_text(encoding="utf-8"))
    return {row["net"]: row["median_peak_mib"] for row in stored["rows"]}


def header():
    return {
        "torch": torch.__version__,
        "opacus": opacus_version(),
        "python": platform.python_version(),
        "rows": [],
    }


def table(result):
    """Counted beside measured; over Opacus's leanest mode where that was counted."""
    known = measured()
    ghost = {
        (row["net"], row["batch"]): row["peak_mib"]
        for row in result["rows"]
        if row["contestant"] == "opacus ghost"
    }
    lines = [
        "| net, batch | contestant | counted, MiB | measured on an H200 before, MiB | "
        "over ghost, both counted |",
        "|---|---|--:|--:|--:|",
    ]
    order = [(net, name) for net in CELLS["cuda"] for name in CONTESTANTS]
    for row in sorted(
        result["rows"], key=lambda row: order.index((row["net"], row["contestant"]))
    ):
        seen = known.get(row["net"], {}).get(row["contestant"])
        shown = "" if seen is None else f"{seen:.0f}"
        whole = ghost.get((row["net"], row["batch"]))
        over = f"{row['peak_mib'] / whole:.2f}" if whole else ""
        lines.append(
            f"| `{row['net']}`, {row['batch']} | {row['contestant']} | "
            f"{row['peak_mib']:.0f} | {shown} | {over} |"
        )
    dates = {row["date"] for row in result["rows"]}
    lines += [
        "",
        f"torch {result['torch']}, Opacus {result['opacus']}, Python "
        f"{result['python']}; {' and '.join(sorted(dates))}.",
    ]
    return "\n".join(lines)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", nargs="*", default=list(NETS), choices=CELLS["cuda"])
    parser.add_argument(
        "--contestants", nargs="*", default=list(CONTESTANTS), choices=CONTESTANTS
    )
    parser.add_argument("--batch", type=int, help="instead of each net's own")
    parser.add_argument("--most-gib", type=float, default=18.0)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--write-docs", action="store_true")
    return parser.parse_args()


def main():
    options = parse()
    warnings.simplefilter("ignore")
    result = header()
    if options.output.exists() and not options.again:
        result["rows"] = json.loads(options.output.read_text(encoding="utf-8"))["rows"]
    done = {(r["net"], r["batch"], r["contestant"]) for r in result["rows"]}
    most, known = 1024 * options.most_gib, measured()
    for name in options.nets:
        net = CELLS["cuda"][name]
        net = replace(net, batch=options.batch or net.batch)
        for contestant in options.contestants:
            if (name, net.batch, contestant) in done:
                continue
            share = net.batch / CELLS["cuda"][name].batch
            if share * known.get(name, {}).get(contestant, 0.0) > most:
                print(f"{name}, {contestant}: too large to count here", file=sys.stderr)
                continue
            row = {"net": name, "batch": net.batch, "contestant": contestant}
            row["date"] = time.strftime("%Y-%m-%d")
            row |= count(net, contestant)
            result["rows"].append(row)
            text = json.dumps(result, indent=1) + "\n"
            options.output.write_text(text, encoding="utf-8")
            print(
                f"{name}, {net.batch}, {contestant}: {row['peak_mib']:.0f} MiB",
                file=sys.stderr,
                flush=True,
            )
    print(table(result))
    if options.write_docs:
        between_marks(PAGE, "counted", table(result))


if __name__ == "__main__":
    main()
