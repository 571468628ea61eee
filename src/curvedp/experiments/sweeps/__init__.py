"""Tuning: trials of one recipe with settings drawn from a declared search space.

Optuna keeps the study; it is imported when a sweep is opened, and not before. Each
trial is an ordinary run in a folder of its own, with its own ledger. Nothing here can
open the test part of the data: see :mod:`curvedp.experiments.sweeps.config`.
"""

from curvedp.experiments.sweeps.config import SweepConfig, is_sweep
from curvedp.experiments.sweeps.results import SweepResult, TrialRow
from curvedp.experiments.sweeps.work import open_sweep, resume_sweep, sweep

__all__ = [
    "SweepConfig",
    "SweepResult",
    "TrialRow",
    "is_sweep",
    "open_sweep",
    "resume_sweep",
    "sweep",
]
