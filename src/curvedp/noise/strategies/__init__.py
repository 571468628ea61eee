"""How the noise of different steps is correlated, and for which workload."""

from curvedp.noise.strategies.banded import Banded, BandedToeplitz, reversed_cholesky
from curvedp.noise.strategies.base import COLUMN_TOLERANCE, Strategy
from curvedp.noise.strategies.blt import BufferedToeplitz, optimise_blt
from curvedp.noise.strategies.identity import Identity
from curvedp.noise.strategies.optimise import optimise_banded, optimise_toeplitz
from curvedp.noise.strategies.participation import Participation
from curvedp.noise.strategies.workloads import (
    Momentum,
    NoiseCurve,
    PrefixSums,
    Schedule,
    Tail,
    Workload,
    workload_from_json,
)

__all__ = [
    "COLUMN_TOLERANCE",
    "Banded",
    "BandedToeplitz",
    "BufferedToeplitz",
    "Identity",
    "Momentum",
    "NoiseCurve",
    "Participation",
    "PrefixSums",
    "Schedule",
    "Strategy",
    "Tail",
    "Workload",
    "optimise_banded",
    "optimise_blt",
    "optimise_toeplitz",
    "reversed_cholesky",
    "workload_from_json",
]
