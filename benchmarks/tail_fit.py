"""The fitted tail of a spectrum beside the true one, and what it is worth as a design.

    python benchmarks/tail_fit.py

A convolutional network of fewer than 2,000 parameters, whose Hessian can be written
down, is pretrained on one half of scikit-learn's digits (public, with the package).
The Hessian is that of the other half. From its k largest eigenvalues, with and without
a fitted tail, noise is designed; every design is then judged by the objective of the
*true* spectrum, as in NoiseCurve's table 3. Designs from synthetic probes, for prefix
sums, and independent noise stand beside them. Of nets that were pretrained, with labels
and without, and of one that was not, the spectrum is compared with that after one epoch
more (figure 3). Results: JSON and a plot; a few minutes on a core.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from curvedp import data as datasets
from curvedp.barrier import Provenance
from curvedp.curvature import (
    Estimate,
    curvature_product,
    curvature_spectrum,
    fit_tail,
    probe_batches,
)
from curvedp.curvature.products import Product
from curvedp.noise import RandomStreams
from curvedp.noise.strategies import (
    Banded,
    NoiseCurve,
    PrefixSums,
    Tail,
    optimise_banded,
)
from curvedp.probes import ImageProbe, ModelLabels, OwnLabels, PublicProbe
from curvedp.recipes import Pretraining
from curvedp.train.pretrain import pretrain

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "tail_fit.json"
PLOT = HERE.parent / "docs" / "images" / "tail_fit.png"
#: Steps of a run, bands, a learning rate of the paper's search range.
STEPS, BANDS, RATE = 100, 8, 0.5
TOPS = (20, 50, 100, 300)
STARTS = {
    "none": "no pretraining",
    "SimCLR": "pretrained without labels",
    "labels": "pretrained with labels",
}
SIMCLR_EPOCHS = 40


def network() -> nn.Sequential:
    """As the paper's CNN with GroupNorm, for 8 x 8 digits."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(),
        nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8), nn.ReLU(),
        nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10),
    )  # fmt: skip


def losses(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, targets, reduction="none")


def halves() -> tuple[Any, Any]:
    """Public examples to pretrain on, and those whose Hessian is looked at."""
    whole = datasets.load("digits").train
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))
    middle = len(whole) // 2
    rows = order.tolist()
    return (
        torch.utils.data.Subset(whole, rows[:middle]),
        torch.utils.data.Subset(whole, rows[middle:]),
    )


def trained(model: nn.Module, dataset: Any, epochs: int) -> None:
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    torch.manual_seed(1)
    loader = torch.utils.data.DataLoader(dataset, batch_size=64, shuffle=True)
    for _ in range(epochs):
        for x, y in loader:
            optimiser.zero_grad()
            losses(model(x), y).mean().backward()
            optimiser.step()


def hessian(model: nn.Module, how: Estimate) -> torch.Tensor:
    """All of it: of a small net on a probe."""
    product, size = products(model, how)
    rows = torch.eye(size, dtype=torch.float64)
    matrix = torch.stack([product(row) for row in rows])
    return (matrix + matrix.mT) / 2


def products(model: nn.Module, how: Estimate) -> tuple[Product, int]:
    """Products with the Hessian, and its size."""
    named = {n: p.detach() for n, p in model.named_parameters()}
    batches = probe_batches(model, how, torch.Generator().manual_seed(2))
    product = curvature_product(model, named, losses, batches, keep_graphs=True)
    return product, sum(p.numel() for p in named.values())


def eigenvalues(matrix: torch.Tensor) -> Any:
    """Descending."""
    return torch.linalg.eigvalsh(matrix).flip(0).numpy()


def workload(known: Any, tail: Tail | None = None) -> NoiseCurve:
    """Where descent overshoots, clipping holds it: such curvature counts as 1/eta."""
    values, counts = np.asarray(known), np.ones(len(known))
    if tail is not None:
        more, often = tail.grouped(len(known))
        values, counts = np.append(values, more), np.append(counts, often)
    capped = np.minimum(values, 1 / RATE)
    return NoiseCurve(tuple(map(float, capped)), RATE, tuple(map(float, counts)))


