"""Fixed, public linear maps that reshape each gradient before it is clipped."""

from curvedp.whitening.base import Whitener
from curvedp.whitening.build import (
    SIDES,
    JointWhitening,
    KroneckerWhitening,
    diagonal_whitening,
)
from curvedp.whitening.damping import Damping, damped_root
from curvedp.whitening.identity import IdentityWhitener
from curvedp.whitening.joint import FloorSchedule, JointMap, matched_floor
from curvedp.whitening.layerwise import LayerwiseWhitener
from curvedp.whitening.maps import DiagonalMap, IdentityMap, KroneckerMap, LayerMap

__all__ = [
    "SIDES",
    "Damping",
    "DiagonalMap",
    "FloorSchedule",
    "IdentityMap",
    "IdentityWhitener",
    "JointMap",
    "JointWhitening",
    "KroneckerMap",
    "KroneckerWhitening",
    "LayerMap",
    "LayerwiseWhitener",
    "Whitener",
    "damped_root",
    "diagonal_whitening",
    "matched_floor",
]
