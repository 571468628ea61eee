"""From lines of runs to ``docs/results/federated.md`` and its figure."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter

#: DP-FedSOFIM's table 1: per cent at rounds 10, 20, ..., 70.
PAPER = {
    math.inf: {
        "fedgd": (51.50, 59.20, 62.65, 64.21, 65.31, 65.95, 66.41),
        "sofim": (60.32, 66.01, 67.17, 68.42, 69.08, 69.37, 69.53),
    },
    0.5: {
        "fedgd": (44.97, 54.45, 58.71, 60.09, 60.40, 61.06, 60.43),
        "sofim": (40.10, 53.60, 59.03, 61.36, 61.23, 60.94, 61.03),
    },
    1.0: {
        "fedgd": (51.35, 58.98, 62.15, 63.31, 64.12, 64.13, 64.19),
        "sofim": (45.42, 58.00, 62.92, 64.66, 64.72, 64.69, 64.61),
    },
    2.0: {
        "fedgd": (51.30, 59.43, 62.51, 64.04, 65.13, 65.41, 65.59),
        "sofim": (46.47, 60.57, 64.28, 65.96, 66.32, 66.71, 66.75),
    },
    5.0: {
        "fedgd": (52.94, 60.37, 63.29, 64.79, 65.79, 66.16, 66.44),
        "sofim": (60.36, 66.55, 67.66, 68.17, 67.85, 68.05, 68.00),
    },
    10.0: {
        "fedgd": (52.93, 60.19, 63.17, 64.72, 65.81, 66.18, 66.60),
        "sofim": (60.22, 66.50, 68.02, 68.59, 68.78, 68.80, 68.97),
    },
}
ACCOUNTS = {
    "none": "no noise",
    "paper": "each client's update is seen, replace-one",
    "tight": "the sum is seen, add/remove",
}
HEAD = """\
# Federated methods

Made by `benchmarks/federation/federated.py`; all runs are in
`benchmarks/federation/results`, and the noise that each epsilon takes in
`benchmarks/results/federated_noise.json`.

20 clients; each sends one clipped gradient in every round. Tuning trains on all but
5 000 of the training records and scores on those, by code that does not open the test
file; all methods of a study have the same number of trials (SOFIM with other rho and
beta has more): so many lengths of the
effective step (`learning_rate / rho`, `learning_rate / (1 - momentum)`) times two clip
bounds, rules or dampings. Then everything is fixed, and the test file is scored once
for each of {seeds} seeds, which are the same for all methods. Choosing by a validation
split is not counted in epsilon. Means in per cent; "spread" is the standard deviation
over the seeds, "to fedgd" the mean of paired differences with its 95 % interval,
"worst class" the least accuracy of a class.
"""
CIFAR = """\
## CIFAR-10: DP-FedSOFIM's table 1

Features of a frozen ResNet-20 that was trained on CIFAR-100, a linear head, 70 rounds
with all records in each, delta 1e-5; {trials} trials, {steps} lengths of the step. Rows
called "the paper" are its figures: another feature extractor, one run, settings chosen
by the test accuracy. It accounts for what the server sees of each client, replacing a
record ("each client's update is seen"). Under a secure sum, adding or removing a
record, the same epsilon takes a ninth of the noise.
"""
FASHION = """\
## FashionMNIST: clients that whiten

