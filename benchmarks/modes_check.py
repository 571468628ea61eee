"""What each way to compute a step costs, and whether its bound holds on this device.

    PYTHONPATH=src python benchmarks/modes_check.py > benchmarks/results/modes_cpu.json

For each net and recipe: the median time of a private step, eager and compiled, in the
model's precision and in bfloat16, with norms in each precision; all of them interleaved
so that they see the same machine, and compile times apart. And for products of bfloat16
numbers: the error of this device's own sums, over the bound that norms are raised by
(``curvedp.layers.rounding``), for random and for hostile rows. It must be below 1.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time

import torch
from cost.nets import CELLS
from torch.utils.data import TensorDataset

from curvedp import make_private
from curvedp.errors import ConfigurationError
from curvedp.layers.precision import NormPrecision, exact, norms_in
from curvedp.layers.rounding import gamma, lost, product, unit

#: Options of make_private.
MODES = {
    "eager": {},
    "compiled": {"compile": True},
    "bf16": {"precision": "bf16"},
    "bf16 kept": {"precision": "bf16-kept"},
    "bf16, compiled": {"precision": "bf16", "compile": True},
    "float32 norms": {"norm_precision": "float32"},
    "bf16 norms": {"norm_precision": "bf16"},
    "bf16, bf16 norms": {"precision": "bf16", "norm_precision": "bf16"},
    "bf16, bf16 norms, compiled": {
        "precision": "bf16", "norm_precision": "bf16", "compile": True,
    },
}  # fmt: skip
RECIPES = ("dp-sgd", "dp-kfc")


def clock(device):
    """Seconds; of one thread's own time, which others on the machine leave alone."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()


def attached(net, recipe, options, device, steps):
    model = net.model().to(device)
    x, y = net.data("cpu")
    private = make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        TensorDataset(x, y),
        recipe=recipe,
        loss="cross-entropy",
        noise_multiplier=1.0,
        sample_rate=1.0,
        steps=steps,
        expected_batch_size=net.batch,
        physical_batch_size=net.batch,
        allow_large_delta=True,
        **({"refresh": 10 * steps} if recipe == "dp-kfc" else {}),
        **options,
    )
    private.model.train()
    return private, iter(private.loader)


def times(net, recipe, modes, device, steps):
    """Median seconds of a step in every mode, and of the first one where compiled."""
    running, first = {}, {}
    for name in modes:
        private, batches = attached(net, recipe, MODES[name], device, steps + 2)
        start = clock(device)
        try:
            private.train_on(next(batches))
        except ConfigurationError as error:
            first[name] = str(error)
            continue
        first[name] = clock(device) - start
        private.train_on(next(batches))
        running[name] = (private, batches, [])
    for _ in range(steps):
        for private, batches, found in running.values():
            batch = next(batches)
            start = clock(device)
            private.train_on(batch)
            found.append(clock(device) - start)
    medians = {name: statistics.median(own[2]) for name, own in running.items()}
    return {"step_s": medians, "first_step_s": first}


def hostile_rows(n, generator):
    """Random rows, and ones whose products vanish beside a large one."""
    yield torch.randn(8, 1, 16, n, generator=generator)
    yield torch.rand(8, 1, 16, n, generator=generator)
    for exponent in (11, 12, 12.5, 13):
        x = torch.full((1, 1, 16, n), 2.0**-exponent)
        x[..., : max(1, n // 256)] = 1.0
        yield x


def largest_error(device):
    """Of bfloat16 products on this device, over the bound; at most 1."""
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for n in (16, 256, 4096, 65536):
        for rows in hostile_rows(n, generator):
            for x in (rows.to(device), rows.to(device).bfloat16()):
                with exact(device), norms_in(NormPrecision.BF16):
                    found = product(x, x.mT).double()
                    bound = gamma(n, unit(x)) + lost(x, x)
                wide = x.double()
                lengths = wide.norm(dim=-1)
                scale = lengths.unsqueeze(-1) * lengths.unsqueeze(-2)
                error = (found - wide @ wide.mT).abs() / scale
                worst = max(worst, float(error.max()) / bound)
    return worst


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", nargs="*")
    parser.add_argument("--modes", nargs="*", default=list(MODES))
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--steps", type=int, default=15)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cells = CELLS[device.type]
    result = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "error_over_bound": largest_error(device),
        "nets": {},
    }
    for name in given.nets or cells:
        for recipe in given.recipes:
            found = times(cells[name], recipe, given.modes, device, given.steps)
            result["nets"][f"{name}, {recipe}"] = found
            print(name, recipe, found, file=sys.stderr)
    json.dump(result, sys.stdout, indent=1)
    print()
    return 0 if result["error_over_bound"] <= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
