"""From a model and a batch to per-example gradient norms and clip-weighted sums.

``cover`` (once, at attach time) finds and verifies a way to every parameter's
per-example gradients; a ``Recording`` (each physical batch) captures what is needed.
"""

from curvedp.layers.capture import Recording
from curvedp.layers.coverage import Coverage, cover
from curvedp.layers.io import LayerIO
from curvedp.layers.synthetic import Batch, Synthesiser, as_call, synthesiser_like
from curvedp.layers.verify import PerExampleLoss

__all__ = [
    "Batch",
    "Coverage",
    "LayerIO",
    "PerExampleLoss",
    "Recording",
    "Synthesiser",
    "as_call",
    "cover",
    "synthesiser_like",
]
