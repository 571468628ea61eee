"""From the whitened frame back to the parameters: what the noisy mean goes through."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from curvedp.whitening import Whitener

__all__ = ["read_out"]


def read_out(
    values: Mapping[str, Tensor], whitener: Whitener, back_map: str
) -> Mapping[str, Tensor]:
    r"""The update in the parameters' own coordinates. Post-processing: costs nothing.

    ===========  ====================  ================================================
    back_map     update                meaning
    ===========  ====================  ================================================
    ``none``     ``v``                 the whitened noisy gradient is the update
    ``natural``  ``P^T v``             with ``P = F^-1/2`` a natural gradient step
    ``inverse``  ``P^-1 v``            unbiased but for clipping; the noise is reshaped
    ===========  ====================  ================================================
    """
    if back_map == "natural":
        return whitener.adjoint(values)
    if back_map == "inverse":
        return whitener.inverse(values)
    return values
