"""Settings of recipes whose noise is designed for the curvature of the loss."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from curvedp.curvature import Estimate
from curvedp.curvature.products import MATRICES
from curvedp.probes import LabelRule, Probe
from curvedp.recipes.types import check_choice, check_least, check_types

__all__ = ["Eigenvalues"]

SPECTRUM_PROBES = ("synthetic", "public")


@dataclass(frozen=True)
class Eigenvalues:
    """How the spectrum is found, once, before the first private step.

    Never from private data: a spectrum of it would have to be paid for.

    Attributes:
        spectrum_probe: "synthetic" noise of the inputs' shape, or "public" data that
            the caller gives. Labels are drawn from the model's own predictions.
        spectrum_matrix: "hessian", or "ggn" (Gauss-Newton), which has no negative
            eigenvalues.
        spectrum_size: examples of the probe.
        spectrum_top: eigenvalues that are computed, the largest.
        spectrum_tail: ``p+``, positive eigenvalues in all, with those of a fitted
            curve; 0 takes as many as the sum of all eigenvalues speaks for.
    """

    spectrum_probe: str = "synthetic"
    spectrum_matrix: str = "hessian"
    spectrum_size: int = 256
    spectrum_top: int = 100
    spectrum_tail: int = 0

    def __post_init__(self) -> None:
        check_types(self.facts(), {f.name: str(f.type) for f in fields(Eigenvalues)})
        check_choice("spectrum_probe", self.spectrum_probe, SPECTRUM_PROBES)
        check_choice("spectrum_matrix", self.spectrum_matrix, MATRICES)
        check_least("spectrum_size", self.spectrum_size, 1)
        check_least("spectrum_top", self.spectrum_top, 1)
        check_least("spectrum_tail", self.spectrum_tail, 0)

    @staticmethod
    def setting_names() -> list[str]:
        """What a user may set."""
        return [f.name for f in fields(Eigenvalues)]

    def facts(self) -> dict[str, Any]:
        """All settings as JSON values."""
        return {name: getattr(self, name) for name in self.setting_names()}

    def estimate(self, probe: Probe, labels: LabelRule) -> Estimate:
        """What is probed: one batch, with these inputs and labels."""
        return Estimate(probe, labels, self.spectrum_size, 1)
