r"""Are whitened gradients isotropic?

For ``P = F^-1/2`` with ``F = E[g g^T]`` DP-KFC's proposition B.1 says
``E[Pg (Pg)^T] = I`` and ``E ||Pg||^2 = d``. Damping, a limited rank, one side only, the
Kronecker form and probes that differ from the data all take from it; this measures how
much is left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from curvedp.diagnostics.geometry.study import Source, Study
from curvedp.errors import ConfigurationError
from curvedp.whitening import Whitener

__all__ = ["Isotropy", "isotropy", "layer_isotropy"]


#: Gradients are written down here, so memory bounds how many examples enter.
MOST_NUMBERS, FEWEST = 2**27, 16


@dataclass(frozen=True)
class Isotropy:
    """How round the second moment M of some vectors is.

    Attributes:
        dimension: d.
        mean_square: ``tr M / d``, 1 after exact whitening.
        effective_dimension: ``(tr M)^2 / tr(M^2)``, from 1 (a line) to d (a sphere).
    """

    dimension: int
    mean_square: float
    effective_dimension: float

    @property
    def ratio(self) -> float:
        """Effective dimension over dimension: 1 if and only if M is a multiple of I."""
        return self.effective_dimension / self.dimension

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "isotropy": self.ratio}


def isotropy(vectors: Tensor) -> Isotropy:
    r"""Of independent vectors ``[N, d]``, N at least 2. Pure; float64.

    ``tr M`` is the mean of ``||v_i||^2``, and ``tr(M^2)`` the mean of ``(v_i . v_j)^2``
    over pairs of *different* vectors: both are unbiased for any N, also for N < d,
    where the eigenvalues of the sample's own moment would say nothing. The effective
    dimension can come out above d by chance.
    """
    if vectors.dim() != 2 or len(vectors) < 2:
        raise ConfigurationError(
            f"isotropy needs at least two vectors [N, d], not {tuple(vectors.shape)}",
            "draw more examples",
        )
    n, d = vectors.shape
    gram = vectors.double() @ vectors.double().mT
    trace = float(gram.diagonal().mean())
    pairs = gram.square().sum() - gram.diagonal().square().sum()
    square = float(pairs) / (n * (n - 1))
    effective = trace**2 / square if square > 0 else math.nan
    return Isotropy(d, trace / d, effective)


def layer_isotropy(
    study: Study,
    source: Source,
    whiteners: Mapping[str, Whitener],
    seed: int = 0,
) -> dict[str, dict[str, Isotropy]]:
    """Isotropy of the per-example gradients, by map and by layer.

    Args:
        study: the model.
        source: whose gradients, one batch of it (fewer examples for large models); an
            oracle's are not private, nor is the result.
        whiteners: maps by name.
        seed: of the source's draw.
    """
    ios = next(study.batches(source, seed))
    parameters = sum(p.numel() for p in study.parameters.values())
    size = min(ios[0].batch_size, max(FEWEST, MOST_NUMBERS // parameters))
    grads: dict[str, Tensor] = {}
    for io in ios:
        grads |= io.take(slice(size)).per_example()
    found: dict[str, dict[str, Isotropy]] = {}
    for name, whitener in whiteners.items():
        rows = [_mapped(study, whitener, grads, i) for i in range(size)]
        found[name] = {
            layer[0]: isotropy(torch.stack([_flat(row, layer) for row in rows]))
            for layer in study.coverage.layers
        }
    return found


def _mapped(
    study: Study, whitener: Whitener, grads: Mapping[str, Tensor], index: int
) -> dict[str, Tensor]:
    values = {
        name: grads[name][index] if name in grads else torch.zeros_like(p)
        for name, p in study.parameters.items()
    }
    return whitener.apply(values)


def _flat(values: Mapping[str, Tensor], names: list[str]) -> Tensor:
    return torch.cat([values[name].flatten() for name in names])
