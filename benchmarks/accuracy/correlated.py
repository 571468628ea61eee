"""The arms of the table of correlated noise: NoiseCurve's table 1b, measured anew.

Every arm is a grid of sixteen trials: four learning rates, and four numbers of bands
where noise is correlated, or momentum and clip rule where it is not. Noise is designed
for plain SGD at a constant rate, so those arms have no momentum. The map of
dp-kfc+noisecurve has the settings that DP-NGD's table on the same net chose for dp-kfc;
its refreshes end blocks of noise, so that there are four.
"""

from __future__ import annotations

from types import SimpleNamespace

RATES = [1.0, 2.0, 4.0, 8.0]
BANDS = [1, 4, 8, 16]
NORMALISED = {"clipping": "normalised", "clip_norm": 1.0}
CORRELATED = {"learning_rate": RATES, "bands": BANDS}
PUBLIC = {"spectrum_probe": "public", "spectrum_size": 500}
WHITENED = {
    "side": "a",
    "damping": 0.06,
    "exponent": 0.25,
    "rank": 32,
    "refresh": 120,
}


def _arm(recipe, fixed, searched):
    return SimpleNamespace(
        recipe=recipe, fixed={**fixed, **NORMALISED}, searched=searched
    )


ARMS = {
    "dp-sgd": SimpleNamespace(
        recipe="dp-sgd",
        fixed={"clip_norm": 1.0},
        searched={
            "effective_step": RATES,
            "momentum": [0.0, 0.9],
            "clipping": ["flat", "normalised"],
        },
    ),
    "dp-bandmf": _arm("dp-bandmf", {}, CORRELATED),
    "noisecurve synthetic": _arm("noisecurve", {}, CORRELATED),
    "noisecurve public": _arm("noisecurve", PUBLIC, CORRELATED),
    "dp-kfc+noisecurve": _arm("dp-kfc+noisecurve", WHITENED, CORRELATED),
}
EPSILONS = (1.0, 2.0, 5.0)
#: NoiseCurve's table 1b: its small CNN, pretrained, three runs.
PAPER = {
    1.0: {"dp-sgd": "48.65", "dp-bandmf": "49.18", "noisecurve public": "49.8"},
    2.0: {"dp-sgd": "51.81", "dp-bandmf": "52.14", "noisecurve public": "54.13"},
    5.0: {"dp-sgd": "54.6", "dp-bandmf": "55.42", "noisecurve public": "58.07"},
}
