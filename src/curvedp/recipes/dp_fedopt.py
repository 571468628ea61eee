"""DP-FedAdam and DP-FedYogi: dp-fedgd with an adaptive server.

``theta <- theta - lr m / (sqrt(v) + tau)``; see :class:`curvedp.update.FedAdam` and
:class:`curvedp.update.FedYogi`. Reddi et al., "Adaptive Federated Optimization", ICLR
2021, on noisy updates. dp-fedadambc takes the noise out of v
(:class:`curvedp.update.AdamBC`).
"""

from curvedp.recipes.base import Recipe
from curvedp.recipes.search import CLIPPING, Choice, Range
from curvedp.update import AdamBC, Chain, FedAdam, FedYogi

__all__ = ["ADAMBC", "RECIPE", "YOGI"]

_SEARCH = {
    "learning_rate": Range(1e-3, 0.3, log=True),
    "tau": Choice((1e-4, 1e-3, 1e-2)),
    **CLIPPING,
}

RECIPE = Recipe(
    name="dp-fedadam",
    summary="dp-fedgd with Adam on the server",
    federated=True,
    learning_rate=0.01,
    chain=Chain((FedAdam(),)),
    search=_SEARCH,
)

YOGI = Recipe(
    name="dp-fedyogi",
    summary="dp-fedgd with Yogi on the server",
    federated=True,
    learning_rate=0.01,
    chain=Chain((FedYogi(),)),
    search=_SEARCH,
)

ADAMBC = Recipe(
    name="dp-fedadambc",
    summary="dp-fedgd with Adam on the server, corrected for the noise",
    federated=True,
    learning_rate=0.01,
    # tens of rounds, not thousands of steps: a shorter memory and a floor nearer to
    # the squares of whole gradients
    chain=Chain((AdamBC(beta2=0.99, floor=1e-4),)),
    search={
        "learning_rate": Range(1e-3, 0.3, log=True),
        "floor": Range(1e-6, 1e-2, log=True),
        **CLIPPING,
    },
)
