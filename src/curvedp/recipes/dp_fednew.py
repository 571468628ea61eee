"""DP-FedNew with a covariance that nobody has to pay for: Newton's step on the server.

``theta <- theta - lr A^-1 mean_i u_i`` with ``u_i`` of dp-fedgd and A the covariance of
each layer's inputs, all eigenpairs, O(d^2) for a linear model. Gradients are clipped
and get their noise as they are; the map acts on the noisy mean.

As published, every client takes A from its own records and its release is not paid for.
Here A comes from synthetic probes, or from public data that the caller gives
(``probe="public"``): the server has it too, and no client needs it.
"""

from curvedp.recipes.base import Recipe
from curvedp.recipes.curvature import Curvature
from curvedp.recipes.search import CLIPPING, Range

__all__ = ["RECIPE"]

RECIPE = Recipe(
    name="dp-fednew",
    summary="the server divides by a synthetic or public covariance of the inputs",
    federated=True,
    learning_rate=0.5,
    # 1/2 on each side of the noise is 1 after it
    curvature=Curvature(
        back_map="natural", clip_order="before", exponent=0.5, rank=0, refresh=10
    ),
    search={
        "learning_rate": Range(0.005, 2.0, log=True),
        "damping": Range(0.005, 2.0, log=True),
        **CLIPPING,
    },
)
