"""The arms of the table of correlated noise: NoiseCurve's table 1b, measured anew.

Every arm is a grid of sixteen trials: four learning rates, and four numbers of bands
where noise is correlated, or momentum and clip rule where it is not. Less noise bears
longer steps: rates are twice as high above epsilon 1. Noise is designed for plain SGD
at a constant rate, so those arms have no momentum. With one band it is independent,
whatever it is designed for: such trials of arms without a map are one run. The map of
dp-kfc+noisecurve has the settings that DP-NGD's table on the same net chose for dp-kfc;
its refreshes end blocks of noise, so that there are four.
"""

from __future__ import annotations

from types import SimpleNamespace

EPSILONS = (1.0, 2.0, 5.0)
RATES = {
    1.0: [1.0, 2.0, 4.0, 8.0],
    2.0: [2.0, 4.0, 8.0, 16.0],
    5.0: [2.0, 4.0, 8.0, 16.0],
}
#: Where a first search chose its lowest rate it has one more, below.
ONE_LOWER = {(2.0, None): ("dp-bandmf", "noisecurve synthetic", "noisecurve public")}
BANDS = [1, 4, 8, 16]
NORMALISED = {"clipping": "normalised", "clip_norm": 1.0}
PUBLIC = {"spectrum_probe": "public", "spectrum_size": 500}
WHITENED = {
    "side": "a",
    "damping": 0.06,
    "exponent": 0.25,
    "rank": 32,
    "refresh": 120,
}


def arms(epsilon, start):
    """The arms of a table, by name."""
    rates = RATES[epsilon]

    def correlated(recipe, **fixed):
        searched = {"learning_rate": rates, "bands": BANDS}
        return SimpleNamespace(
            recipe=recipe, fixed={**fixed, **NORMALISED}, searched=searched
        )

    found = {
        "dp-sgd": SimpleNamespace(
            recipe="dp-sgd",
            fixed={"clip_norm": 1.0},
            searched={
                "effective_step": rates,
                "momentum": [0.0, 0.9],
                "clipping": ["flat", "normalised"],
            },
        ),
        "dp-bandmf": correlated("dp-bandmf"),
        "noisecurve synthetic": correlated("noisecurve"),
        "noisecurve public": correlated("noisecurve", **PUBLIC),
        "dp-kfc+noisecurve": correlated("dp-kfc+noisecurve", **WHITENED),
    }
    for name in ONE_LOWER.get((epsilon, start), ()):
        found[name].searched["learning_rate"] = [rates[0] / 2, *rates]
    return found


def same_run(arm, settings):
    """Arm and settings of the run that a trial is: with one band there is one."""
    if settings["recipe"] != "noisecurve" or settings["bands"] > 1:
        return arm, settings
    own = {n: v for n, v in settings.items() if n not in PUBLIC}
    return "dp-bandmf", {**own, "recipe": "dp-bandmf"}


#: NoiseCurve's table 1b: its small CNN, pretrained, three runs.
PAPER = {
    1.0: {"dp-sgd": "48.65", "dp-bandmf": "49.18", "noisecurve public": "49.8"},
    2.0: {"dp-sgd": "51.81", "dp-bandmf": "52.14", "noisecurve public": "54.13"},
    5.0: {"dp-sgd": "54.6", "dp-bandmf": "55.42", "noisecurve public": "58.07"},
}
