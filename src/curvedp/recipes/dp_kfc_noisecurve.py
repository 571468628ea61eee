r"""DP-KFC with NoiseCurve: whitened gradients, and noise designed for their curvature.

``theta <- theta - lr / B P^T (sum_i clip_C(P g_i) + s C x_t)``, with P of
:mod:`curvedp.recipes.dp_kfc` and ``x = K^-1 z`` of :mod:`curvedp.recipes.noisecurve`.

With ``theta = P^T phi`` this is plain noisy descent in phi, where the Hessian is
``P H P^T``. Its eigenvalues are what the noise is designed for: whitening brings them
near to each other, so that one correlation suits all directions. A new map ends a block
of noise (``docs/theory.md``); by default the first one stays.

=========  ==========================================================================
synthetic  the default: map and eigenvalues from noise of the inputs' shape
public     both from public inputs
=========  ==========================================================================
"""

from typing import Any

from curvedp.plan import Correlation
from curvedp.recipes.base import Recipe
from curvedp.recipes.curvature import Curvature
from curvedp.recipes.eigenvalues import Eigenvalues
from curvedp.recipes.pretraining import Pretraining
from curvedp.recipes.search import WHITENING, Choice, Range

__all__ = ["MODES", "RECIPE"]

MODES: dict[str, dict[str, Any]] = {
    "synthetic": {"probe": "synthetic", "spectrum_probe": "synthetic"},
    "public": {"probe": "public", "spectrum_probe": "public"},
}

RECIPE = Recipe(
    name="dp-kfc+noisecurve",
    summary="whiten as dp-kfc, with noise designed for the whitened curvature, SGD",
    optimiser="sgd",
    learning_rate=0.3,  # the length of dp-kfc's steps, whose momentum is 0.9
    momentum=0.0,
    clipping="normalised",
    clip_norm=1.0,
    curvature=Curvature(back_map="natural", refresh=0),
    correlation=Correlation(),
    eigenvalues=Eigenvalues(),
    pretraining=Pretraining(pretrain_epochs=0),
    modes=MODES,
    search={
        "learning_rate": Range(0.05, 4.0, log=True),
        "bands": Choice((1, 4, 8, 16)),
        **{k: v for k, v in WHITENING.items() if k != "back_map"},
    },
)
