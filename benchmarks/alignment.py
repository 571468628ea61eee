"""How near factors from probes come to those of the private images, in scale too.

    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/alignment.py    # measures
    PYTHONPATH=src python benchmarks/alignment.py --page               # writes the page

Five runs of dp-kfc on MNIST, looked at before, in the middle of and after training. For
every source of inputs and every layer, beside the private images with their own labels
(the oracle): the cosine of a factor, its relative Frobenius error, the same after both
were given one trace, and the ratio of traces. **The comparison is not private**; the
runs that it is about are. Seeds that are in the result are not measured again. Data:
``benchmarks/accuracy/accuracy.py prepare``.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "accuracy"))

import images  # noqa: E402

from curvedp import make_private, models  # noqa: E402
from curvedp.barrier import Provenance  # noqa: E402
from curvedp.curvature import DenseFactor, Estimate  # noqa: E402
from curvedp.diagnostics.geometry import Source, Study  # noqa: E402
from curvedp.diagnostics.geometry.alignment import (  # noqa: E402
    alignment,
    identity_factors,
)
from curvedp.probes import (  # noqa: E402
    ImageProbe,
    ModelLabels,
    OracleProbe,
    OwnLabels,
    PublicProbe,
    UniformLabels,
)
from curvedp.recipes import get_recipe  # noqa: E402

RESULT = HERE / "results" / "alignment_mnist.json"
PAGE = HERE.parent / "docs" / "results" / "alignment.md"
SHAPE, SEEDS = (1, 28, 28), range(5)
BATCH, SIZE, BATCHES = 256, 256, 4
LAYERS = ("convolution 1", "convolution 2", "linear 1", "linear 2")
NUMBERS = ("cosine", "relative error", "shape error", "scale")


@dataclass(frozen=True)
class DeadLeaves:
    """Discs that cover each other, of one grey each, as things in front of things.

    Radii follow ``r^-2.5`` from 1 pixel on. Batches have mean 0 and variance 1.
    """

    leaves: int = 60

    @property
    def provenance(self):
        return Provenance.SYNTHETIC

    def inputs(self, size, generator):
        side = SHAPE[1]
        along = torch.arange(float(side))
        picture = torch.zeros(size, 1, side, side)
        for _ in range(self.leaves):
            draw = torch.rand(size, 4, generator=generator)[..., None, None]
            radius = (1 - 0.97 * draw[:, 0]).pow(-1 / 1.5).clamp(max=side)
            far = (along[:, None] - side * draw[:, 1]).square()
            far = far + (along[None] - side * draw[:, 2]).square()
            grey = draw[:, 3:].expand_as(picture)
            picture = torch.where((far < radius.square())[:, None], grey, picture)
        return (picture - picture.mean()) / picture.std()

    def describe(self):
        return {"kind": "dead leaves", "leaves": self.leaves}


def grey_cifar(folder):
    """Grey, the middle 28 x 28, by public constants of its own."""
    x, _ = images.load(folder, "cifar10", "test", "cpu")
    mean, std = (torch.tensor(c).reshape(1, 3, 1, 1) for c in images.PIXELS["cifar10"])
    weights = torch.tensor(images.GREY).reshape(1, 3, 1, 1)
    grey = ((x * std + mean) * weights).sum(1, keepdim=True)[..., 2:-2, 2:-2]
    return ((grey - float((mean * weights).sum())) / 0.24).contiguous()


def sources(private, folder):
    """Name -> source; the first one is what the others are compared with."""
    unlabelled = {
        "FashionMNIST": images.load(folder, "fashion_mnist", "test", "cpu")[0],
        "grey CIFAR-10": grey_cifar(folder),
    }
    probes = {
        "pink noise, power 3": ImageProbe(SHAPE, 3.0),
        "pink noise, power 1": ImageProbe(SHAPE, 1.0),
        "white noise": ImageProbe(SHAPE, 0.0),
        "dead leaves": DeadLeaves(),
        **{
            name: PublicProbe(TensorDataset(x, torch.zeros(len(x))), name=name)
            for name, x in unlabelled.items()
        },
    }
    oracle, drawn = OracleProbe(private), ModelLabels()
    pairs = {
        "oracle": (oracle, OwnLabels()),
        "oracle, other images": (oracle, OwnLabels()),
        "private images, labels of the model": (oracle, drawn),
        **{name: (probe, drawn) for name, probe in probes.items()},
        "pink noise, power 3, uniform labels": (
            ImageProbe(SHAPE, 3.0), UniformLabels(),
        ),
    }  # fmt: skip
    return {
        name: Source(name, Estimate(probe, labels, SIZE, BATCHES))
        for name, (probe, labels) in pairs.items()
    }


def look(study, found, step):
    """``{source: {layer: {factor: numbers}}}`` at the present parameters."""
    names = list(found)
    factors = {
        name: study.factors(own, seed=1000 * k + step)
        for k, (name, own) in enumerate(found.items())
    }
    oracle = factors[names[0]]
    factors["identity"] = identity_factors(oracle)
    return {
        name: by_layer(own, oracle) for name, own in factors.items() if name != names[0]
    }


def by_layer(factors, oracle):
    rows = alignment(factors, oracle)
    weights = list(dict.fromkeys(row.layer for row in rows))
    assert len(weights) == len(LAYERS)
    told = dict(zip(weights, LAYERS, strict=True))
    result = {name: {} for name in LAYERS}
    for row in rows:
        traces = [
            trace_of(own.layers[row.layer], row.factor) for own in (factors, oracle)
        ]
        numbers = row.cosine, row.relative_error, row.shape_error, traces[0] / traces[1]
        result[told[row.layer]][row.factor] = [float(f"{v:.4g}") for v in numbers]
    return result


def trace_of(factor, kind):
    assert isinstance(factor, DenseFactor)
    a, g = float(factor.a.trace().sum()), float(factor.g.trace().sum())
    return {"A": a, "G": g, "F": a * g}[kind]


def measure(seed, folder):
    """One run, looked at three times."""
    x, y = images.load(folder, "mnist", "train", "cpu")
    data = TensorDataset(x, y)
    torch.manual_seed(seed)
    model = models.build("dpkfc-mnist", SHAPE, 10)
    recipe = get_recipe("dp-kfc")
    private = make_private(
        model, recipe.make_optimiser(model.parameters()), data, recipe=recipe,
        loss="cross-entropy", epsilon=1.0, delta=1e-5, batch_size=BATCH, epochs=1,
        physical_batch_size=BATCH + 32, seed=seed, unsafe_reproducible_noise=seed,
        journal=False,
    )  # fmt: skip
    study = Study.of(model, "cross-entropy", data)
    found = sources(data, folder)
    last = private.plan.sampling.steps
    seen = {0: look(study, found, 0)}
    model.train()
    for batch in private.loader:
        private.train_on(batch)
        if private.step in (last // 2, last) and private.step not in seen:
            seen[private.step] = look(study, found, private.step)
    return seen


# -- the page --------------------------------------------------------------------------


def table(result, factor, which, step):
    """Mean and spread over the seeds, layer by layer."""
    column = NUMBERS.index(which)
    runs = [run[step] for run in result["seeds"].values()]
    lines = [
        f"| source, {factor} | " + " | ".join(LAYERS) + " |",
        "|---|" + "--:|" * len(LAYERS),
    ]
    for name in runs[0]:
        cells = []
        for layer in LAYERS:
            values = [run[name][layer][factor][column] for run in runs]
            spread = statistics.stdev(values) if len(values) > 1 else math.nan
            cells.append(f"{_short(statistics.mean(values))} ± {_short(spread)}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _short(value):
    return f"{value:.2f}" if abs(value) < 9.995 else f"{value:.3g}"


def page(result):
    """Tables between the marks of the page; what stands around them stays."""
    steps = list(next(iter(result["seeds"].values())))
    parts = []
    for step in (steps[0], steps[-1]):
        parts.append(f"### Step {step}")
        for which in ("cosine", "relative error", "scale"):
            parts.append(f"{which.capitalize()}:")
            parts += [table(result, factor, which, step) for factor in ("A", "G")]
    parts.append(
        f"{len(result['seeds'])} seeds, mean ± standard deviation. "
        f"{result['machine']}, torch {result['torch']}; {result['date']}."
    )
    whole = PAGE.read_text(encoding="utf-8")
    begin, end = "<!-- alignment: begin -->", "<!-- alignment: end -->"
    head, _, rest = whole.partition(begin)
    _, _, tail = rest.partition(end)
    text = "\n\n".join(parts)
    PAGE.write_text(f"{head}{begin}\n\n{text}\n\n{end}{tail}", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=HERE / "data")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    options = parser.parse_args()
    result = {"seeds": {}}
    if RESULT.exists():
        stored = json.loads(RESULT.read_text(encoding="utf-8"))
        result = stored if "seeds" in stored else result
    if not options.page:
        for seed in SEEDS:
            if str(seed) in result["seeds"]:
                continue
            seen = measure(seed, options.data)
            result["seeds"][str(seed)] = {str(k): v for k, v in seen.items()}
            result |= {
                "private": False,
                "numbers": NUMBERS,
                "machine": platform.processor() or platform.machine(),
                "torch": torch.__version__,
                "date": time.strftime("%Y-%m-%d"),
            }
            RESULT.write_text(json.dumps(result) + "\n", encoding="utf-8")
            print(f"seed {seed}", file=sys.stderr, flush=True)
    if options.page:
        page(result)


if __name__ == "__main__":
    main()
