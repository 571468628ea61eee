"""The barrier itself: mechanisms that turn a bounded private sum into a release."""

from curvedp.noise.gaussian import GaussianMechanism
from curvedp.noise.mechanism import Mechanism, NoiseState, restore_release
from curvedp.noise.randomness import RandomStreams, Stream

__all__ = [
    "GaussianMechanism",
    "Mechanism",
    "NoiseState",
    "RandomStreams",
    "Stream",
    "restore_release",
]
