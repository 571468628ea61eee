"""Accuracy of the recipes at equal privacy: tune on a validation split, test once.

    python accuracy.py prepare --source FOLDER   # once: plain copies of the data sets
    python accuracy.py pretrain --source FOLDER  # once: where some tables start
    python accuracy.py calibrate                 # noise multipliers that are missing
    python accuracy.py tune                      # opens the training files only
    python accuracy.py choose                    # best trial of every arm, fixed
    python accuracy.py test                      # one pass over the test files
    python accuracy.py ablate                    # around what was chosen; no test
    python accuracy.py tables                    # docs/results, of what is there

Every command can be stopped and called again: results are lines of a file, and what is
there is not run again. ``tune``, ``test`` and ``ablate`` take ``--workers``,
``--seconds`` and ``--tables``: names of tables or pages, or how names begin.

Poisson sampling, PLD, zero-out adjacency (the size is public). Tuning scores on 5 000
of the training examples and trains on the others; each trial has one seed, and the best
three of an arm get two more. Noise multipliers are in ``sigmas.json``, so that a
machine without dp-accounting can train. A seed varies initialisation, sampling and
noise, and is the same for all arms.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import multiprocessing
import platform
import random
import statistics
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import ablation  # noqa: E402
from arms import TABLES, inside, trials  # noqa: E402
from correlated import same_run  # noqa: E402

TUNING_SEED, MORE_SEEDS = 100, (101, 102)


# -- jobs ------------------------------------------------------------------------------


def key(job):
    text = json.dumps(job, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tuning_jobs(tables, done, arms=None):
    """All trials; when an arm has all of them, more seeds for its best ones."""
    return [
        job
        for table in tables
        if TABLES[table].tuned_in is None
        for arm in arms or TABLES[table].arms
        for job in _arm_jobs(table, arm, done)
    ]


def _arm_jobs(table, arm, done):
    runs = [same_run(arm, settings) for settings in trials(table, arm)]
    own = [
        {"table": table, "arm": run, "phase": "tune", "seed": TUNING_SEED,
         "settings": settings}
        for run, settings in runs
    ]  # fmt: skip
    scores = {key(j): done[key(j)]["accuracy"] for j in own if key(j) in done}
    if len(scores) < len({key(j) for j in own}):
        return own
    best = sorted(own, key=lambda j: -scores[key(j)])[: TABLES[table].finalists]
    return own + [{**j, "seed": s} for j in best for s in MORE_SEEDS]


def choose(done):
    """For every arm whose search is complete, the best mean over three seeds."""
    chosen = {}
    for table, about in TABLES.items():
        if about.tuned_in is not None:
            continue
        for arm in about.arms:
            jobs = _arm_jobs(table, arm, done)
            if any(key(job) not in done for job in jobs):
                continue
            scores = {}
            for job in jobs:
                own = scores.setdefault(json.dumps(job["settings"]), {})
                own[job["seed"]] = done[key(job)]["accuracy"]
            means = {
                text: statistics.mean(by_seed.values())
                for text, by_seed in scores.items()
                if len(by_seed) == (1 + len(MORE_SEEDS) if about.finalists else 1)
            }
            best = max(means, key=means.__getitem__)
            settings = json.loads(best)
            chosen.setdefault(table, {})[arm] = {
                "validation": means[best],
                "settings": settings,
                "inside": inside(table, arm, settings),
            }
    return chosen


def test_jobs(chosen, tables):
    """Chosen arms and the rows beside them, with the table's paired seeds."""
    return [
        {"table": table, "arm": row, "phase": "test", "seed": seed,
         "settings": settings}
        for table in tables
        for row, settings in rows(chosen, table).items()
        for seed in range(TABLES[table].seeds)
    ]  # fmt: skip


def rows(chosen, table):
    """Name of a row -> its settings."""
    about = TABLES[table]
    arms = chosen.get(about.tuned_in or table, {})
    found = {arm: own["settings"] for arm, own in arms.items()}
    for name, (arm, changed) in about.untuned.items():
        if arm in found:
            found[name] = {**found[arm], **changed}
    return found


def selected(names):
    """Tables whose name or page is given, or whose name begins so; None takes all."""
    found = [
        table
        for table, about in TABLES.items()
        if names is None
        or any(about.page == name or table.startswith(name) for name in names)
    ]
    if not found:
        sys.exit(f"no table is called {' or '.join(names)}; there are: "
                 + "; ".join(TABLES))  # fmt: skip
    return found


