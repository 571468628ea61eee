"""How the settings of ``examples/demo.py`` were chosen: random search, alike for all.

    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/demo_tuning.py

Every private arm gets the same number of trials and the same runs. A trial is scored
on validation splits of the training data (``validation``, a new split with each seed);
the test split is never looked at. The best few are run again with other seeds, so that
the winner is not the luckiest of many, and the mean of all its runs decides. Noise is
reproducible here, which the digits, being public, allow.

A first round on the same splits had narrower ranges. Its best lay at the edges of
damping, plain_step and spectral_power, so these were widened and all of it repeated.

The demo's net has tanh. The same search is made with relu, to see how much of the
outcome is the net's.

The result goes to ``benchmarks/results/demo_tuning.json``. With everything chosen,

    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/demo_tuning.py --test

makes one pass over the test split with more seeds than the demo has, paired over the
arms, and adds it to the file.
"""

from __future__ import annotations

import json
import math
import os
import platform
import runpy
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from curvedp.experiments import build_run
from curvedp.experiments.runs import evaluate_built

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "demo_tuning.json"
DEMO = runpy.run_path(str(ROOT / "examples" / "demo.py"))["CONFIG"]
ACTIVATIONS = ("tanh", "relu")
VALIDATION = 0.2
TRIALS, REFERENCE_TRIALS = 36, 12
FIRST_SEEDS = range(100, 103)
MORE_SEEDS = range(103, 109)
FINALISTS = 6
TEST_SEEDS = range(20)
#: Student's t for 19 degrees of freedom, two-sided 95 %.
T_95 = 2.093
SHOWN = ("activation", "recipe", "mean", "std", "minus_dp_sgd", "half_width_95")


class Draw:
    """One random trial; what is drawn is rounded, so that it can be written down."""

    def __init__(self, arm, number):
        self._generator = np.random.default_rng([sum(arm.encode()), number])

    def log(self, low, high):
        value = math.exp(self._generator.uniform(math.log(low), math.log(high)))
        return float(f"{value:.2g}")

    def one_of(self, *values):
        return values[int(self._generator.integers(len(values)))]

    def rate(self, low, high):
        """Rate and momentum; the range is that of the whole step, rate / (1 - m)."""
        momentum = self.one_of(0.0, 0.9)
        rate = self.log(low * (1 - momentum), high * (1 - momentum))
        return {"learning_rate": rate, "momentum": momentum}


def dp_sgd(draw):
    clipping = draw.one_of("flat", "normalised")
    bound = draw.one_of(0.5, 1.0, 2.0) if clipping == "flat" else 1.0
    return {**draw.rate(0.2, 8), "clipping": clipping, "clip_norm": bound}


def dp_kfc(draw):
    return {
        **draw.rate(0.2, 12),
        "clipping": draw.one_of("flat", "normalised"),
        "side": draw.one_of("a", "a", "both"),
        "exponent": draw.one_of(0.25, 0.5),
        "damping": draw.log(0.02, 10),
        "back_map": draw.one_of("none", "natural", "inverse"),
        "spectral_power": draw.one_of(0.0, 1.0, 2.0, 3.0, 4.0),
        "refresh": draw.one_of(10, 25, 100),
    }


def dp_ngd(draw):
    return {
        **draw.rate(0.003, 0.6),
        "clipping": draw.one_of("flat", "normalised"),
        "clamp": draw.one_of("matched", "printed"),
        "plain_step": draw.one_of(0.25, 0.5, 1.0, 2.0, 4.0),
        "floor_base": draw.log(0.01, 1),
        "spectral_power": draw.one_of(0.0, 1.0, 2.0, 3.0, 4.0),
        "refresh": draw.one_of(8, 25),
    }


def non_private(draw):
    return draw.rate(0.1, 10)


ARMS = {
    "dp-sgd": dp_sgd,
    "dp-kfc": dp_kfc,
    "dp-ngd": dp_ngd,
    "non-private": non_private,
}


def accuracy(activation, recipe, settings, seed, validation=VALIDATION):
    """Accuracy of one run on the validation split; on the test split without one."""
    config = replace(
        DEMO.base,
        model_options={"activation": activation},
        recipe=recipe,
        recipe_settings=settings,
        validation=validation,
        seed=seed,
        unsafe_reproducible_noise=seed,
    )
    built = build_run(config)
    built.trainer().fit(built.train)
    return evaluate_built(built)["accuracy"]


def scored(pool, activation, arm, trials, seeds):
    """Trials with the runs of further seeds added to them."""
    jobs = [
        [pool.submit(accuracy, activation, arm, trial["settings"], s) for s in seeds]
        for trial in trials
    ]
    for trial, futures in zip(trials, jobs, strict=True):
        runs = trial["validation_accuracy"] + [round(f.result(), 4) for f in futures]
        trial["validation_accuracy"] = runs
        trial["mean"] = round(float(np.mean(runs)), 4)
    return sorted(trials, key=lambda t: (-len(t["validation_accuracy"]), -t["mean"]))


def search(pool, activation, arm):
    count = TRIALS if arm.startswith("dp-") else REFERENCE_TRIALS
    trials = [
        {"settings": ARMS[arm](Draw(arm, n)), "validation_accuracy": []}
        for n in range(count)
    ]
    first = scored(pool, activation, arm, trials, FIRST_SEEDS)
    final = scored(pool, activation, arm, first[:FINALISTS], MORE_SEEDS)
    best = final[0]
    print(activation, arm, best["mean"], best["settings"], file=sys.stderr, flush=True)
    return {"trials": count, "best": best, "all": final + first[FINALISTS:]}


def test(pool, nets):
    """Test accuracy of each arm's best settings, and paired differences to dp-sgd."""
    rows = []
    for activation, arms in nets.items():
        runs = {
            arm: [
                pool.submit(
                    accuracy, activation, arm, found["best"]["settings"], seed, None
                )
                for seed in TEST_SEEDS
            ]
            for arm, found in arms.items()
        }
        values = {
            arm: np.array([f.result() for f in jobs]) for arm, jobs in runs.items()
        }
        for arm, own in values.items():
            difference = own - values["dp-sgd"]
            error = difference.std(ddof=1) / math.sqrt(len(own))
            rows.append(
                {
                    "activation": activation,
                    "recipe": arm,
                    "private": arm != "non-private",
                    "seeds": len(own),
                    "test_accuracy": [round(float(v), 4) for v in own],
                    "mean": round(float(own.mean()), 4),
                    "std": round(float(own.std(ddof=1)), 4),
                    "minus_dp_sgd": round(float(difference.mean()), 4),
                    "half_width_95": round(float(T_95 * error), 4),
                }
            )
            print(json.dumps({k: rows[-1][k] for k in SHOWN}), file=sys.stderr)
    return rows


def main():
    if "--test" in sys.argv:
        result = json.loads(RESULT.read_text(encoding="utf-8"))
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            result["test"] = test(pool, result["activations"])
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        return
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        nets = {
            activation: {arm: search(pool, activation, arm) for arm in ARMS}
            for activation in ACTIVATIONS
        }
    result = {
        "base": DEMO.base.to_json(),
        "validation": VALIDATION,
        "seeds": {"all trials": list(FIRST_SEEDS), "finalists too": list(MORE_SEEDS)},
        "finalists": FINALISTS,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "dp-accounting": version("dp-accounting"),
        },
        "date": time.strftime("%Y-%m-%d"),
        "activations": nets,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