def judged(designs: dict[str, Banded], true: NoiseCurve) -> dict[str, Any]:
    errors = {name: true.error(own.inverse()) for name, own in designs.items()}
    best = errors["true spectrum"]
    return {
        name: {
            "objective": error,
            "reduction lost": error - best,  # the paper's table 3
            "above the best": error / best - 1,
        }
        for name, error in errors.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--plot", type=Path, default=PLOT)
    parser.add_argument("--examples", type=int, default=96)
    parser.add_argument("--epochs", type=int, default=8)
    given = parser.parse_args()
    started = time.monotonic()
    public, target = halves()
    own = Estimate(PublicProbe(target), OwnLabels(), given.examples, 1)
    spectra = {}
    for start in STARTS:
        model = network()
        if start == "SimCLR":
            how = Pretraining(pretrain_epochs=SIMCLR_EPOCHS, pretrain_labels="simclr")
            pretrain(model, losses, PublicProbe(public), how, RandomStreams(0))
        if start == "labels":
            trained(model, public, given.epochs)
        begun, matrix = copy.deepcopy(model), hessian(model, own)
        trained(model, target, 1)
        spectra[start] = (eigenvalues(matrix), eigenvalues(hessian(model, own)))
    after, size = spectra["labels"][0], len(matrix)
    positive = after[after > 1e-6 * after[0]]
    count = len(positive)
    true = workload(positive)
    tails: dict[str, dict[str, Tail | None]] = {}
    workloads: dict[str, Any] = {"true spectrum": true}
    for top in (k for k in TOPS if k < count):
        known = positive[:top]
        by_sum = curvature_spectrum(
            lambda v: matrix @ v, size, Provenance.PUBLIC, top=top
        )
        tails[str(top)] = {
            "true p+": fit_tail(known, count),
            "p+ by the sum": by_sum.tail,
        }
        workloads[f"top {top}, no fit"] = workload(known)
        for name, tail in tails[str(top)].items():
            workloads[f"top {top}, {name}"] = workload(known, tail)
    shape = tuple(target[0][0].shape)
    noise = Estimate(ImageProbe(shape), ModelLabels(), given.examples, 1)
    product, _ = products(begun, noise)
    found = curvature_spectrum(product, size, Provenance.SYNTHETIC, top=min(100, count))
    workloads["synthetic probes, top 100"] = workload(found.positive, found.tail)
    workloads["prefix sums"] = PrefixSums()
    designs = {n: optimise_banded(w, STEPS, BANDS) for n, w in workloads.items()}
    designs["independent noise"] = Banded(np.ones((1, STEPS)))
    result = {
        "parameters": size,
        "examples": given.examples,
        "steps": STEPS,
        "bands": BANDS,
        "learning_rate": RATE,
        "positive": {"number": count, "sum": float(positive.sum())},
        "designs": judged(designs, true),
        "largest noise of a step": {
            n: float(d.inverse_row_norms().max()) for n, d in designs.items()
        },
        "tails": {k: described(fits, int(k)) for k, fits in tails.items()},
        "spectrum": {
            STARTS[start]: changed(*pair) for start, pair in spectra.items()
        },
        "machine": platform.processor() or platform.machine(),
        "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    plot(given.plot, spectra, tails, found)
    for name, row in result["designs"].items():
        print(
            f"{name:30} {row['objective']:12.4g} {100 * row['above the best']:9.2f} %"
        )
    print(f"{result['seconds']} s")


def described(fits: dict[str, Tail | None], after: int) -> dict[str, Any]:
    return {
        name: tail and {**tail.to_json(), "sum": tail.sum_after(after)}
        for name, tail in fits.items()
    }


def changed(first: Any, then: Any) -> dict[str, Any]:
    """How far one epoch moves the spectrum, eigenvalue by eigenvalue in their order."""
    return {
        "moved in an epoch": float(np.abs(then - first).sum() / np.abs(first).sum()),
        "negative part": float(-first[first < 0].sum() / np.abs(first).sum()),
        "first": _thinned(first),
        "after an epoch": _thinned(then),
    }


def _thinned(values: Any) -> dict[str, list[float]]:
    """At most 200 eigenvalues, evenly in the log of their numbers."""
    numbers = np.unique(np.geomspace(1, len(values), 200).astype(int))
    return {"number": numbers.tolist(), "value": values[numbers - 1].tolist()}


def plot(
    path: Path,
    spectra: dict[str, Any],
    tails: dict[str, dict[str, Tail | None]],
    synthetic: Any,
) -> None:
    """The fitted curves, and panels for how an epoch moves the eigenvalues."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, *right) = plt.subplots(1, 4, figsize=(15, 3.8))
    after = spectra["labels"][0]
    positive = after[after > 1e-6 * after[0]]
    left.loglog(np.arange(1, len(positive) + 1), positive, "k", label="true", lw=2)
    for top, fits in tails.items():
        tail = fits["p+ by the sum"]
        if tail is not None and top in ("20", "100", "300"):
            numbers = np.arange(1, tail.count + 1)
            left.loglog(numbers, tail.at(numbers), label=f"curve through {top}")
    known = synthetic.positive
    left.loglog(
        np.arange(1, len(known) + 1), known, ":", label="top 100, synthetic probes"
    )
    left.set(xlabel="number of the eigenvalue", ylabel="eigenvalue", title="fitted")
    left.legend()
    for panel, (start, pair) in zip(right, spectra.items(), strict=True):
        for name, values in zip(("first", "after an epoch"), pair, strict=True):
            panel.plot(np.sort(values), np.linspace(0, 1, len(values)), label=name)
        panel.set(xlim=(-0.05, 0.05), xlabel="eigenvalue", ylabel="share below")
        panel.set_title(STARTS[start])
        panel.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
