"""Bounding what one example contributes: clip rules, and the bounded sum they give."""

from collections.abc import Callable

from curvedp.clipping.adaptive import AdaptiveClipping
from curvedp.clipping.bounded import Replacing, clipped_sum, own_copy
from curvedp.clipping.measured import CurvatureClipping, MeasuredLayer
from curvedp.clipping.rules import (
    ClippingRule,
    FlatClipping,
    NormalisedClipping,
    PerLayerClipping,
)
from curvedp.errors import ConfigurationError

__all__ = [
    "AdaptiveClipping",
    "ClippingRule",
    "CurvatureClipping",
    "FlatClipping",
    "MeasuredLayer",
    "NormalisedClipping",
    "PerLayerClipping",
    "Replacing",
    "clipped_sum",
    "clipping_rule",
    "own_copy",
]

_RULES: dict[str, Callable[[float], ClippingRule]] = {
    FlatClipping.name: FlatClipping,
    NormalisedClipping.name: NormalisedClipping,
    PerLayerClipping.name: PerLayerClipping,
    AdaptiveClipping.name: AdaptiveClipping.start,
}


def clipping_rule(name: str, clip_norm: float) -> ClippingRule:
    """A rule by its name, with the usual settings."""
    if name not in _RULES:
        raise ConfigurationError(
            f"unknown clipping rule {name!r}", f"choose one of: {', '.join(_RULES)}"
        )
    return _RULES[name](clip_norm)
