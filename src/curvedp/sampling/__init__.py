"""Which examples a step sees, and in what physical portions."""

from curvedp.sampling.people import People
from curvedp.sampling.physical import PhysicalBatch, PhysicalLoader
from curvedp.sampling.poisson import PoissonSampler

__all__ = ["People", "PhysicalBatch", "PhysicalLoader", "PoissonSampler"]
