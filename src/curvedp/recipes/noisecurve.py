r"""NoiseCurve: noise that later steps take back, as far as the loss would feel it.

Steps, noise, groups and cost are those of :mod:`curvedp.recipes.dp_bandmf`. What
differs is the error that the noise is designed for. DP-BandMF minimises the noise in
the parameters; here it is the expected loss after the last step on a quadratic,
``tr(V^T M V X^-1)`` with ``V[i,j] = (1 - eta mu_i)^(T-j-1)`` and ``M = diag(mu)``:
gradient steps forget noise where the curvature mu is large, and where it is zero noise
does no harm.

The eigenvalues mu come from probes before the first step and stay: the largest by
Lanczos iterations, the others from a fitted curve (:mod:`curvedp.curvature.tail`). Two
things of a private step are taken into account that the theorem leaves out: clipping
shortens the gradient, and with it the curvature that acts (by the mean clip weight of
the probe); and where ``eta mu > 1``, it is clipping that keeps the run from diverging,
so such a mu counts as ``1 / eta``. Designed for plain SGD at a constant rate.

A spectrum stays what it is once a net has learnt something; so the paper pretrains on
the same public data, without labels (``pretrain_epochs=10, pretrain_labels="simclr"``).

Gu et al., "Correlating cross-iteration noise for DP-SGD using model curvature", 2025.

=========  ==========================================================================
synthetic  the default: eigenvalues from noise of the inputs' shape, no public data
public     as the paper: from public inputs, whose labels are not needed
=========  ==========================================================================
"""

from typing import Any

from curvedp.plan import Correlation
from curvedp.recipes.base import Recipe
from curvedp.recipes.eigenvalues import Eigenvalues
from curvedp.recipes.pretraining import Pretraining
from curvedp.recipes.search import CLIPPING, Choice, Range

__all__ = ["MODES", "RECIPE"]

MODES: dict[str, dict[str, Any]] = {
    "synthetic": {"spectrum_probe": "synthetic"},
    "public": {"spectrum_probe": "public"},
}

RECIPE = Recipe(
    name="noisecurve",
    summary="noise that later steps take back, designed for the loss's curvature, SGD",
    optimiser="sgd",
    learning_rate=1.0,  # that of dp-bandmf
    momentum=0.0,
    correlation=Correlation(),
    eigenvalues=Eigenvalues(),
    pretraining=Pretraining(pretrain_epochs=0),
    modes=MODES,
    search={
        "learning_rate": Range(0.05, 4.0, log=True),
        **CLIPPING,
        "bands": Choice((1, 4, 8, 16)),
    },
)
