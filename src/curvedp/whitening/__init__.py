"""Fixed, public linear maps that reshape each gradient before it is clipped."""

from curvedp.whitening.base import Part, Parted, Whitener, parts_of
from curvedp.whitening.build import SIDES, KroneckerWhitening, diagonal_whitening
from curvedp.whitening.clamped import JointWhitening, step_by_step
from curvedp.whitening.damping import Damping, damped_root
from curvedp.whitening.diagonal import DiagonalMap
from curvedp.whitening.identity import IdentityWhitener
from curvedp.whitening.joint import FloorSchedule, JointMap, matched_floor
from curvedp.whitening.layerwise import LayerwiseWhitener
from curvedp.whitening.maps import IdentityMap, KroneckerMap, LayerMap
from curvedp.whitening.places import own_map, refill
from curvedp.whitening.subspace import (
    SubspaceMap,
    SubspaceWhitener,
    SubspaceWhitening,
)

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
    "Part",
    "Parted",
    "SubspaceMap",
    "SubspaceWhitener",
    "SubspaceWhitening",
    "Whitener",
    "damped_root",
    "diagonal_whitening",
    "matched_floor",
    "own_map",
    "parts_of",
    "refill",
    "step_by_step",
]
