"""The arms of the table of rivals: DP-KFC's tables 1 and 6, measured anew.

The paper's figures stand beside ours. They are of RDP with delta 1/N and of shuffled
batches that are accounted as Poisson samples, so an epsilon there is not one here.
"""

from __future__ import annotations

from types import SimpleNamespace

#: What every arm that steps along its gradient searches: see ``arms.effective_step``.
STEP = {"effective_step": ("log", 0.1, 5.0)}
CLIPS = {"clipping": ["flat", "normalised"], "clip_norm": [0.1, 0.3, 1.0, 3.0]}
NORMALISED = {"clipping": "normalised", "clip_norm": 1.0}
WHITENED = {
    "damping": ("log", 0.005, 0.5),
    "exponent": [0.25, 0.5],
    "back_map": ["none", "natural"],
}
SYNTHETIC = {**WHITENED, "spectral_power": [2.0, 3.0, 4.0]}
#: As in the tables with DP-NGD: 500 images of Tiny-ImageNet, labels from the model.
PUBLIC = {"probe": "public", "labels": "model", "probe_size": 500, "probe_batches": 1}
MOMENTUM = {"momentum": [0.0, 0.9]}
KALMAN = {**STEP, "kappa": [0.3, 0.5, 0.7, 0.85]}
ADAMBC = {**STEP, "relative_floor": [1e-8, 1e-7, 1e-6, 1e-5]}
ADADPS = {
    **STEP,
    **MOMENTUM,
    "moments": ["batch-squares", "example-squares"],
    **CLIPS,
}
#: The authors' damping, 1e-10, scales coordinates that no probe moves by 1e5.
DAMPED = {**ADADPS, "damping": ("log", 1e-8, 1e-1)}
GEP = {
    **MOMENTUM,
    "clip_norm": [0.3, 1.0, 3.0],
    "basis": [20, 50],
    "residual_clip": [0.1, 0.2, 0.5],
    "residual_share": [0.25, 0.5],
}
LARGER_STEP = {"effective_step": ("log", 0.3, 20.0)}
#: Steps that an average of the iterates reaches back: 33, 50, 100, 200.
AVERAGE = {"average": [0.97, 0.98, 0.99, 0.995]}
TRIALS = 12


def _arm(recipe, fixed, searched, again=None):
    return SimpleNamespace(
        recipe=recipe, fixed=fixed, searched=searched, trials=TRIALS, again=again
    )


def _whitened(recipe, searched, fixed=None):
    return _arm(recipe, {"side": "a", **(fixed or {}), **NORMALISED}, searched)


ARMS = {
    "dp-sgd": _arm("dp-sgd", {}, {**STEP, **MOMENTUM, **CLIPS}),
    "dp-sgd averaged": _arm("dp-sgd", {}, {**STEP, **MOMENTUM, **CLIPS, **AVERAGE}),
    "dp-adam": _arm("dp-adam", {}, {"learning_rate": ("log", 1e-4, 2e-2), **CLIPS}),
    "adadps public": _arm("adadps", PUBLIC, ADADPS),
    "adadps pink": _arm("adadps", {}, {**ADADPS, "spectral_power": [2.0, 3.0]}),
    "adadps public, damped": _arm("adadps", PUBLIC, DAMPED),
    "adadps pink, damped": _arm("adadps", {}, {**DAMPED, "spectral_power": [2.0, 3.0]}),
    "gep": _arm("gep", {}, {**STEP, **GEP}, {**LARGER_STEP, **GEP}),
    "disk": _arm("disk", {}, {**KALMAN, **CLIPS}),
    "dp-adambc": _arm("dp-adambc", {}, {**ADAMBC, **CLIPS}),
    "dp-stp": _arm(
        "dp-stp", NORMALISED, {**STEP, **MOMENTUM, "damping": ("log", 0.02, 2.0)}
    ),
    "dp-soap": _arm(
        "dp-soap",
        {"momentum": 0.9, "refresh": 50, **NORMALISED},
        {
            **STEP,
            "damping": ("log", 0.02, 2.0),
            "exponent": [0.25, 0.5],
            "decay": [0.9, 0.97],
            "back_map": ["none", "natural"],
        },
    ),
    "dp-kfc public": _whitened(
        "dp-kfc", {**STEP, **WHITENED}, {"momentum": 0.9, **PUBLIC}
    ),
    "dp-kfc": _whitened("dp-kfc", {**STEP, **SYNTHETIC}, {"momentum": 0.9}),
    "dp-kfc averaged": _whitened(
        "dp-kfc", {**STEP, **SYNTHETIC, **AVERAGE}, {"momentum": 0.9}
    ),
    "dp-kfc+adambc": _whitened("dp-kfc+adambc", {**ADAMBC, **SYNTHETIC}),
    "dp-kfc+disk": _whitened("dp-kfc+disk", {**KALMAN, **SYNTHETIC}),
    # the same searched again where it was best on the validation split, and averaged
    "dp-kfc+disk averaged": _whitened(
        "dp-kfc+disk",
        {
            "effective_step": ("log", 0.15, 1.5),
            "kappa": [0.3, 0.5, 0.85],
            "damping": ("log", 0.005, 0.3),
            "spectral_power": [2.0, 3.0],
            "average": [0.9, 0.97, 0.98],
        },
        {"exponent": 0.5, "back_map": "natural"},
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
