r"""DP-BandMF: noise that later steps take back, from a banded matrix factorisation.

``theta <- theta - lr / B (sum_i clip_C(g_i) + s C x_t)``, with ``x = K^-1 z``, z of
independent standard normals and K lower triangular with b diagonals and unit columns.
K has the least ``tr(W (K^T K)^-1)``: squared noise in the parameters, over all steps.

Examples are in b groups that take turns; a step Poisson-samples one of them. The cost
is that of ``ceil(T / b)`` Poisson-sampled Gaussian steps at b times the rate: more
noise, of which most is taken back. Which b is best depends on epsilon, and
``bands="auto"`` finds it; at a small epsilon it is often 1, which is DP-SGD.

Choquette-Choo et al., "(Amplified) Banded Matrix Factorization: A unified approach to
private training", NeurIPS 2023.

=========  ==========================================================================
default    bands of least predicted error, plain steps, which the design is for
toeplitz   all columns alike: found at once, for any number of steps
=========  ==========================================================================
"""

from typing import Any

from curvedp.plan import Correlation
from curvedp.recipes.base import Recipe
from curvedp.recipes.search import CLIPPING, Choice, Range

__all__ = ["MODES", "RECIPE"]

MODES: dict[str, dict[str, Any]] = {"toeplitz": {"strategy": "toeplitz"}}

RECIPE = Recipe(
    name="dp-bandmf",
    summary="noise that later steps take back (banded matrix factorisation), SGD",
    optimiser="sgd",
    learning_rate=1.0,  # the length of dp-sgd's steps, whose momentum is 0.9
    momentum=0.0,
    correlation=Correlation(),
    modes=MODES,
    search={
        "learning_rate": Range(0.05, 4.0, log=True),
        **CLIPPING,
        "bands": Choice((1, 4, 8, 16)),
    },
)
