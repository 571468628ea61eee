"""From the result files to ``docs/results/accuracy.md``."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

from arms import FEWEST, TABLES, TRIALS

PAGE = Path(__file__).parents[2] / "docs" / "results" / "accuracy.md"
BASELINE = "dp-sgd"
#: Two-sided 95 % quantile of Student's t with four degrees of freedom (five seeds).
T_QUANTILE = 2.776

HEAD = """\
# Accuracy at equal privacy

Made by `benchmarks/accuracy/accuracy.py`; trials, settings and seeds are in
`benchmarks/accuracy/results`.

Protocol: Poisson sampling, PLD accounting, zero-out adjacency (the number of examples
is public). Tuning trains on 55 000 of the 60 000 training images and scores on the
other 5 000, by code that does not open the test file. Trials are drawn before anything
is trained; the best three of an arm get two more seeds, and the best mean is taken.
Then everything is fixed and tested once, with five seeds that vary initialisation,
sampling and noise and are the same for all arms. The noise of these runs comes from a
seed, so that arms are paired; it has the same law as that of a private run.

Choosing settings by results on a validation split is not counted in epsilon, here as in
the papers: the data sets are public benchmarks.
"""


def write(results):
    chosen = json.loads((results / "chosen.json").read_text(encoding="utf-8"))
    machine = json.loads((results / "machine.json").read_text(encoding="utf-8"))
    records = [
        json.loads(line)
        for line in (results / "test.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    parts = [HEAD]
    for table, about in TABLES.items():
        if table in chosen:
            parts += [section(table, about, chosen[table], records)]
    parts.append(
        f"Machine: {machine['device']}; torch {machine['torch']}, Python "
        f"{machine['python']}; {machine['date']}.\n"
    )
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text("\n".join(parts), encoding="utf-8")


def section(table, about, chosen, records):
    scores = {arm: {} for arm in chosen}
    for record in records:
        if record["table"] == table and record["arm"] in scores:
            scores[record["arm"]][record["seed"]] = 100 * record["accuracy"]
    own = next(r for r in records if r["table"] == table)
    lines = [
        f"## {table}",
        "",
        f"Net `{about['model']}`, epsilon {about['epsilon']:g}, delta "
        f"{about['delta']:g}, batch {about['batch_size']}, {about['epochs']} epochs "
        f"({own['steps']} steps, noise multiplier {own['sigma']:g}).",
        "",
        "| arm | test accuracy, % | spread | seeds | above dp-sgd, paired (95 %) | "
        "validation | trials | chosen |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for arm in sorted(scores, key=lambda a: -statistics.mean(scores[a].values())):
        values = list(scores[arm].values())
        settings = {k: v for k, v in chosen[arm]["settings"].items() if k != "recipe"}
        told = ", ".join(f"{k} {v}" for k, v in settings.items())
        lines.append(
            f"| {arm} | {statistics.mean(values):.2f} | {statistics.stdev(values):.2f} "
            f"| {len(values)} | {_above(scores, arm)} | "
            f"{100 * chosen[arm]['validation']:.2f} | {TRIALS.get(arm, FEWEST)} | "
            f"{told} |"
        )
    outside = [
        f"{arm}: {name}"
        for arm, entry in chosen.items()
        for name, good in entry["inside"].items()
        if not good
    ]
    said = "; ".join(outside) if outside else "none"
    lines += ["", f"Best trials at the edge of a searched range: {said}.", ""]
    return "\n".join(lines)


def _above(scores, arm):
    if arm == BASELINE:
        return ""
    pairs = [
        scores[arm][s] - v for s, v in scores[BASELINE].items() if s in scores[arm]
    ]
    half = T_QUANTILE * statistics.stdev(pairs) / math.sqrt(len(pairs))
    return f"{statistics.mean(pairs):+.2f} +- {half:.2f}"
