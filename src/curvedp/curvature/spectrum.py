r"""The largest eigenvalues of a model's curvature, and a guess at all the others.

The noise of a step is forgotten in a direction of curvature mu at a rate of ``1 - eta
mu`` a step; so which noise a run can bear depends on the eigenvalues, and on nothing
else of the Hessian (NoiseCurve, theorem 1). The k largest come from Lanczos iterations,
the sum of the others from quadrature, and they themselves from a curve
(:mod:`curvedp.curvature.tail`).

Everything is a function of parameters and probes: public if those are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from curvedp.barrier import Provenance
from curvedp.curvature.density import lanczos_density
from curvedp.curvature.products import Product
from curvedp.curvature.tail import (
    FEWEST,
    LEAST_SHARE,
    Floats,
    Tail,
    fit_tail,
    fit_tail_to_sum,
)
from curvedp.errors import ConfigurationError

__all__ = ["CurvatureSpectrum", "curvature_spectrum", "top_eigenvalues"]

#: Matrices of up to so many rows are written down and solved whole.
DENSE = 256
#: Relative error of an eigenvalue at which Lanczos ends.
TOLERANCE = 1e-4
#: Least steps, and vectors, of the quadrature of the sum. The more eigenvalues are
#: known, the smaller are the others, and the more steps it takes to tell them from 0.
_STEPS, _VECTORS = 30, 4
_ELSEWHERE = (
    "probe at parameters where the loss is not flat: another initialisation, or after "
    "pretraining"
)


@dataclass(frozen=True)
class CurvatureSpectrum:
    """Eigenvalues of a symmetric matrix, as far as they are known.

    Attributes:
        largest: descending; negative ones are among them where there are few.
        size: n.
        tail: of the positive eigenvalues beyond; None where there are none.
        provenance: of parameters and probe together.
    """

    largest: tuple[float, ...]
    size: int
    tail: Tail | None
    provenance: Provenance

    @property
    def positive(self) -> tuple[float, ...]:
        """Those that are above a millionth of the largest; the others count as 0."""
        least = LEAST_SHARE * self.largest[0]
        return tuple(x for x in self.largest if x > max(0.0, least))

    def grouped(self, groups: int = 50) -> tuple[Floats, Floats]:
        """Positive eigenvalues in groups of nearly equal, and how many are in each.

        Descending; the known ones first, then the tail, each in up to ``groups``.
        """
        known = np.asarray(self.positive)
        if not len(known):
            return np.zeros(0), np.zeros(0)
        width = max(np.log(known[0] / known[-1]), 1e-12) / groups
        numbers = np.minimum(np.log(known[0] / known) // width, groups - 1)
        _, counts = np.unique(numbers, return_counts=True)
        ends = np.cumsum(counts)
        values = np.add.reduceat(known, ends - counts) / counts
        if self.tail is None:
            return values, counts.astype(np.float64)
        more, often = self.tail.grouped(len(known), groups)
        return np.append(values, more), np.append(counts.astype(np.float64), often)

    def facts(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "provenance": self.provenance.value,
            "parameters": self.size,
            "eigenvalues": len(self.positive),
            "largest": self.largest[0],
            "tail": None if self.tail is None else self.tail.to_json(),
        }


def top_eigenvalues(
    product: Product,
    size: int,
    count: int,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    tolerance: float = TOLERANCE,
) -> Floats:
    """The largest eigenvalues of a symmetric matrix, descending.

    By scipy's Lanczos iterations with restarts. A small matrix is solved whole.

    Args:
        product: with the matrix.
        size: n.
        count: k; all where the matrix has fewer.
        seed: of the vector to start from.
        device: where ``product`` takes its vectors.
        tolerance: relative; those that have not converged are left out.

    Raises:
        ConfigurationError: a product has values that are no numbers, or no eigenvalue
            converged.
    """
    if count < 1:
        raise ConfigurationError(
            f"{count} eigenvalues were asked for", "ask for 1 or more"
        )

    def times(vector: Any) -> Floats:
        given = torch.as_tensor(np.asarray(vector, dtype=np.float64).reshape(-1))
        image: Floats = product(given.to(device)).cpu().numpy()
        if not np.isfinite(image).all():
            raise ConfigurationError(
                "the curvature of the loss has values that are no numbers",
                f"{_ELSEWHERE}; if that diverged, with a smaller learning rate",
            )
        return image

    if size <= max(DENSE, count + 1):
        whole = np.stack([times(row) for row in np.eye(size)])
        return np.asarray(np.linalg.eigvalsh((whole + whole.T) / 2)[::-1][:count])
    # scipy takes long to import, and most runs need none of it
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    start = np.random.default_rng(seed).standard_normal(size)
    if not times(start).any():  # the matrix is zero, and scipy would not have it
        return np.zeros(count)
    operator = LinearOperator((size, size), matvec=times, dtype=np.float64)
    try:
        found = eigsh(
            operator, count, which="LA", v0=start, tol=tolerance,
            return_eigenvectors=False,
        )  # fmt: skip
    except ArpackNoConvergence as error:
        found = error.eigenvalues
        if len(found) == 0:
            raise ConfigurationError(
                "no eigenvalue of the curvature converged",
                "ask for fewer of them, or probe with more examples",
            ) from error
    return np.sort(found)[::-1]


def curvature_spectrum(
    product: Product,
    size: int,
    provenance: Provenance,
    *,
    top: int = 100,
    tail: int = 0,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> CurvatureSpectrum:
    """Largest eigenvalues with a fitted tail.

    Args:
        product: with the Hessian or the Gauss-Newton matrix.
        size: n.
        provenance: of what the product was made from.
        top: k, how many eigenvalues are computed.
        tail: ``p+``; 0 takes the one that the sum of all eigenvalues speaks for.
        seed: of the vectors to start from.
        device: where ``product`` takes its vectors.

    Raises:
        ConfigurationError: no eigenvalue is positive, so that no noise would matter.
    """
    found = top_eigenvalues(product, size, top, seed=seed, device=device)
    largest = tuple(float(x) for x in found)
    if not np.isfinite(found).all() or largest[0] <= 0:
        raise ConfigurationError(
            f"the largest eigenvalue of the curvature is {largest[0]:g}",
            _ELSEWHERE,
        )
    whole = CurvatureSpectrum(largest, size, None, provenance)
    known = whole.positive
    ended = len(known) < len(largest) or len(largest) >= size
    if ended or len(known) < FEWEST:
        return whole
    if tail:
        return CurvatureSpectrum(largest, size, fit_tail(known, tail), provenance)
    steps = max(_STEPS, len(known) // 2)
    density = lanczos_density(
        product, size, steps=steps, vectors=_VECTORS, seed=seed, device=device
    )
    total = sum(known) + density.positive_sum(below=known[-1])
    fitted = fit_tail_to_sum(known, size, total)
    return CurvatureSpectrum(largest, size, fitted, provenance)
