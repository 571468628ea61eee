"""The ablation: the settings that dp-kfc was found with, and one thing changed at once.

For every variant the learning rate is searched on a grid of factors of the base's with
one seed; where the best is at the end of the grid, the grid is continued. The best
factor then gets two more seeds, and the mean of the three is the variant's score. All
on the validation split of the paper's protocol; the test files are not opened.
"""

from __future__ import annotations

import statistics

TABLES_OF = ("mnist paper protocol", "fashion_mnist paper protocol")
SEED, MORE_SEEDS = 100, (101, 102)
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
#: As far as a grid is continued.
LEAST, MOST = 1 / 32, 32.0

#: The defaults of what is varied, written down: a default that changes later must not
#: change what a stored result is about.
DEFAULTS = {
    "clip_norm": 1.0,
    "probe": "synthetic",
    "labels": "model",
    "probe_size": 256,
    "probe_batches": 4,
    "refresh": 100,
    "decay": 0.0,
    "sharing": "expand",
    "rank": 32,
    "product": False,
    "match_scale": False,
    "diagonal": False,
}
#: What is not whitened has these alone.
PLAIN = ("learning_rate", "momentum", "clipping", "clip_norm")

#: what is varied -> label -> settings
VARIED = {
    "side": {"none (dp-sgd)": None, **{s: {"side": s} for s in ("a", "g", "both")}},
    "exponent": {f"{p:g}": {"exponent": p} for p in (0.25, 0.5, 0.75, 1.0)},
    "back-map": {b: {"back_map": b} for b in ("none", "natural", "inverse")},
    "damping": {
        f"{d:g}": {"damping": d} for d in (0.005, 0.02, 0.05, 0.1, 0.3, 1.0)
    },
    "spectral power": {
        f"{p:g}": {"spectral_power": p} for p in (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
    },
    "probes": {
        f"{n} x {b}": {"probe_size": n, "probe_batches": b}
        for n, b in ((64, 1), (256, 1), (256, 4), (256, 16))
    },
    "refresh": {
        "once": {"refresh": 0},
        **{f"{r}": {"refresh": r} for r in (25, 100, 400)},
        "25, decay 0.9": {"refresh": 25, "decay": 0.9},
    },
    # labels have no part in the inputs' side, which the base may have alone
    "labels, both sides": {
        w: {"side": "both", "labels": w} for w in ("model", "uniform")
    },
    "sharing": {w: {"sharing": w} for w in ("expand", "reduce")},
    "match_scale": {w: {"match_scale": w == "on"} for w in ("off", "on")},
    "rank": {(f"{r}" if r else "all"): {"rank": r} for r in (8, 32, 128, 0)},
    "product": {w: {"product": w == "on"} for w in ("off", "on")},
    "diagonal": {w: {"diagonal": w == "on"} for w in ("off", "on")},
}  # fmt: skip


def base(chosen, table):
    """The settings that dp-kfc was chosen with, with all that is varied in them."""
    return {**DEFAULTS, **chosen[table]["dp-kfc"]["settings"]}


def variants(chosen, table):
    """``(what, label) -> settings``; some of them are the base itself."""
    own = base(chosen, table)
    found = {}
    for what, values in VARIED.items():
        for label, changed in values.items():
            if changed is None:
                kept = {name: own[name] for name in PLAIN}
                found[what, label] = {"recipe": "dp-sgd", **kept}
            else:
                found[what, label] = {**own, **changed}
    return found


def job(table, settings, factor, seed):
    """Its key is that of the settings, whatever varied them: the base runs once."""
    rate = settings["learning_rate"] * factor
    return {"table": table, "arm": "ablation", "phase": "ablate", "seed": seed,
            "settings": {**settings, "learning_rate": rate}}  # fmt: skip


def jobs(chosen, tables, done, key):
    """All that can be run now: grids, their continuations, then more seeds."""
    found = []
    for table in tables:
        for settings in variants(chosen, table).values():
            scores, missing = _grid(table, settings, done, key)
            found += missing
            if not missing:
                best = _best(scores)
                found += [job(table, settings, best, s) for s in MORE_SEEDS]
    return found


def outcome(table, settings, done, key):
    """Best factor and its scores by seed; None while some are missing."""
    scores, missing = _grid(table, settings, done, key)
    if missing:
        return None
    best = _best(scores)
    by_seed = {
        seed: done.get(key(job(table, settings, best, seed)))
        for seed in (SEED, *MORE_SEEDS)
    }
    if any(record is None for record in by_seed.values()):
        return None
    by_seed = {seed: record["accuracy"] for seed, record in by_seed.items()}
    return {
        "factor": best,
        "searched": (min(scores), max(scores)),
        "mean": statistics.mean(by_seed.values()),
        "by_seed": by_seed,
    }


def _grid(table, settings, done, key):
    """Scores by factor, and the jobs that the grid still lacks."""
    factors = list(FACTORS)
    while True:
        tried = {f: job(table, settings, f, SEED) for f in factors}
        missing = [j for j in tried.values() if key(j) not in done]
        if missing:
            return {}, missing
        scores = {f: done[key(j)]["accuracy"] for f, j in tried.items()}
        best = _best(scores)
        if best == min(factors) > LEAST:
            factors.append(best / 2)
        elif best == max(factors) < MOST:
            factors.append(best * 2)
        else:
            return scores, []


def _best(scores):
    """The highest score; of equals, the factor nearest to one."""
    return max(scores, key=lambda f: (scores[f], -max(f, 1 / f)))
