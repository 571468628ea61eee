"""The density of the Hessian's eigenvalues, of a study's model on a source's examples.

By stochastic Lanczos quadrature (:mod:`curvedp.curvature.density`; DP-KFC, figure 7).
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvedp.curvature.density import Density, lanczos_density
from curvedp.curvature.products import Product, curvature_product, probe_batches
from curvedp.diagnostics.geometry.study import Source, Study
from curvedp.errors import withheld

__all__ = ["Density", "hessian_density", "hessian_product", "lanczos_density"]


def hessian_product(study: Study, source: Source, seed: int = 0) -> Product:
    """``v -> H v`` of the mean loss over the source's examples, by autograd twice.

    Shapes: v is ``[n]``, all trained parameters flattened in the order of
    ``study.parameters``. The model runs in float64 and in evaluation mode.
    """
    generator = torch.Generator().manual_seed(seed)
    public = source.how.probe.provenance.is_public
    with withheld("the model, on the oracle's examples", public=public):
        batches = probe_batches(study.model, source.how, generator)
        made = curvature_product(study.model, study.parameters, study.loss, batches)

    def product(vector: Tensor) -> Tensor:
        with withheld("the model, on the oracle's examples", public=public):
            return made(vector)

    return product


def hessian_density(
    study: Study,
    source: Source,
    *,
    steps: int = 40,
    vectors: int = 8,
    seed: int = 0,
) -> Density:
    """The density of the Hessian of the mean loss over a source's examples.

    On an oracle it is not private. Costs ``steps * vectors`` double backward passes.
    """
    size = sum(p.numel() for p in study.parameters.values())
    device = next(study.model.parameters()).device
    product = hessian_product(study, source, seed)
    return lanczos_density(
        product, size, steps=steps, vectors=vectors, seed=seed, device=device
    )
