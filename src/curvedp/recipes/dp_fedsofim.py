"""DP-FedSOFIM: dp-fedgd whose server divides by the curvature along its average.

``theta <- theta - lr (M M^T + rho I)^-1 U``, ``M <- beta M + (1 - beta) U``; see
:class:`curvedp.update.Sofim`. Nair, Sen and Sen, 2026. Modes:

=========  ===========================================================================
default    the paper's form (eq. 14, 15), its C, beta and rho
code       what its public code computes: ``M^ / (rho + |M^|^2)``
adaptive   the paper's form, rho and beta from the noise, and so from epsilon
=========  ===========================================================================

What compares with the rate of dp-fedgd is ``lr / rho``.
"""

from curvedp.recipes.base import Recipe
from curvedp.recipes.search import CLIPPING, Choice, Range
from curvedp.update import Chain, Sofim

__all__ = ["RECIPE"]

RECIPE = Recipe(
    name="dp-fedsofim",
    summary="the server inverts one direction of curvature, in O(d)",
    federated=True,
    optimiser="sgd",
    learning_rate=0.2,
    clip_norm=10.0,
    chain=Chain((Sofim(),)),
    modes={
        "code": {"form": "code"},
        "adaptive": {"adaptive_rho": True, "adaptive_beta": True},
    },
    search={
        "learning_rate": Range(0.01, 2.0, log=True),
        "rho": Range(0.01, 10.0, log=True),
        "beta": Choice((0.0, 0.9)),
        **CLIPPING,
    },
)