The net `cnn` with width 8 (two convolutions, tanh, 26 698 parameters), {rounds} rounds,
epsilon 2, delta 1e-5, the sum is seen. In a round every client draws a tenth of its
records in secret, which is in the account. {trials} trials, {steps} lengths of the
step. Each client of `fedkfc` makes the same map from the shared probe seed, and no
message is larger for it. "iid": all clients declare the same size, add/remove; the mean
is then the same whoever holds which record. "dirichlet, own sizes": classes are split
by Dirichlet(0.3), no client has fewer than 500 records, and every client declares its
own size (zero-out). Records of small clients move the mean most, so the noise is larger
there.
"""


def page(lines, chosen, machines, tuned=()):
    """The whole page, as lines; ``machines`` says where each study was run."""
    final = [line for line in lines if line["final"]]
    studies = {s: by_group(final, s) for s in ("cifar", "fashion")}
    seeds = Counter(len(runs) for found in studies.values() for runs in found.values())
    yield HEAD.format(seeds="/".join(map(str, sorted(seeds))))
    if studies["cifar"]:
        yield CIFAR.format(**_tried(chosen, "cifar"))
        yield _where(machines, "cifar", final)
        yield "![accuracy by round](../images/federated.png)\n"
        yield from _tables(studies["cifar"])
        yield from _bought(studies["cifar"])
        yield from _rounds_needed(studies["cifar"])
        yield from _stable_steps([t for t in tuned if t["study"] == "cifar"])
        yield from _classes(studies["cifar"])
    if studies["fashion"]:
        rounds = next(iter(next(iter(studies["fashion"].values())).values()))["rounds"]
        yield FASHION.format(rounds=rounds, **_tried(chosen, "fashion"))
        yield _where(machines, "fashion", final)
        yield from _tables(studies["fashion"])
    yield from _chosen(chosen)


def _tried(chosen, study):
    found = {own["trials"] for g, own in chosen.items() if json.loads(g)[0] == study}
    return {"trials": "/".join(map(str, sorted(found))), "steps": min(found) // 2}


def _where(machines, study, lines):
    own = [line for line in lines if line["study"] == study]
    arms = dict.fromkeys(x["arm"] for x in own if "cuda" in x.get("device", "cpu"))
    told = [_machine(machines[study])] if study in machines else []
    if arms:
        told.append(f"{', '.join(arms)}: {_machine(machines[f'{study}_gpu'])}")
    return " ".join(told) + "\n"


def _machine(machine):
    return f"Torch {machine['torch']}, {machine['device']}, {machine['date']}."


def by_group(lines, study):
    """(account, epsilon, split, arm) -> seed -> line."""
    found = {}
    for line in lines:
        if line["study"] == study:
            group = line["account"], line["epsilon"], line["split"], line["arm"]
            found.setdefault(group, {})[line["seed"]] = line
    return found


def _tables(found):
    for account, epsilon, split in dict.fromkeys(group[:3] for group in found):
        own = {
            g[3]: runs
            for g, runs in found.items()
            if g[:3] == (account, epsilon, split)
        }
        rounds = sorted(int(r) for r in next(iter(own["fedgd"].values()))["curve"])
        where = "" if split == "iid" and len(rounds) == 7 else f", {split}"
        told = ACCOUNTS[account]
        if "own sizes" in split:
            told = told.replace("add/remove", "zero-out")
        named = "No noise" if account == "none" else f"Epsilon {epsilon:g}, {told}"
        yield f"### {named}{where}\n"
        head = [*map(str, rounds), "spread", "to fedgd", "worst class", "seeds"]
        yield "| round | " + " | ".join(head) + " |"
        yield "|---|" + "---|" * len(head)
        for arm, runs in own.items():
            yield _row(arm, runs, own["fedgd"], rounds)
        if account in ("paper", "none") and len(rounds) == 7:
            for arm, curve in PAPER[epsilon].items():
                cells = [f"{a:.2f}" for a in curve] + ["", "", "", ""]
                yield f"| {arm}, the paper | " + " | ".join(cells) + " |"
        yield ""


def _row(arm, runs, base, rounds):
    curve = [
        100 * statistics.fmean(_at(line, r) for line in runs.values()) for r in rounds
    ]
    last = [100 * line["accuracy"] for line in runs.values()]
    paired = [
        100 * (line["accuracy"] - base[seed]["accuracy"])
        for seed, line in runs.items()
        if seed in base and runs is not base
    ]
    cells = [f"{a:.2f}" for a in curve]
    cells += [f"{_spread(last):.2f}", _interval(paired)]
    cells += [f"{min(_by_class(runs)):.1f}", str(len(runs))]
    return f"| {arm} | " + " | ".join(cells) + " |"


def _bought(found):
    """What a secure sum is worth, at equal epsilon."""
    arms = list(dict.fromkeys(group[3] for group in found))
    epsilons = sorted({e for account, e, *_ in found if account == "tight"})
    yield "### What a secure sum buys\n"
    yield (
        "Accuracy under the tight account minus that under the paper's, at equal "
        "epsilon, in points (paired by seed).\n"
    )
    yield "| epsilon | " + " | ".join(arms) + " |"
    yield "|---|" + "---|" * len(arms)
    for epsilon in epsilons:
        cells = []
        for arm in arms:
            paper, tight = (
                found.get((a, epsilon, "iid", arm), {}) for a in ("paper", "tight")
            )
            gains = [
                100 * (tight[s]["accuracy"] - paper[s]["accuracy"])
                for s in tight
                if s in paper
            ]
            cells.append(_interval(gains))
        yield f"| {epsilon:g} | " + " | ".join(cells) + " |"
    yield ""


def _rounds_needed(found, share=0.95):
    yield f"### Rounds to {100 * share:g} % of FedGD's final accuracy\n"
    yield "Of means over the seeds, which were scored every ten rounds.\n"
    arms = list(dict.fromkeys(group[3] for group in found))
    yield "| account | epsilon | " + " | ".join(arms) + " |"
    yield "|---|---|" + "---|" * len(arms)
    for account, epsilon, split in dict.fromkeys(group[:3] for group in found):
        base = found.get((account, epsilon, split, "fedgd"))
        if base is None:
            continue
        needed = share * statistics.fmean(r["accuracy"] for r in base.values())
        cells = [_first(found.get((account, epsilon, split, a)), needed) for a in arms]
        yield f"| {account} | {epsilon:g} | " + " | ".join(cells) + " |"
    yield ""


def _first(runs, needed):
    """The first round that was scored at that accuracy or above."""
    for made in sorted(map(int, next(iter(runs.values()))["curve"])) if runs else ():
        if statistics.fmean(_at(line, made) for line in runs.values()) >= needed:
            return str(made)
    return "never" if runs else ""


def _stable_steps(tuned, within=0.02):
    yield "### Stable steps\n"
    yield (
        "Effective steps (see the top) whose best held-out accuracy is within "
        f"{100 * within:g} points of the method's best, from tuning: the shortest and "
        "the longest, and their ratio. Neighbours differ by a factor of two. Steps of "
        "Adam's kind and of FedNew have units of their own.\n"
    )
    best = {}
    for line in tuned:
        group = best.setdefault((line["account"], line["epsilon"], line["arm"]), {})
        group[line["step"]] = max(line["accuracy"], group.get(line["step"], 0.0))
    arms = list(dict.fromkeys(arm for _, _, arm in best))
    yield "| account | epsilon | " + " | ".join(arms) + " |"
    yield "|---|---|" + "---|" * len(arms)
    for account, epsilon in sorted(dict.fromkeys(key[:2] for key in best)):
        cells = []
        for arm in arms:
            steps = best.get((account, epsilon, arm), {})
            top = max(steps.values(), default=0.0)
            good = [s for s, accuracy in steps.items() if accuracy >= top - within]
            cells.append(
                f"{min(good):g} to {max(good):g} ({max(good) / min(good):g})"
                if good
                else ""
            )
        yield f"| {account} | {epsilon:g} | " + " | ".join(cells) + " |"
    yield ""


def _classes(found, epsilon=1.0):
    yield f"### By class, epsilon {epsilon:g}\n"
    yield "| account | method | " + " | ".join(map(str, range(10))) + " |"
    yield "|---|---|" + "---|" * 10
    for (account, own, _, arm), runs in found.items():
        if own == epsilon:
            cells = [f"{a:.1f}" for a in _by_class(runs)]
            yield f"| {account} | {arm} | " + " | ".join(cells) + " |"
    yield ""


def _chosen(chosen):
    yield "## Settings that were chosen\n"
    yield "| study | account | epsilon | split | method | step | other | inside |"
    yield "|---|---|---|---|---|---|---|---|"
    for group, own in sorted(chosen.items(), key=_in_order):
        study, arm, account, epsilon, split = json.loads(group)
        other = {
            name: value
            for name, value in own["settings"].items()
            if name in ("clip_norm", "clipping", "damping")
            or (arm == "sofim (rho, beta)" and name in ("rho", "beta"))
        }
        told = ", ".join(f"{name} {value}" for name, value in other.items())
        inside = "yes" if own["inside"] else "no"
        yield (
            f"| {study} | {account} | {epsilon:g} | {split} | {arm} "
            f"| {own['step']:g} | {told} | {inside} |"
        )
    yield ""


def _in_order(item):
    study, arm, account, epsilon, split = json.loads(item[0])
    return study, split, account, epsilon, arm


def plot(lines, path):
    """Accuracy by round: every epsilon a panel, every account a row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    found = by_group([line for line in lines if line["final"]], "cifar")
    epsilons = sorted({e for account, e, *_ in found if account == "tight"})
    figure = Figure(figsize=(2.4 * len(epsilons), 4.8), layout="constrained")
    axes = figure.subplots(2, len(epsilons), sharex=True, sharey=True)
    for row, account in zip(axes, ("paper", "tight"), strict=True):
        for axis, epsilon in zip(row, epsilons, strict=True):
            for (own, e, _, arm), runs in found.items():
                if (own, e) == (account, epsilon):
                    rounds = sorted(int(r) for r in next(iter(runs.values()))["curve"])
                    means = [
                        100 * statistics.fmean(_at(line, r) for line in runs.values())
                        for r in rounds
                    ]
                    axis.plot(rounds, means, marker=".", markersize=3, label=arm)
            axis.set_title(f"epsilon {epsilon:g}", fontsize=9)
            axis.tick_params(labelsize=7)
        row[0].set_ylabel(f"test accuracy, %\n{ACCOUNTS[account]}", fontsize=7)
    for axis in axes[-1]:
        axis.set_xlabel("round", fontsize=8)
    axes[0][0].set_ylim(bottom=50)
    axes[0][-1].legend(fontsize=6)
    figure.savefig(path, dpi=90, metadata={"Software": None})


def _by_class(runs):
    columns = zip(*(line["by class"] for line in runs.values()), strict=True)
    return [100 * statistics.fmean(column) for column in columns]


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
