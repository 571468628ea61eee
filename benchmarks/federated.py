"""Federated methods against each other: DP-FedSOFIM's table, and whitening clients.

Two studies, both with 20 clients that take one gradient of all their records a round:

cifar    CIFAR-10, features of a frozen ResNet-20 that was trained on CIFAR-100, linear
         head, 70 rounds: the setting of DP-FedSOFIM's table 1. Under its account (every
         client's update is seen, records are replaced) and under the tight one (the sum
         is seen, records are added or removed).
fashion  FashionMNIST, a small CNN, epsilon 2 under the tight account: does it help if
         clients whiten before they clip? IID, and classes split by Dirichlet(0.3).

    python benchmarks/federated.py prepare --source DATA --folder plain
    python benchmarks/federated.py noise
    python benchmarks/federated.py tune cifar --folder plain --out tune.jsonl
    python benchmarks/federated.py choose tune.jsonl --out chosen.json
    python benchmarks/federated.py final cifar --folder plain --chosen chosen.json \
        --out final.jsonl
    python benchmarks/federated.py table final.jsonl

Every run is one line of JSON; what is in the file is not run again. ``--part 1/4`` runs
every fourth, for several processes with files of their own. Tuning opens the training
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
import math
import statistics
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np
import torch

from curvedp.barrier import Relation
from curvedp.data import ArrayDataset
from curvedp.federated import (
    Client,
    FederatedPlan,
    Federation,
    Server,
    Shared,
    View,
)
from curvedp.federated.partition import dirichlet_partition, iid_partition
from curvedp.federated.rounds import asking, run_rounds
from curvedp.layers import Batch
from curvedp.models import build
from curvedp.recipes import get_federated_recipe

CLIENTS, DELTA, HELD_OUT, SEEDS = 20, 1e-5, 5000, 5
ROUNDS = {"cifar": 70, "fashion": 100}
#: Rows of a pass: the linear head takes all at once.
ROWS = {"cifar": 65536, "fashion": 4096}
NOISE_FILE = Path(__file__).parent / "results" / "federated_noise.json"
#: Epsilons of the study; infinity is the row without noise.
EPSILONS = {"cifar": (0.5, 1.0, 2.0, 5.0, 10.0, math.inf), "fashion": (2.0,)}
#: View and relation of an account.
ACCOUNTS = {
    "paper": (View.of("each-client"), Relation.REPLACE_ONE),
    "tight": (View.of("trusted-aggregate"), Relation.ADD_REMOVE),
}
#: Smallest part of a Dirichlet split: a record of a tiny client would need much noise.
LEAST = 500
#: lr / rho, lr / (1 - momentum): by how much a constant gradient moves in a round.
STEPS = tuple(0.05 * 2**k for k in range(10))
ADAM_RATES = tuple(0.001 * 2**k for k in range(8))
RHO, MOMENTUM = 0.5, 0.9


# -- arms ------------------------------------------------------------------------------


def _plain(step):
    return {"learning_rate": step}


def _momentum(step):
    return {"learning_rate": step * (1 - MOMENTUM), "momentum": MOMENTUM}


def _sofim(step):
    return {"learning_rate": step * RHO, "rho": RHO, "beta": MOMENTUM}


#: recipe, mode, settings of a step, steps, and further settings that are tuned.
_CLIPS = ({"clip_norm": 10.0}, {"clip_norm": 2.0})
_FLAT_OR_NOT = (
    {"clipping": "flat", "clip_norm": 1.0},
    {"clipping": "normalised", "clip_norm": 1.0},
)
ARMS = {
    "cifar": {
        "fedgd": ("dp-fedgd", None, _plain, STEPS, _CLIPS),
        "momentum": ("dp-fedgd+momentum", None, _momentum, STEPS, _CLIPS),
        "sofim (paper)": ("dp-fedsofim", None, _sofim, STEPS, _CLIPS),
        "sofim (code)": ("dp-fedsofim", "code", _sofim, STEPS, _CLIPS),
        "fedadam": ("dp-fedadam", None, _plain, ADAM_RATES, _CLIPS),
        "fedyogi": ("dp-fedyogi", None, _plain, ADAM_RATES, _CLIPS),
    },
    "fashion": {
        "fedgd": ("dp-fedgd", None, _plain, STEPS, _FLAT_OR_NOT),
        "momentum": ("dp-fedgd+momentum", None, _momentum, STEPS, _FLAT_OR_NOT),
        "fedkfc": (
            "dp-fedkfc",
            None,
            _momentum,
            STEPS,
            ({"damping": 0.05}, {"damping": 0.2}),
        ),
    },
}


def groups(study):
    """What a choice of settings is made for: (arm, account, epsilon, split)."""
    accounts = ("paper", "tight") if study == "cifar" else ("tight",)
    splits = ("iid",) if study == "cifar" else ("iid", "dirichlet, own sizes")
    for arm in ARMS[study]:
        for split in splits:
            for epsilon in EPSILONS[study]:
                # without noise there is nothing to account for
                for account in accounts if math.isfinite(epsilon) else ("none",):
                    yield {
                        "study": study, "arm": arm, "account": account,
                        "epsilon": epsilon, "split": split,
                    }  # fmt: skip


def trials(group):
    """Settings that are tried for a group, the same number for every arm."""
    _, _, of_step, steps, further = ARMS[group["study"]][group["arm"]]
    for more in further:
        for step in steps:
            yield {"step": step, "settings": {**of_step(step), **more}}


# -- noise -----------------------------------------------------------------------------


def write_noise(path):
    """Noise over what a record moves, in one round, that each epsilon takes."""
    found = {}
    for study, epsilons in EPSILONS.items():
        for relation in ("add-remove", "replace-one"):
            for epsilon in filter(math.isfinite, epsilons):
                one = Federation((1000.0,), ROUNDS[study], relation=Relation(relation))
                plan = FederatedPlan.make(
                    one, "trusted-aggregate", bound=1.0, delta=DELTA, epsilon=epsilon
                )  # fmt: skip
                found[f"{study} {relation} {epsilon:g}"] = plan.noise_multiplier
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n")


@cache
def _noise_table():
    return json.loads(NOISE_FILE.read_text())


def noise_for(group, sizes):
    """The multiplier of a group, for clients that declare these sizes."""
    if not math.isfinite(group["epsilon"]):
        return 1e-9
    view, relation = ACCOUNTS[group["account"]]
    name = f"{group['study']} {relation.value} {group['epsilon']:g}"
    federation = Federation(tuple(sizes), ROUNDS[group["study"]], relation=relation)
    return _noise_table()[name] / federation.seen_noise(view, 1.0)


# -- data ------------------------------------------------------------------------------


def prepare(source, folder):
    """Plain copies: features of CIFAR-10, and FashionMNIST."""
    sys.path.insert(0, str(source))
    import load_data

    folder.mkdir(parents=True, exist_ok=True)
    for part, (x, y) in zip(("train", "test"), load_data.fashion_mnist(), strict=True):
        images = np.asarray(x, dtype=np.uint8).reshape(-1, 1, 28, 28)
        np.savez_compressed(folder / f"fashion_{part}.npz", x=images, y=y)
    weights = {
        name: torch.from_numpy(np.asarray(value, dtype=np.float32))
        for name, value in load_data.weights("cifar100_resnet20").items()
    }
    mean = torch.tensor((0.5070, 0.4865, 0.4409)).reshape(1, 3, 1, 1)
    std = torch.tensor((0.2673, 0.2564, 0.2761)).reshape(1, 3, 1, 1)
    for part, (x, y) in zip(("train", "test"), load_data.cifar10(), strict=True):
        features = []
        with torch.no_grad():
            for start in range(0, len(x), 500):
                images = torch.from_numpy(np.asarray(x[start : start + 500])).float()
                features.append(
                    resnet_20_features(weights, (images / 255 - mean) / std)
                )
        found = torch.cat(features).numpy()
        np.savez_compressed(folder / f"cifar_{part}.npz", x=found, y=y)


def resnet_20_features(weights, x):
    """The 64 features before the last layer, batch norm as it was trained."""

    def norm(x, name):
        own = {
            k: weights[f"{name}.{k}"]
            for k in ("running_mean", "running_var", "weight", "bias")
        }
        return torch.nn.functional.batch_norm(x, **own, training=False)

    def conv(x, name, stride=1, padding=1):
        kernel = weights[f"{name}.weight"]
        return torch.nn.functional.conv2d(x, kernel, stride=stride, padding=padding)

    x = norm(conv(x, "conv1"), "bn1").relu()
    for layer in (1, 2, 3):
        for block in (0, 1, 2):
            name = f"layer{layer}.{block}"
            stride = 2 if layer > 1 and block == 0 else 1
            kept = x
            if stride == 2:
                down = f"{name}.downsample"
                kept = norm(conv(x, f"{down}.0", 2, padding=0), f"{down}.1")
            inner = norm(conv(x, f"{name}.conv1", stride), f"{name}.bn1").relu()
            x = (norm(conv(inner, f"{name}.conv2"), f"{name}.bn2") + kept).relu()
    return x.mean((2, 3))


@cache
def load(folder, study, part, device):
    with np.load(Path(folder) / f"{study}_{part}.npz") as arrays:
        x, y = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"]).long()
    if x.dtype == torch.uint8:
        x = (x.float() / 255 - 0.2860) / 0.3530  # public constants
    return x.to(device), y.to(device)


def records_for(folder, study, device, final):
    """Training and scored records; tuning never opens the test files."""
    x, y = load(folder, study, "train", device)
    if final:
        return (x, y), load(folder, study, "test", device)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(x)))
    held = min(HELD_OUT, len(x) // 5)
    scored, kept = order[:held].to(device), order[held:].to(device)
    return (x[kept], y[kept]), (x[scored], y[scored])


# -- a run -----------------------------------------------------------------------------


def run(spec, folder, device, *, final, apart=False, rounds=None, rows=None):
    """One training, scored every tenth round; a JSON value."""
    study = spec["study"]
    (x, y), (scored_x, scored_y) = records_for(folder, study, device, final)
    own_sizes = "own sizes" in spec["split"]
    if own_sizes:
        labels, least = y.cpu().numpy(), min(LEAST, len(y) // (2 * CLIENTS))
        parts = dirichlet_partition(labels, CLIENTS, 0.3, spec["seed"], least)
    else:
        parts = iid_partition(len(y), CLIENTS, spec["seed"])
    average = len(y) / CLIENTS
    sizes = [float(len(p)) if own_sizes else average for p in parts]
    noise = noise_for(spec, sizes)
    if not (own_sizes or apart):
        # one client with all records: the mean's noise is C s / (n size) either way
        parts, sizes = [np.arange(len(y))], [float(len(y))]
    rounds = rounds or ROUNDS[study]
    rows = rows or ROWS[study]
    recipe = _recipe(spec)
    relation = Relation.ZERO_OUT if own_sizes else Relation.ADD_REMOVE
    plan = FederatedPlan.make(
        Federation(tuple(sizes), rounds, relation=relation),
        "each-client",  # every share is as planned; whose view it is changes no number
        bound=recipe.clip_norm,
        delta=min(DELTA, 0.1 / len(y)),
        noise_multiplier=noise,
    )
    server_side, client_side = (
        _shared(study, recipe, plan, x, device, spec["seed"]) for _ in range(2)
    )
    clients = {
        number: Client(
            number, client_side,
            ArrayDataset(x[_on(part, device)], y[_on(part, device)]),
            physical_batch_size=min(rows, len(part)),
            unsafe_reproducible_noise=1000 + spec["seed"],
        )
        for number, part in enumerate(parts)
    }  # fmt: skip
    server = Server(server_side, exact_frames=False)
    curve = {}

    def score(report):
        made = report.round + 1
        if made % 10 == 0 or made == rounds:
            curve[made] = _accuracy(server_side.model, scored_x, scored_y)

    started = time.perf_counter()
    run_rounds(server, asking(clients), on_round=score)
    hits = _hits(server_side.model, scored_x, scored_y)
    by_class = [
        float(hits[scored_y == c].float().mean()) for c in range(int(y.max()) + 1)
    ]
    return {
        **spec, "noise multiplier": noise, "clients run": len(parts),
        "curve": curve, "accuracy": curve[rounds], "by class": by_class,
        "rounds": rounds, "final": final, "seconds": time.perf_counter() - started,
        "device": device,
    }  # fmt: skip


def _on(part, device):
    return torch.from_numpy(part).to(device)


def _recipe(spec):
    name, mode, *_ = ARMS[spec["study"]][spec["arm"]]
    return get_federated_recipe(name).configure(mode=mode, **spec["settings"])


def _shared(study, recipe, plan, x, device, seed):
    torch.manual_seed(seed)
    if study == "cifar":
        model = torch.nn.Linear(x.shape[1], 10)
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
    else:
        model = build("small-cnn", tuple(x.shape[1:]), 10)
    target = torch.zeros(1, dtype=torch.long, device=device)
    template = Batch(torch.zeros_like(x[:1]), target)
    return Shared(
        model.to(device), "cross-entropy", recipe, plan, template, probe_seed=seed
    )


@torch.no_grad()
def _hits(model, x, y):
    return torch.cat(
        [model(part).argmax(1) == own for part, own in zip(
            x.split(2000), y.split(2000), strict=True
        )]
    )  # fmt: skip


def _accuracy(model, x, y):
    return float(_hits(model, x, y).float().mean())


# -- files of runs ---------------------------------------------------------------------


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


def table(lines):
    """Accuracy by round (mean over seeds), spread, and the difference to fedgd."""
    by_group = {}
    for line in lines:
        by_group.setdefault(group_of(line), {})[line["seed"]] = line
    shown = []
    for group, runs in by_group.items():
        study, arm, account, epsilon, split = json.loads(group)
        rounds = sorted(map(int, next(iter(runs.values()))["curve"]))
        curve = [
            100 * statistics.fmean(_at(line, r) for line in runs.values())
            for r in rounds
        ]
        last = [100 * line["accuracy"] for line in runs.values()]
        base = by_group.get(json.dumps([study, "fedgd", account, epsilon, split]), {})
        paired = [
            100 * (line["accuracy"] - base[seed]["accuracy"])
            for seed, line in runs.items()
            if seed in base
        ]
        worst = 100 * min(
            statistics.fmean(line["by class"][c] for line in runs.values())
            for c in range(len(next(iter(runs.values()))["by class"]))
        )
        shown.append(
            f"| {study} | {split} | {account} | {epsilon:g} | {arm} | "
            + " | ".join(f"{a:.2f}" for a in curve)
            + f" | {_spread(last):.2f} | {_interval(paired)} | {worst:.1f} "
            f"| {len(runs)} |"
        )
    head = "| study | split | account | epsilon | arm | by round | ... | spread | "
    return [head + "to fedgd | worst class | seeds |", *sorted(shown)]


def _at(line, made):
    return line["curve"].get(str(made), line["curve"].get(made))


def _spread(values):
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _interval(paired):
    """Mean difference and its 95 % interval, by Student's t."""
    if len(paired) < 2:
        return "-"
    from scipy.stats import t

    half = t.ppf(0.975, len(paired) - 1) * _spread(paired) / math.sqrt(len(paired))
    return f"{statistics.fmean(paired):+.2f} ± {half:.2f}"


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
        own.add_argument("--out", type=Path, required=True)
        own.add_argument("--device", default="cpu")
        own.add_argument("--part", default="1/1")
        own.add_argument("--only", action="append", default=[], metavar="NAME=VALUE")
        own.add_argument("--rounds", type=int, help="for a quick look")
        own.add_argument("--rows", type=int, help="rows of a pass")
        own.add_argument("--seeds", type=int, default=1 if name == "tune" else SEEDS)
        own.add_argument("--apart", action="store_true")
        if name == "final":
            own.add_argument("--chosen", type=Path, required=True)
    chooses = commands.add_parser("choose")
    chooses.add_argument("tuned", type=Path, nargs="+")
    chooses.add_argument("--out", type=Path, required=True)
    shows = commands.add_parser("table")
    shows.add_argument("final", type=Path, nargs="+")
    asked = parser.parse_args()
    if asked.command == "prepare":
        prepare(asked.source, asked.folder)
    elif asked.command == "noise":
        write_noise(NOISE_FILE)
    elif asked.command == "choose":
        lines = [line for path in asked.tuned for line in read_lines(path)]
        asked.out.write_text(json.dumps(choose(lines), indent=1) + "\n")
    elif asked.command == "table":
        lines = [line for path in asked.final for line in read_lines(path)]
        print("\n".join(table(lines)))
    else:
        final = asked.command == "final"
        specs = (
            final_specs(asked.study, json.loads(asked.chosen.read_text()), asked.seeds)
            if final
            else tuning_specs(asked.study, asked.seeds)
        )
        wanted = [spec for spec in specs if is_wanted(spec, asked.only)]
        run_all(
            wanted, asked.out, asked.part, folder=str(asked.folder),
            device=asked.device, final=final, apart=asked.apart, rounds=asked.rounds,
            rows=asked.rows,
        )  # fmt: skip


if __name__ == "__main__":
    main()
