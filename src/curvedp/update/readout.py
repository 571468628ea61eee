"""From the whitened frame back to the parameters: what the noisy mean goes through."""

from __future__ import annotations

from collections.abc import Callable

from curvedp.errors import ConfigurationError
from curvedp.update.transform import Gradient, Values
from curvedp.whitening import Whitener

__all__ = ["BackMap", "MapBack", "mapped_back", "read_out"]

#: From values in the whitened frame to the parameters' own coordinates.
MapBack = Callable[[Values, Whitener, str], Values]


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
    return BackMap(back_map)(gradient, whitener)


def mapped_back(values: Values, whitener: Whitener, back_map: str) -> Values:
    """The values of :func:`read_out`."""
    if back_map == "natural":
        return whitener.adjoint(values)
    if back_map == "forward":
        return whitener.apply(values)
    if back_map == "inverse":
        return whitener.inverse(values)
    return values


class BackMap:
    """:func:`read_out` for a whole run.

    What noise becomes under a whitener is found once and not at every step.

    Args:
        kind: as ``back_map`` of :func:`read_out`.
        values: how values are mapped; a recorded :func:`mapped_back`, say.
    """

    def __init__(self, kind: str, values: MapBack = mapped_back) -> None:
        self.kind = kind
        self._values = values
        self._whitener: Whitener | None = None
        self._rows: Values = {}

    def __call__(self, gradient: Gradient, whitener: Whitener) -> Gradient:
        if self.kind == "none":
            return gradient
        values = self._values(gradient.values, whitener, self.kind)
        if gradient.noise_variance is None:
            return Gradient(values)
        white = _one_variance(gradient.noise_variance)
        if whitener is not self._whitener:
            inverse = self.kind == "inverse"
            self._rows = whitener.row_sq_norms(gradient.values, inverse=inverse)
            self._whitener = whitener
        return Gradient(values, {name: white * r for name, r in self._rows.items()})


def _one_variance(variances: Values) -> float:
    """The variance of white noise; a map mixes coordinates, so it must be."""
    found = {float(v) for v in variances.values() if v.dim() == 0}
    if len(found) != 1 or any(v.dim() for v in variances.values()):
        raise ConfigurationError(
            "noise that differs between parameters cannot be followed through a map",
            "use a clip rule that scales all parameters alike, or back_map='none'",
        )
    return found.pop()
