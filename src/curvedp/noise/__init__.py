"""The barrier itself: mechanisms that turn a bounded private sum into a release."""

from curvedp.noise.aggregate import mean_release, scaled_release
from curvedp.noise.correlated import CorrelatedMechanism, CorrelatedState
from curvedp.noise.gaussian import GaussianMechanism
from curvedp.noise.grid import Grid
from curvedp.noise.lattice import LatticeShare
from curvedp.noise.mechanism import Mechanism, NoiseState, restore_release
from curvedp.noise.randomness import RandomStreams, Stream
from curvedp.noise.secure import SecureStreams

__all__ = [
    "CorrelatedMechanism",
    "CorrelatedState",
    "GaussianMechanism",
    "Grid",
    "LatticeShare",
    "Mechanism",
    "NoiseState",
    "RandomStreams",
    "SecureStreams",
    "Stream",
    "mean_release",
    "restore_release",
    "scaled_release",
]
