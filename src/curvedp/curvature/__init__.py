"""The shape of the loss, from probes: factors, their spectra, when to refresh them."""

from curvedp.curvature.estimate import Estimate, estimate, probe_pass
from curvedp.curvature.factors import (
    DenseFactor,
    DiagonalFactor,
    Factor,
    Factors,
    LookupFactor,
    SketchFactor,
    Spectral,
    factors_of,
    names_of,
    spectral,
)
from curvedp.curvature.moment import SecondMoment, Spectrum
from curvedp.curvature.schedule import Refresh
from curvedp.curvature.state import factors_from_state, factors_state

__all__ = [
    "DenseFactor",
    "DiagonalFactor",
    "Estimate",
    "Factor",
    "Factors",
    "LookupFactor",
    "Refresh",
    "SecondMoment",
    "SketchFactor",
    "Spectral",
    "Spectrum",
    "estimate",
    "factors_from_state",
    "factors_of",
    "factors_state",
    "names_of",
    "probe_pass",
    "spectral",
]
