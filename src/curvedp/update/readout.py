"""From the whitened frame back to the parameters: what the noisy mean goes through."""

from __future__ import annotations

from curvedp.errors import ConfigurationError
from curvedp.update.transform import Gradient, Values
from curvedp.whitening import Whitener

__all__ = ["read_out"]


def read_out(gradient: Gradient, whitener: Whitener, back_map: str) -> Gradient:
    r"""The update in the parameters' own coordinates. Post-processing: costs nothing.

    ===========  ==========  ================================  ======================
    back_map     update      variance of coordinate j          meaning
    ===========  ==========  ================================  ======================
    ``none``     ``v``       ``t``                             the whitened noisy
                                                               gradient is the update
    ``natural``  ``P^T v``   ``t ||row j of P^T||^2``          with ``P = F^-1/2`` a
                                                               natural gradient step
    ``inverse``  ``P^-1 v``  ``t ||row j of P^-1||^2``         unbiased but for
                                                               clipping
    ``forward``  ``M v``     ``t ||row j of M||^2``            the sum was clipped as it
                                                               is, and is mapped now
    ===========  ==========  ================================  ======================

    ``t = (s C / B)^2`` is the variance of the noise in every coordinate of ``v``. Noise
    that was white is not so after a back-map, and coordinates are correlated; the
    variance of each is exact. Maps are symmetric, so their rows are their columns.
    """
    if back_map == "natural":
        values: Values = whitener.adjoint(gradient.values)
    elif back_map == "forward":
        values = whitener.apply(gradient.values)
    elif back_map == "inverse":
        values = whitener.inverse(gradient.values)
    else:
        return gradient
    if gradient.noise_variance is None:
        return Gradient(values)
    white = _one_variance(gradient.noise_variance)
    rows = whitener.row_sq_norms(gradient.values, inverse=back_map == "inverse")
    return Gradient(values, {name: white * r for name, r in rows.items()})


def _one_variance(variances: Values) -> float:
    """The variance of white noise; a map mixes coordinates, so it must be."""
    found = {float(v) for v in variances.values() if v.dim() == 0}
    if len(found) != 1 or any(v.dim() for v in variances.values()):
        raise ConfigurationError(
            "noise that differs between parameters cannot be followed through a map",
            "use a clip rule that scales all parameters alike, or back_map='none'",
        )
    return found.pop()
