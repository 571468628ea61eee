"""DP-KFC: whiten each example's gradient with synthetic curvature, clip, add noise.

``theta <- theta - lr / B P (sum_i clip_C(P g_i) + N(0, (s C)^2 I))``, ``P g = L g R``
with roots L and R of Kronecker factors that come from probes, never from private data.
The paper leaves out the P before the sum (``back_map="none"``); with it the accuracy is
higher (``docs/results/ablation.md``).

Following DP-KFC (see ``docs/theory.md`` for what differs and why). Modes:

=========  ==========================================================================
default    inputs' side only, 32 eigenpairs, relative damping, normalised clipping
paper      both sides, all eigenpairs, no map after the noise, flat clipping, SGD with
           momentum (its CNNs and linear models; ``optimiser`` is fixed, so bring AdamW
           for a transformer), absolute damping, pink noise of power 1
official   what its public code computes: mean loss, absolute damping, one probe batch
=========  ==========================================================================
"""

from typing import Any

from curvedp.recipes.base import Recipe
from curvedp.recipes.curvature import Curvature
from curvedp.recipes.search import WHITENING, Choice, Range

__all__ = ["MODES", "RECIPE"]

MODES: dict[str, dict[str, Any]] = {
    "paper": {
        "optimiser": "sgd",
        "learning_rate": 1e-3,
        "momentum": 0.9,
        "clipping": "flat",
        "side": "both",
        "back_map": "none",
        "rank": 0,
        "labels": "uniform",
        "spectral_power": 1.0,
        # pi = 1e-3 of its section on settings, gamma = 1e-2 of its theorem: both added
        "damping": 0.011,
        "absolute_damping": True,
        "probe_batches": 10,
        "refresh": 50,
    },
    "official": {
        "optimiser": "adam",
        "learning_rate": 1e-3,
        "clipping": "flat",
        "side": "both",
        "back_map": "none",
        "rank": 0,
        "labels": "uniform",
        "spectral_power": 2.0,
        "damping": 1.01e-3,
        "absolute_damping": True,
        "mean_loss": True,
        "probe_batches": 1,
        "refresh": 234,
    },
}

RECIPE = Recipe(
    name="dp-kfc",
    summary="whiten with curvature from synthetic probes, then as dp-sgd",
    optimiser="sgd",
    learning_rate=0.03,
    momentum=0.9,
    clipping="normalised",
    clip_norm=1.0,
    curvature=Curvature(back_map="natural"),
    modes=MODES,
    search={
        "learning_rate": Range(0.005, 1.0, log=True),
        "momentum": Choice((0.0, 0.9)),
        **WHITENING,
    },
)
