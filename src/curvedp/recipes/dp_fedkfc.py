"""DP-FedKFC: dp-fedgd whose clients whiten, without data, before they clip.

``u_i = (sum clip_C(P g) + N(0, (C s)^2 / n I)) / n_i``, ``theta <- theta - lr P^T
mean_i u_i``. Every client rebuilds the same P from the server's parameters and a shared
probe seed: synthetic probes look at nobody's data, so nothing of second order is sent
and nothing of it is paid for.

The outlook of DP-KFC; see :mod:`curvedp.recipes.dp_kfc`.
"""

from curvedp.recipes.base import Recipe
from curvedp.recipes.curvature import Curvature
from curvedp.recipes.search import WHITENING, Range

__all__ = ["RECIPE"]

RECIPE = Recipe(
    name="dp-fedkfc",
    summary="dp-fedgd with gradients whitened from a shared probe seed",
    federated=True,
    learning_rate=0.1,
    clipping="normalised",
    clip_norm=1.0,
    curvature=Curvature(back_map="natural", refresh=10),
    momentum=0.9,
    search={"learning_rate": Range(0.005, 2.0, log=True), **WHITENING},
)
