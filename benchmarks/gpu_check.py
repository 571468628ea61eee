"""The private step on a GPU that has torch, numpy and scipy and nothing else.

    PYTHONPATH=src python benchmarks/gpu_check.py > benchmarks/results/gpu_check.json

For each net: the clipped sum on the GPU against the same sum on the CPU in float64, the
largest contribution of any single example over C (both with TF32 switched on for the
model, as users do), and the time of a step against the plain PyTorch step.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

from curvedp import make_private, models
from curvedp.clipping import clipped_sum
from curvedp.clipping.rules import FlatClipping
from curvedp.layers import Batch, Recording, cover, synthesiser_like
from curvedp.whitening import IdentityWhitener

CLIP = 0.5
NETS = [
    ("dpkfc-mnist", (1, 28, 28), 256),
    ("small-cnn", (3, 32, 32), 256),
    ("resnet-20", (3, 32, 32), 256),
    ("wrn-16-4", (3, 32, 32), 256),
    ("vit", (3, 32, 32), 256),
]


def cross_entropy(output, targets):
    return nn.functional.cross_entropy(output, targets, reduction="none")


def recorded(model, x, y):
    covered = cover(
        model, synthesiser_like(Batch(x[:1], y[:1]), model), cross_entropy
    ).covered
    recording = Recording(model, covered, len(x))
    cross_entropy(recording.forward((x,), {}), y).sum().backward()
    return recording.layer_ios()


def summed(model, ios, present):
    return clipped_sum(
        ios,
        FlatClipping(CLIP),
        IdentityWhitener(),
        parameters=dict(model.named_parameters()),
        present=present,
        step=0,
    ).values


def tf32(allowed):
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def check_sums(name, shape, device):
    torch.manual_seed(0)
    model = models.build(name, shape, 10)
    x, y = torch.randn(8, *shape), torch.randint(0, 10, (8,))
    exact = model.double()
    everybody = torch.ones(8, dtype=torch.bool)
    reference = summed(exact, recorded(exact, x.double(), y), everybody)
    model = model.float().to(device)
    tf32(False)  # the same activations as the reference has
    ios = recorded(model, x.to(device), y.to(device))
    tf32(True)  # it must not reach norms and sums
    result = summed(model, ios, everybody)
    error = sum(
        (result[n].cpu().double() - r).norm() ** 2 for n, r in reference.items()
    )
    scale = sum(r.norm() ** 2 for r in reference.values())
    worst = 0.0
    for i in range(8):
        alone = summed(model, ios, torch.arange(8) == i)
        norm = sum(v.double().norm() ** 2 for v in alone.values()) ** 0.5
        worst = max(worst, float(norm) / CLIP)
    return float((error / scale) ** 0.5), worst


def time_steps(name, shape, batch, device, steps=20):
    model = models.build(name, shape, 10).to(device)
    x = torch.randn(batch, *shape)
    y = torch.randint(0, 10, (batch,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    private = make_private(
        model,
        optimizer,
        TensorDataset(x, y),
        loss="cross-entropy",
        noise_multiplier=1.0,
        sample_rate=1.0,
        steps=steps + 5,
        expected_batch_size=batch,
        physical_batch_size=batch,
        allow_large_delta=True,
    )
    x, y = x.to(device), y.to(device)
    ours, plain = [], []
    for _ in private.loader:  # interleaved, so that both see the same machine
        start = clock()
        private.optimizer.zero_grad()
        private.loss(private.model(x), y).backward()
        private.optimizer.step()
        ours.append(clock() - start)
        start = clock()
        optimizer.zero_grad()
        cross_entropy(model(x), y).mean().backward()
        optimizer.step()
        plain.append(clock() - start)
    return statistics.median(ours[5:]), statistics.median(plain[5:])


def clock():
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for name, shape, batch in NETS:
        error, worst = check_sums(name, shape, device)
        ours, plain = time_steps(name, shape, batch, device)
        rows.append(
            {
                "net": name,
                "batch": batch,
                "relative_error_of_clipped_sum": error,
                "largest_contribution_over_bound": worst,
                "private_step_ms": 1e3 * ours,
                "plain_step_ms": 1e3 * plain,
                "ratio": ours / plain,
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr)
    result = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dp_accounting_installed": "dp_accounting" in sys.modules,
        "date": time.strftime("%Y-%m-%d"),
        "rows": rows,
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
