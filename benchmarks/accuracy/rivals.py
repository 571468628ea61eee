"""The arms of the table of rivals: DP-KFC's tables 1 and 6, measured anew.

The paper's figures stand beside ours. They are of RDP with delta 1/N and of shuffled
batches that are accounted as Poisson samples, so an epsilon there is not one here.
"""

from __future__ import annotations

from types import SimpleNamespace

CLIPS = {"clipping": ["flat", "normalised"], "clip_norm": [0.1, 0.3, 1.0, 3.0]}
WHITENED = {
    "damping": ("log", 0.005, 0.5),
    "exponent": [0.25, 0.5],
    "spectral_power": [2.0, 3.0, 4.0],
}
STEPS = {"learning_rate": ("log", 0.01, 1.0), "momentum": [0.9]}
ADAMBC = {
    "learning_rate": ("log", 3e-5, 3e-3),
    "floor": [1e-9, 1e-8, 1e-7, 1e-6],
}
KALMAN = {"learning_rate": ("log", 0.02, 4.0), "kappa": [0.3, 0.5, 0.7, 0.85]}
NORMALISED = {"clipping": "normalised", "clip_norm": 1.0}
#: As in the tables with DP-NGD: 500 images of Tiny-ImageNet, labels from the model.
PUBLIC = {"probe": "public", "labels": "model", "probe_size": 500, "probe_batches": 1}
ADADPS = {
    "learning_rate": ("log", 0.001, 1.0),
    "momentum": [0.0, 0.9],
    "moments": ["batch-squares", "example-squares"],
    **CLIPS,
}
TRIALS = 12


def _arm(recipe, fixed, searched):
    return SimpleNamespace(recipe=recipe, fixed=fixed, searched=searched, trials=TRIALS)


ARMS = {
    "dp-sgd": _arm(
        "dp-sgd",
        {},
        {"learning_rate": ("log", 0.02, 4.0), "momentum": [0.0, 0.9], **CLIPS},
    ),
    "dp-adam": _arm("dp-adam", {}, {"learning_rate": ("log", 1e-4, 2e-2), **CLIPS}),
    "adadps public": _arm("adadps", PUBLIC, ADADPS),
    "adadps pink": _arm("adadps", {}, {**ADADPS, "spectral_power": [2.0, 3.0]}),
    "gep": _arm(
        "gep",
        {},
        {
            "learning_rate": ("log", 0.01, 2.0),
            "momentum": [0.0, 0.9],
            "clip_norm": [0.3, 1.0, 3.0],
            "basis": [20, 50],
            "residual_clip": [0.1, 0.2, 0.5],
            "residual_share": [0.25, 0.5],
        },
    ),
    "disk": _arm("disk", {}, {**KALMAN, **CLIPS}),
    "dp-adambc": _arm("dp-adambc", {}, {**ADAMBC, **CLIPS}),
    "dp-stp": _arm("dp-stp", NORMALISED, {**STEPS, "damping": ("log", 0.02, 2.0)}),
    "dp-soap": _arm(
        "dp-soap",
        NORMALISED,
        {
            **STEPS,
            "damping": ("log", 0.02, 2.0),
            "exponent": [0.25, 0.5],
            "decay": [0.9, 0.97],
            "back_map": ["none", "natural"],
        },
    ),
    "dp-kfc public": _arm(
        "dp-kfc",
        {"side": "a", **PUBLIC, **NORMALISED},
        {
            **STEPS,
            **{k: v for k, v in WHITENED.items() if k != "spectral_power"},
            "back_map": ["none", "natural"],
        },
    ),
    "dp-kfc": _arm(
        "dp-kfc",
        {"side": "a", **NORMALISED},
        {**STEPS, **WHITENED, "back_map": ["none", "natural"]},
    ),
    "dp-kfc+adambc": _arm(
        "dp-kfc+adambc",
        {"side": "a", **NORMALISED},
        {**ADAMBC, **WHITENED, "back_map": ["none", "natural"]},
    ),
    "dp-kfc+disk": _arm(
        "dp-kfc+disk",
        {"side": "a", **NORMALISED},
        {**KALMAN, **WHITENED, "back_map": ["none", "natural"]},
    ),
}

#: Epsilon -> row -> per cent, from table 6 of the DP-KFC paper.
PAPER = {
    epsilon: dict(zip(_rows, figures, strict=True))
    for _rows in [
        ("dp-sgd", "adadps public", "disk", "dp-adambc", "dp-kfc public", "dp-kfc",
         "dp-kfc+adambc")
    ]
    for epsilon, figures in {
        1.0: ("91.7", "91.3", "93.7", "94.0", "95.3", "94.2", "95.5"),
        2.0: ("92.5", "93.2", "94.1", "94.8", "95.7", "95.0", "96.1"),
        5.0: ("93.4", "93.6", "94.3", "95.2", "96.2", "95.7", "96.4"),
        8.0: ("93.7", "93.3", "94.3", "95.3", "96.4", "95.9", "96.4"),
    }.items()
}  # fmt: skip
