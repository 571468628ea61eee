"""Federated methods against each other: DP-FedSOFIM's table, and whitening clients.

Two studies with 20 clients, which send one clipped gradient a round: of all their
records, or in the second of a tenth that each draws in secret.

cifar    CIFAR-10, features of a frozen ResNet-20 that was trained on CIFAR-100, linear
         head, 70 rounds: the setting of DP-FedSOFIM's table 1. Under its account (every
         client's update is seen, records are replaced) and under the tight one (the sum
         is seen, records are added or removed).
fashion  FashionMNIST, a small CNN, epsilon 2 under the tight account: does it help if
         clients whiten before they clip? IID, and classes split by Dirichlet(0.3).

    python federated.py prepare --source DATA --folder plain
    python federated.py noise
    python federated.py tune cifar --folder plain
    python federated.py choose
    python federated.py final cifar --folder plain
    python federated.py page

Every run is one line of JSON in ``results``; what is there is not run again.
``--part 1/4`` runs every fourth, for several processes, and ``--out`` gives each a file
of its own; put together they are one. Tuning opens the training
files alone and scores 5000 held-out records of them; ``final`` trains on all and scores
the test files once for each seed. ``--only account=tight --only epsilon=1`` runs a part
of the study first. It needs torch, numpy and scipy; the noise comes from
``benchmarks/results/federated_noise.json``, which ``noise`` writes.

Where all clients declare the same size, the mean of their updates is the clipped sum of
all records with the sum of their noise, whoever holds which record. Such runs use one
client with all records and all noise (``--apart`` for 20, which gives the same law; so
a Dirichlet split changes nothing there). Where clients declare their own sizes, as in
the rows "own sizes", every client is run.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from page import page, plot
from records import prepare
from studies import ARMS, NOISE_FILE, groups, trials, write_noise
from training import run

SEEDS = 5
HERE = Path(__file__).parent
RESULTS, DOCS = HERE / "results", HERE.parents[1] / "docs"


def key_of(line):
    named = ("study", "arm", "account", "epsilon", "split", "settings", "seed")
    return json.dumps([line[name] for name in named], sort_keys=True)


def group_of(line):
    named = ("study", "arm", "account", "epsilon", "split")
    return json.dumps([line[name] for name in named])


def read_lines(path):
    if not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue  # cut off when the run was stopped
    return lines


def run_all(specs, out, part, **how):
    done = {key_of(line) for line in read_lines(out)}
    index, count = (int(n) for n in part.split("/"))
    mine = [s for i, s in enumerate(specs) if i % count == index - 1]
    left = [s for s in mine if key_of(s) not in done]
    print(f"{len(mine)} runs, {len(left)} to do", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.exists() and not out.read_text().endswith("\n"):
        with out.open("a") as file:
            file.write("\n")  # after a line that was cut off
    for number, spec in enumerate(left, start=1):
        line = run(spec, **how)
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        told = f"{spec['arm']}, {spec['account']}, eps {spec['epsilon']:g}"
        print(
            f"{number}/{len(left)} {told}, step {spec['step']:g}: "
            f"{line['accuracy']:.4f} in {line['seconds']:.1f} s",
            flush=True,
        )


def tuning_specs(study, seeds):
    for group in groups(study):
        for trial in trials(group):
            for seed in range(seeds):
                yield {**group, **trial, "seed": 100 + seed}


def final_specs(study, chosen, seeds):
    for group in groups(study):
        best = chosen.get(group_of(group))
        if best is None:
            print(f"not tuned: {group}", file=sys.stderr)
            continue
        for seed in range(seeds):
            yield {
                **group, "step": best["step"], "settings": best["settings"],
                "seed": seed,
            }  # fmt: skip


def is_wanted(spec, only):
    """Whether a run has one of the values given for each name; all without any."""
    allowed = {}
    for pair in only:
        name, _, value = pair.partition("=")
        allowed.setdefault(name, []).append(value)
    return all(_text(spec[name]) in values for name, values in allowed.items())


def _text(value):
    return f"{value:g}" if isinstance(value, float) else str(value)


def choose(lines):
    """The best mean of the held-out accuracy for each group."""
    by_group = {}
    for line in lines:
        trial = json.dumps([line["step"], line["settings"]], sort_keys=True)
        by_group.setdefault(group_of(line), {}).setdefault(trial, []).append(line)
    chosen = {}
    for group, tried in by_group.items():
        mean = {t: statistics.fmean(r["accuracy"] for r in runs)
                for t, runs in tried.items()}  # fmt: skip
        best = max(mean, key=lambda t: mean[t])
        first = tried[best][0]
        steps = sorted({runs[0]["step"] for runs in tried.values()})
        chosen[group] = {
            "step": first["step"], "settings": first["settings"],
            "accuracy": mean[best], "trials": len(tried),
            "inside": steps[0] < first["step"] < steps[-1],
        }  # fmt: skip
    return chosen


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("prepare")
    made.add_argument("--source", type=Path, required=True)
    made.add_argument("--folder", type=Path, required=True)
    commands.add_parser("noise")
    for name in ("tune", "final"):
        own = commands.add_parser(name)
        own.add_argument("study", choices=sorted(ARMS))
        own.add_argument("--folder", type=Path, required=True)
        own.add_argument("--out", type=Path, default=RESULTS / f"{name}.jsonl")
        own.add_argument("--device", default="cpu")
        own.add_argument("--part", default="1/1")
        own.add_argument("--only", action="append", default=[], metavar="NAME=VALUE")
        own.add_argument("--rounds", type=int, help="for a quick look")
        own.add_argument("--rows", type=int, help="rows of a pass")
        own.add_argument("--seeds", type=int, default=1 if name == "tune" else SEEDS)
        own.add_argument("--apart", action="store_true")
    commands.add_parser("choose")
    commands.add_parser("page")
    asked = parser.parse_args()
    if asked.command == "prepare":
        prepare(asked.source, asked.folder)
    elif asked.command == "noise":
        write_noise(NOISE_FILE)
    elif asked.command == "choose":
        chosen = choose(read_lines(RESULTS / "tune.jsonl"))
        _write(RESULTS / "chosen.json", chosen)
    elif asked.command == "page":
        lines = read_lines(RESULTS / "final.jsonl")
        chosen = json.loads((RESULTS / "chosen.json").read_text())
        machines = {
            name: json.loads(path.read_text())
            for study in ARMS
            for name in (study, f"{study}_gpu")
            if (path := RESULTS / f"machine_{name}.json").exists()
        }
        tuned = read_lines(RESULTS / "tune.jsonl")
        text = "\n".join(page(lines, chosen, machines, tuned))
        (DOCS / "results" / "federated.md").write_text(text, encoding="utf-8")
        plot(lines, DOCS / "images" / "federated.png")
    else:
        _run(asked)


def _run(asked):
    """``tune`` or ``final``."""
    final = asked.command == "final"
    if final:
        chosen = json.loads((RESULTS / "chosen.json").read_text())
        specs = final_specs(asked.study, chosen, asked.seeds)
    else:
        specs = tuning_specs(asked.study, asked.seeds)
    wanted = [spec for spec in specs if is_wanted(spec, asked.only)]
    run_all(
        wanted, asked.out, asked.part, folder=str(asked.folder), device=asked.device,
        final=final, apart=asked.apart, rounds=asked.rounds, rows=asked.rows,
    )  # fmt: skip
    on_gpu = "cuda" in asked.device
    machine = {
        "device": torch.cuda.get_device_name() if on_gpu else "two CPU cores",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    name = f"{asked.study}_gpu" if on_gpu else asked.study
    _write(RESULTS / f"machine_{name}.json", machine)


def _write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
