"""The recorded step on a GPU: the same numbers as without a graph, and how fast.

    PYTHONPATH=src python benchmarks/graph_check.py > results/graph_check.json

For each recipe and net, two runs with the same (reproducible, unsafe) noise, one of
them recorded: how far their parameters are apart after some steps, relative to how far
they moved. Then noise alone: equal seeds, other seeds, and the moments of what a replay
draws. Then five epochs of MNIST's size with and without a graph.
"""

from __future__ import annotations

import json
import platform
import sys
import time
import traceback

import torch
from torch import nn
from torch.utils.data import TensorDataset

from curvedp import make_private, models
from curvedp.noise.graphed import GraphedNormals

DEVICE = torch.device("cuda")
CASES = [
    ("dp-sgd", "dpkfc-mnist", (1, 28, 28), {}),
    ("dp-sgd", "dropout", (1, 28, 28), {}),
    ("dp-adam", "dpkfc-mnist", (1, 28, 28), {}),
    ("dp-kfc", "dpkfc-mnist", (1, 28, 28), {"refresh": 4}),
    ("dp-kfc", "dpkfc-mnist", (1, 28, 28), {"refresh": 4, "side": "both", "rank": 0}),
    ("dp-kfc", "vit", (3, 32, 32), {"refresh": 4}),
    ("dp-kfc", "wrn-16-4", (3, 32, 32), {"refresh": 4}),
    ("dp-ngd", "small-cnn", (3, 32, 32), {"refresh": 4}),
]


def network(name, shape):
    torch.manual_seed(0)
    if name != "dropout":
        return models.build(name, shape, 10).to(DEVICE)
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, 2), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(),
        nn.Linear(8 * 12 * 12, 10),
    ).to(DEVICE)  # fmt: skip


def attach(recipe, model, data, *, graph, steps, **options):
    return make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        data,
        recipe=recipe,
        loss="cross-entropy",
        noise_multiplier=0.9,
        sample_rate=256 / len(data),
        steps=steps,
        expected_batch_size=256,
        delta=1e-5,
        seed=1,
        unsafe_reproducible_noise=1,
        journal=False,
        cuda_graph=graph,
        **options,
    )


def examples(shape, count):
    random = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(count, *shape, device=DEVICE, generator=random)
    return TensorDataset(
        x, torch.randint(0, 10, (count,), device=DEVICE, generator=random)
    )


def trained(recipe, net, shape, options, *, graph, steps, data):
    model = network(net, shape)
    start = [p.detach().clone() for p in model.parameters()]
    private = attach(recipe, model, data, graph=graph, steps=steps, **options)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for number, batch in enumerate(private.loader):
        torch.manual_seed(number)  # for dropout
        private.train_on(batch)
    torch.cuda.synchronize()
    return start, list(model.parameters()), time.perf_counter() - began


def distance(these, others):
    pairs = zip(these, others, strict=True)
    squares = sum(
        float((a.detach() - b.detach()).double().norm()) ** 2 for a, b in pairs
    )
    return squares**0.5


def compare(recipe, net, shape, options, steps=10):
    data = examples(shape, 4096)
    row = {"recipe": recipe, "net": net, "options": options, "steps": steps}
    about = {"steps": steps, "data": data}
    start, plain, _ = trained(recipe, net, shape, options, graph=False, **about)
    _, again, _ = trained(recipe, net, shape, options, graph=False, **about)
    _, graphed, _ = trained(recipe, net, shape, options, graph=True, **about)
    moved = distance(start, plain)
    row["difference_of_a_graph"] = distance(plain, graphed) / moved
    row["difference_of_a_repetition"] = distance(plain, again) / moved
    return row


def noise():
    shapes = [torch.empty(s, device=DEVICE) for s in ((300, 200), (7,), ())]
    graph = GraphedNormals()

    def eager(seed):
        random = torch.Generator(DEVICE).manual_seed(seed)
        return [torch.randn(v.shape, device=DEVICE, generator=random) for v in shapes]

    drawn = {s: [v.clone() for v in graph.like(shapes, s)] for s in (3, 4, 2**62 + 5)}
    again = [v.clone() for v in graph.like(shapes, 3)]
    same = all(
        torch.equal(a, b)
        for s, d in drawn.items()
        for a, b in zip(d, eager(s), strict=True)
    )
    first, other = drawn[3][0].flatten(), drawn[4][0].flatten()
    correlation = torch.corrcoef(torch.stack([first, other]))[0, 1]
    return {
        "as_without_a_graph": same,
        "same_seed_same_noise": all(map(torch.equal, again, drawn[3])),
        "correlation_of_two_seeds": float(correlation),
        "mean": float(first.mean()),
        "std": float(first.std()),
    }


def five_epochs(recipe, options, steps):
    data = examples((1, 28, 28), 60_000)
    row = {"recipe": recipe, "options": options, "steps": 5 * (60_000 // 256)}
    for graph, own in ((False, steps), (True, row["steps"])):
        about = {"graph": graph, "steps": own, "data": data}
        *_, seconds = trained(recipe, "dpkfc-mnist", (1, 28, 28), options, **about)
        name = "graphed" if graph else "eager"
        row[f"{name}_ms_a_step"] = 1e3 * seconds / own
        if graph:
            row["graphed_seconds"] = seconds
    return row


def kernels(recipe, options):
    """Launches and milliseconds of the GPU in a recorded step."""
    data = examples((1, 28, 28), 60_000)
    model = network("dpkfc-mnist", (1, 28, 28))
    private = attach(recipe, model, data, graph=True, steps=40, **options)
    for number, batch in enumerate(private.loader):
        if number == 20:
            profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA]
            )
            profiler.__enter__()
        private.train_on(batch)
    torch.cuda.synchronize()
    profiler.__exit__(None, None, None)
    events = profiler.key_averages()
    time_of = {e.key: e.device_time_total / 20 for e in events}
    top = sorted(time_of.items(), key=lambda item: -item[1])[:12]
    return {
        "launches_a_step": sum(e.count for e in events) / 20,
        "gpu_us_a_step": sum(time_of.values()),
        "top_us": {name[:90]: round(us, 1) for name, us in top},
    }


def guarded(work, *args):
    try:
        return work(*args)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[:400]}


def main():
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "noise": guarded(noise),
        "comparisons": [],
        "five_epochs": [],
    }
    print(json.dumps(result["noise"]), file=sys.stderr)
    for recipe, options in (
        ("dp-sgd", {}), ("dp-kfc", {}), ("dp-kfc", {"refresh": 0}),
    ):  # fmt: skip
        row = guarded(five_epochs, recipe, options, 60)
        row["kernels"] = guarded(kernels, recipe, options)
        result["five_epochs"].append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    for case in CASES:
        row = guarded(compare, *case)
        result["comparisons"].append(row)
        print(case[:2], json.dumps(row), file=sys.stderr, flush=True)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
