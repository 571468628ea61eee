"""Bounding what one example contributes: clip rules, and the bounded sum they give."""

from curvedp.clipping.bounded import clipped_sum
from curvedp.clipping.rules import (
    ClippingRule,
    FlatClipping,
    NormalisedClipping,
    PerLayerClipping,
    clipping_rule,
)

__all__ = [
    "ClippingRule",
    "FlatClipping",
    "NormalisedClipping",
    "PerLayerClipping",
    "clipped_sum",
    "clipping_rule",
]
