"""Accuracy of the recipes at equal privacy: tune on a validation split, test once.

    python accuracy.py prepare DATA              # once: plain copies of the data sets
    python accuracy.py tune DATA RESULTS         # opens the training files only
    python accuracy.py choose RESULTS            # best trial of every arm, fixed
    python accuracy.py test DATA RESULTS         # one pass over the test files
    python accuracy.py tables RESULTS            # docs/results

Every command can be stopped and called again: results are lines of a file, and what is
there is not run again. ``tune`` and ``test`` take ``--workers`` and ``--seconds``.

Poisson sampling, PLD, zero-out adjacency (the size is public). Tuning trains on 55 000
examples and scores on the other 5 000; each trial has one seed, and the best three of
an arm get two more. Noise multipliers are in ``sigmas.json``, made by ``calibrate``, so
that a machine without dp-accounting can train. A seed varies initialisation, sampling
and noise, and is the same for all arms.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import random
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from arms import ARMS, TABLES, inside, trials  # noqa: E402

HELD_OUT = 5000
TUNING_SEED, MORE_SEEDS, TEST_SEEDS = 100, (101, 102), (0, 1, 2, 3, 4)
#: Fewer only to see whether everything runs.
MOST_STEPS = int(os.environ.get("MOST_STEPS", "1000000"))
#: Public constants of the data sets: mean and standard deviation of a pixel.
PIXELS = {"mnist": (0.1307, 0.3081), "fashion_mnist": (0.2860, 0.3530)}


# -- jobs ------------------------------------------------------------------------------


def key(job):
    text = json.dumps(job, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tuning_jobs(done):
    """All trials; when an arm has all of them, more seeds for its best three."""
    jobs = []
    for table, about in TABLES.items():
        for arm in about["arms"]:
            own = [
                {"table": table, "arm": arm, "phase": "tune", "seed": TUNING_SEED,
                 "settings": settings}
                for settings in trials(table, arm)
            ]  # fmt: skip
            jobs += own
            scores = {key(j): done[key(j)]["accuracy"] for j in own if key(j) in done}
            if len(scores) == len({key(j) for j in own}):
                best = sorted(own, key=lambda j: -scores[key(j)])[:3]
                jobs += [{**j, "seed": s} for j in best for s in MORE_SEEDS]
    return jobs


def choose(done):
    """For every arm the settings with the best mean over three seeds."""
    chosen = {}
    for table, about in TABLES.items():
        for arm in about["arms"]:
            best = []
            for settings in trials(table, arm):
                scores = []
                for seed in (TUNING_SEED, *MORE_SEEDS):
                    job = {"table": table, "arm": arm, "phase": "tune", "seed": seed,
                           "settings": settings}  # fmt: skip
                    if key(job) in done:
                        scores.append(done[key(job)]["accuracy"])
                if len(scores) == 3:
                    best.append((statistics.mean(scores), settings))
            if not best:
                continue
            score, settings = max(best, key=lambda item: item[0])
            chosen.setdefault(table, {})[arm] = {
                "validation": score,
                "settings": settings,
                "inside": inside(arm, settings),
            }
    return chosen


def test_jobs(chosen):
    return [
        {"table": table, "arm": arm, "phase": "test", "seed": seed,
         "settings": own["settings"]}
        for table, arms in chosen.items()
        for arm, own in arms.items()
        for seed in TEST_SEEDS
    ]  # fmt: skip


# -- training --------------------------------------------------------------------------


def load(folder, data, part, device):
    """``part``: "train" or "test"; each is a file of its own."""
    with np.load(Path(folder) / f"{data}_{part}.npz") as arrays:
        mean, std = PIXELS[data]
        x = torch.from_numpy(arrays["x"]).float().div_(255).sub_(mean).div_(std)
        y = torch.from_numpy(arrays["y"]).long()
    return x.to(device), y.to(device)


def split(x, y):
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(x)))
    held, kept = order[:HELD_OUT].to(x.device), order[HELD_OUT:].to(x.device)
    return (x[kept], y[kept]), (x[held], y[held])


def train(job, folder, device):
    from curvedp import make_private, models
    from curvedp.recipes import get_recipe

    about = TABLES[job["table"]]
    x, y = load(folder, about["data"], "train", device)
    if job["phase"] == "tune":
        (x, y), (xt, yt) = split(x, y)
    else:
        xt, yt = load(folder, about["data"], "test", device)
    sigma, rate, steps = noise(about, len(x))
    settings = dict(job["settings"])
    recipe = get_recipe(settings.pop("recipe")).configure(**settings)
    torch.manual_seed(job["seed"])
    model = models.build(about["model"], tuple(x.shape[1:]), 10).to(device)
    private = make_private(
        model,
        recipe.make_optimiser(model.parameters()),
        TensorDataset(x, y),
        recipe=recipe,
        loss="cross-entropy",
        noise_multiplier=sigma,
        sample_rate=rate,
        steps=steps,
        expected_batch_size=about["batch_size"],
        delta=about["delta"],
        relation="zero-out",
        seed=job["seed"],
        # paired seeds of an experiment on public benchmark data
        unsafe_reproducible_noise=job["seed"],
        journal=False,
    )
    started = time.monotonic()
    for xb, yb in private.loader:
        if private.step >= MOST_STEPS:
            break
        private.optimizer.zero_grad()
        private.loss(private.model(xb), yb).backward()
        private.optimizer.step()
    seconds = time.monotonic() - started
    model.eval()
    with torch.no_grad():
        right = [
            (model(a).argmax(1) == b).sum()
            for a, b in zip(xt.split(1000), yt.split(1000), strict=True)
        ]
    accuracy = float(torch.stack(right).sum()) / len(yt)
    return {"accuracy": accuracy, "sigma": sigma, "steps": steps, "seconds": seconds}


def noise(about, size):
    rate = about["batch_size"] / size
    steps = about["epochs"] * (size // about["batch_size"])
    stored = json.loads((HERE / "sigmas.json").read_text(encoding="utf-8"))
    return stored[sigma_key(about, size, steps)], rate, steps


def sigma_key(about, size, steps):
    return f"{about['epsilon']}/{about['delta']}/{about['batch_size']}/{size}/{steps}"


def calibrate():
    """Write every noise multiplier that the tables need."""
    from curvedp.accounting import calibrate_sigma

    found = {}
    for about in TABLES.values():
        for size in (60_000, 60_000 - HELD_OUT):
            steps = about["epochs"] * (size // about["batch_size"])
            found[sigma_key(about, size, steps)] = calibrate_sigma(
                about["epsilon"],
                sample_rate=about["batch_size"] / size,
                steps=steps,
                delta=about["delta"],
                relation="zero-out",
            )
    text = json.dumps(found, indent=1)
    (HERE / "sigmas.json").write_text(text + "\n", encoding="utf-8")


# -- running ---------------------------------------------------------------------------


def read(path):
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    return {record["key"]: record for record in map(json.loads, lines)}


def _one(task):
    job, folder, device = task
    torch.set_num_threads(1)
    try:
        return {"key": key(job), **job, **train(job, folder, device)}
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        return {"key": key(job), **job, "accuracy": 0.0, "error": told}


def work(jobs_of, path, folder, device, workers, seconds):
    """Run what is missing; ``jobs_of(done)`` may give more when some are done."""
    deadline = time.monotonic() + seconds
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        while time.monotonic() < deadline:
            done = read(path)
            missing = {key(j): j for j in jobs_of(done) if key(j) not in done}
            if not missing:
                return
            tasks = [(job, folder, device) for job in missing.values()]
            random.Random(0).shuffle(tasks)  # all arms advance alike
            found = pool.imap_unordered(_one, tasks)
            for _ in tasks:
                try:
                    record = found.next(timeout=max(0.1, deadline - time.monotonic()))
                except multiprocessing.TimeoutError:
                    return
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
                told = record.get("error", record["accuracy"])
                print(record["table"], record["arm"], told, file=sys.stderr, flush=True)


def prepare(folder, source):
    """Plain copies, one file for training and one for testing."""
    sys.path.insert(0, str(source))
    import load_data

    Path(folder).mkdir(parents=True, exist_ok=True)
    for data in PIXELS:
        pair = getattr(load_data, data)()
        for part, (x, y) in zip(("train", "test"), pair, strict=True):
            x = np.asarray(x).reshape(-1, 1, 28, 28).astype(np.uint8)
            np.savez_compressed(Path(folder) / f"{data}_{part}.npz", x=x, y=y)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "command", choices=["prepare", "calibrate", "tune", "choose", "test", "tables"]
    )
    parser.add_argument("--data", type=Path, default=HERE.parent / "data")
    parser.add_argument("--source", type=Path, help="folder with load_data.py")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    results = options.results
    results.mkdir(parents=True, exist_ok=True)
    about = (options.data, options.device, options.workers, options.seconds)
    if options.command == "prepare":
        prepare(options.data, options.source)
    elif options.command == "calibrate":
        calibrate()
    elif options.command == "tune":
        work(tuning_jobs, results / "tuning.jsonl", *about)
        machine(results, options.device)
    elif options.command == "choose":
        text = json.dumps(choose(read(results / "tuning.jsonl")), indent=1)
        (results / "chosen.json").write_text(text + "\n", encoding="utf-8")
    elif options.command == "test":
        chosen = json.loads((results / "chosen.json").read_text(encoding="utf-8"))
        work(lambda _: test_jobs(chosen), results / "test.jsonl", *about)
    else:
        from tables import write

        write(results)


def machine(results, device):
    about = {
        "device": torch.cuda.get_device_name() if "cuda" in device else "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "trials": {arm: len(trials(next(iter(TABLES)), arm)) for arm in ARMS},
    }
    text = json.dumps(about, indent=1)
    (results / "machine.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
