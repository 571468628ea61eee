"""The geometry of private training: spectra, alignment, signal to noise, densities.

What a probe says about curvature, what the private data says (the oracle: research
only), and what the difference does to a private step.
"""

from curvedp.diagnostics.geometry.alignment import (
    Alignment,
    alignment,
    identity_factors,
)
from curvedp.diagnostics.geometry.clamping import CLAMPS, LossPath, loss_path
from curvedp.diagnostics.geometry.density import (
    Density,
    hessian_density,
    hessian_product,
    lanczos_density,
)
from curvedp.diagnostics.geometry.isotropy import Isotropy, isotropy, layer_isotropy
from curvedp.diagnostics.geometry.mean_field import (
    EigenvalueRatio,
    eigenvalue_ratio,
    input_scales,
    variance_recursion,
)
from curvedp.diagnostics.geometry.snr import LayerSignal, signal_to_noise
from curvedp.diagnostics.geometry.spectra import LayerSpectrum, layer_spectra
from curvedp.diagnostics.geometry.study import SOURCES, Source, Study, sources_of

__all__ = [
    "CLAMPS",
    "SOURCES",
    "Alignment",
    "Density",
    "EigenvalueRatio",
    "Isotropy",
    "LayerSignal",
    "LayerSpectrum",
    "LossPath",
    "Source",
    "Study",
    "alignment",
    "eigenvalue_ratio",
    "hessian_density",
    "hessian_product",
    "identity_factors",
    "input_scales",
    "isotropy",
    "lanczos_density",
    "layer_isotropy",
    "layer_spectra",
    "loss_path",
    "signal_to_noise",
    "sources_of",
    "variance_recursion",
]
