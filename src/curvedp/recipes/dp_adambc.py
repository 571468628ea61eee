"""DP-AdamBC: Adam on the noisy mean, with the noise taken out of the second moment.

``theta <- theta - lr m^ / sqrt(max(v^ - Phi, floor))``, Phi the bias-corrected average
of the noise variance ``(s C / B)^2``; see :class:`curvedp.update.AdamBC`.

Tang, Shpilevskiy and Lecuyer, AAAI 2024. Where the noise outweighs the signal, DP-Adam
divides all coordinates by the noise; this keeps Adam's step sizes. A coordinate without
signal moves by ``lr m^ / sqrt(floor)``, which bounds the learning rate from above.
"""

from curvedp.recipes.base import Recipe
from curvedp.recipes.search import BIAS_CORRECTED, CLIPPING
from curvedp.update import AdamBC, Chain

__all__ = ["RECIPE"]

RECIPE = Recipe(
    name="dp-adambc",
    summary="Adam whose second moment is corrected for the noise",
    optimiser="sgd",
    learning_rate=3e-4,
    chain=Chain((AdamBC(),)),
    search={**BIAS_CORRECTED, **CLIPPING},
)
