"""DP-SOAP: whiten with Kronecker factors that the releases themselves have taught.

``theta <- theta - lr / B (sum_i clip_C(P g_i) + N(0, (s C)^2 I))``, ``P g = L^-1/4 g
R^-1/4`` with L and R moving averages of ``G G^T`` and ``G^T G`` over released mean
gradients G, less the known second moments of the noise in them.

Shampoo's and SOAP's factors (Gupta, Koren and Singer, ICML 2018; Vyas et al., ICLR
2025), moved before the noise and corrected for it as DP-AdamBC corrects Adam. It needs
neither public data nor probes; the map is a function of releases, so it costs nothing.
See :mod:`curvedp.train.released`.
"""

from curvedp.recipes.base import Recipe
from curvedp.recipes.curvature import Curvature

__all__ = ["RECIPE"]

RECIPE = Recipe(
    name="dp-soap",
    summary="whiten with factors learnt from releases, noise taken out",
    optimiser="sgd",
    learning_rate=0.1,
    momentum=0.9,
    clipping="normalised",
    clip_norm=1.0,
    curvature=Curvature(
        probe="releases",
        side="both",
        exponent=0.25,
        damping=0.1,
        rank=0,
        decay=0.95,
        refresh=20,
    ),
)