# -- running ---------------------------------------------------------------------------


def read(path):
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    return {record["key"]: record for record in map(json.loads, lines)}


def _one(task):
    from training import train

    job, folder, device = task
    gc.collect()
    torch.cuda.empty_cache()  # what an earlier job's graphs have left
    try:
        return {"key": key(job), **job, **train(job, folder, device)}
    except Exception as error:  # not a result: it is run again by the next call
        told = f"{type(error).__name__}: {error}"
        return {**job, "failed": told}


def work(jobs_of, path, folder, device, workers, seconds):
    """Run what is missing; ``jobs_of(done)`` may give more when some are done.

    Returns how many results are new.
    """
    deadline = time.monotonic() + seconds
    new = 0
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, torch.set_num_threads, (1,)) as pool:
        while time.monotonic() < deadline:
            done, before = read(path), new
            missing = {key(j): j for j in jobs_of(done) if key(j) not in done}
            tasks = [(job, folder, device) for job in missing.values()]
            random.Random(0).shuffle(tasks)  # all arms advance alike
            tasks.sort(key=_longest_first(done))  # or the last one is waited for
            found = pool.imap_unordered(_one, tasks)
            for _ in tasks:
                try:
                    record = found.next(timeout=max(0.1, deadline - time.monotonic()))
                except multiprocessing.TimeoutError:
                    return new
                told = record.get("failed", record.get("error"))
                if "failed" not in record:
                    new += 1
                    told = told or f"{record['accuracy']:.4f} {record['seconds']:.0f} s"
                    with path.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(record) + "\n")
                print(record["table"], record["arm"], told, file=sys.stderr, flush=True)
            if new == before:  # nothing is missing, or all that is fails
                return new
    return new


def _longest_first(done):
    """Order of tasks: by the mean time of their arm so far, those without one last."""
    times = {}
    for record in done.values():
        times.setdefault(record["arm"], []).append(record["seconds"])
    return lambda task: -statistics.mean(times.get(task[0]["arm"], [0]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = ["prepare", "pretrain", "calibrate", "tune", "choose", "test"]
    commands += ["ablate", "tables"]
    parser.add_argument("command", choices=commands)
    parser.add_argument("--data", type=Path, default=HERE.parent / "data")
    parser.add_argument("--source", type=Path, help="folder with load_data.py")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--pages", type=Path, default=HERE.parents[1] / "docs/results")
    parser.add_argument("--tables", nargs="+", help="names, pages or how names begin")
    parser.add_argument("--arms", nargs="+", help="of tune: some of the tables' arms")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    if options.command == "prepare":
        from images import prepare

        prepare(options.data, options.source)
    elif options.command == "pretrain":
        import starts

        for name in starts.STARTS:
            starts.make(name, options.source)
    elif options.command == "calibrate":
        from training import calibrate

        calibrate()
    elif options.command == "choose":
        chosen = choose(read(options.results / "tuning.jsonl"))
        _write(options.results / "chosen.json", chosen)
    elif options.command == "tables":
        from tables import write

        write(options.results, options.pages)
    else:
        _run(options)


def _run(options):
    """``tune``, ``test`` or ``ablate``."""
    results, tables = options.results, selected(options.tables)
    about = (options.data, options.device, options.workers, options.seconds)
    if options.command == "tune":
        new = work(lambda done: tuning_jobs(tables, done, options.arms),
                   results / "tuning.jsonl", *about)  # fmt: skip
        pages = {TABLES[table].page for table in tables} if new else set()
    else:
        chosen = json.loads((results / "chosen.json").read_text(encoding="utf-8"))
    if options.command == "test":
        new = work(lambda _: test_jobs(chosen, tables), results / "test.jsonl", *about)
        pages = {TABLES[table].page for table in tables} if new else set()
    elif options.command == "ablate":
        own = [table for table in ablation.TABLES_OF if table in tables]
        new = work(lambda done: ablation.jobs(chosen, own, done, key),
                   results / "ablation.jsonl", *about)  # fmt: skip
        pages = {"ablation"} if new else set()
    machine = {
        "device": torch.cuda.get_device_name() if "cuda" in options.device else "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    for page in pages:
        _write(results / machine_file(page), machine)


def machine_file(page):
    """Where and when the results of a page were made last."""
    return "machine.json" if page == "accuracy" else f"machine_{page}.json"


def _write(path, value):
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
