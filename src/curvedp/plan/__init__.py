"""The Plan: sampling, clipping, noise and accounting in one object, made whole."""

from curvedp.plan.correlation import Correlation, PlannedCorrelation
from curvedp.plan.plan import DEFAULT_NOISE_SOURCE, Plan
from curvedp.plan.sampling import SamplingPlan

__all__ = [
    "DEFAULT_NOISE_SOURCE",
    "Correlation",
    "Plan",
    "PlannedCorrelation",
    "SamplingPlan",
]
