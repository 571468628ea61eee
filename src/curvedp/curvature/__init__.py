"""The shape of the loss, from probes: factors, their spectra, when to refresh them."""

from curvedp.curvature.density import Density, lanczos_density
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
from curvedp.curvature.kept_spectra import fingerprint, remembered
from curvedp.curvature.moment import SecondMoment, Spectrum
from curvedp.curvature.products import curvature_product, in_frame, probe_batches
from curvedp.curvature.schedule import Refresh
from curvedp.curvature.spectrum import (
    CurvatureSpectrum,
    curvature_spectrum,
    top_eigenvalues,
)
from curvedp.curvature.state import factors_from_state, factors_state
from curvedp.curvature.tail import Tail, fit_tail, fit_tail_to_sum

__all__ = [
    "CurvatureSpectrum",
    "DenseFactor",
    "Density",
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
    "Tail",
    "curvature_product",
    "curvature_spectrum",
    "estimate",
    "factors_from_state",
    "factors_of",
    "factors_state",
    "fingerprint",
    "fit_tail",
    "fit_tail_to_sum",
    "in_frame",
    "lanczos_density",
    "names_of",
    "probe_batches",
    "probe_pass",
    "remembered",
    "spectral",
    "top_eigenvalues",
]
