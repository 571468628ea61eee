"""DP-FedGD: every client's noisy mean of clipped gradients, and their mean.

``u_i = (sum clip_C(g) + N(0, (C s)^2 / n I)) / n_i``, and ``theta <- theta - lr mean_i
u_i``, with the declared size ``n_i``; one gradient of all records a round.

McMahan et al., "Learning Differentially Private Recurrent Language Models", ICLR 2018,
with the record as the unit, as in DP-FedNew and DP-FedSOFIM.
"""

from curvedp.recipes.base import Recipe
from curvedp.recipes.search import CLIPPING, Range

__all__ = ["RECIPE", "WITH_MOMENTUM"]

RECIPE = Recipe(
    name="dp-fedgd",
    summary="clients clip, add their share of the noise; the server steps by the mean",
    federated=True,
    optimiser="sgd",
    learning_rate=0.5,
    search={"learning_rate": Range(0.02, 4.0, log=True), **CLIPPING},
)

WITH_MOMENTUM = Recipe(
    name="dp-fedgd+momentum",
    summary="dp-fedgd with momentum on the server",
    federated=True,
    optimiser="sgd",
    learning_rate=0.1,
    momentum=0.9,
    search={"learning_rate": Range(0.005, 2.0, log=True), **CLIPPING},
)
