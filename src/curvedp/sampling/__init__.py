"""Which examples a step sees, and in what physical portions."""

from curvedp.sampling.cyclic import CyclicSampler, Sampler
from curvedp.sampling.people import People
from curvedp.sampling.physical import PhysicalBatch, PhysicalLoader
from curvedp.sampling.poisson import PoissonSampler
from curvedp.sampling.prepare import Prepare, as_bits
from curvedp.sampling.views import AUGMENTATIONS, Views

__all__ = [
    "AUGMENTATIONS",
    "CyclicSampler",
    "People",
    "PhysicalBatch",
    "PhysicalLoader",
    "PoissonSampler",
    "Prepare",
    "Sampler",
    "Views",
    "as_bits",
]
