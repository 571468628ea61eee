"""The arms of the accuracy tables: what is fixed, what is searched, and where.

A range is searched uniformly (``"linear"``) or uniformly in the logarithm (``"log"``);
a list is a choice. Trials are drawn from a generator seeded by table and arm, before
anything is trained.
"""

from __future__ import annotations

import random

#: The two arms that the claim is about get more.
TRIALS = {"dp-sgd": 16, "dp-kfc": 16}
FEWEST = 12

PLAIN = {
    "learning_rate": ("log", 0.02, 4.0),
    "momentum": [0.0, 0.9],
    "clipping": ["flat", "normalised"],
    "clip_norm": [0.1, 0.3, 1.0, 3.0],
}
WHITENED = {
    "learning_rate": ("log", 0.01, 1.0),
    "momentum": [0.9],
    "clipping": ["normalised"],
    "damping": ("log", 0.005, 0.5),
    "exponent": [0.25, 0.5],
    "back_map": ["none", "natural"],
    "spectral_power": [2.0, 3.0, 4.0],
}

#: arm -> (recipe, fixed settings, searched settings)
ARMS = {
    "dp-sgd": ("dp-sgd", {}, PLAIN),
    "dp-adam": (
        "dp-adam",
        {},
        {
            "learning_rate": ("log", 1e-4, 2e-2),
            "clipping": ["flat", "normalised"],
            "clip_norm": [0.1, 0.3, 1.0, 3.0],
        },
    ),
    "dp-kfc": ("dp-kfc", {"side": "a"}, WHITENED),
    "dp-kfc both sides": ("dp-kfc", {"side": "both"}, WHITENED),
    "dp-kfc paper": (
        "dp-kfc",
        {"mode": "paper"},
        {"learning_rate": ("log", 1e-4, 2e-2), "damping": ("log", 1e-3, 1.0)},
    ),
}

#: name -> data, net, privacy, sampling, arms
TABLES = {
    f"{data} paper protocol": {
        "data": data,
        "model": "dpkfc-mnist",
        "epsilon": 1.0,
        "delta": 1e-5,
        "batch_size": 256,
        "epochs": 5,
        "arms": list(ARMS),
    }
    for data in ("mnist", "fashion_mnist")
}


def trials(table: str, arm: str) -> list[dict[str, object]]:
    """The settings of every trial of an arm."""
    recipe, fixed, searched = ARMS[arm]
    draw = random.Random(f"{table}/{arm}")
    found = []
    for _ in range(TRIALS.get(arm, FEWEST)):
        own = {name: _drawn(where, draw) for name, where in searched.items()}
        found.append({"recipe": recipe, **fixed, **own})
    return found


def inside(arm: str, settings: dict[str, object]) -> dict[str, bool]:
    """For every searched range, whether the value is off its outer twentieth."""
    found = {}
    for name, where in ARMS[arm][2].items():
        if isinstance(where, tuple):
            low, high = where[1:]
            value = float(settings[name])
            found[name] = (
                (high / low) ** 0.05 * low < value < high / (high / low) ** 0.05
            )
    return found


def _drawn(where, draw):
    if isinstance(where, list):
        return draw.choice(where)
    kind, low, high = where
    if kind == "log":
        return float(f"{low * (high / low) ** draw.random():.3g}")
    return float(f"{low + (high - low) * draw.random():.3g}")
