"""Runs and comparisons from a config: what the command line and the demo are made of.

``matplotlib`` is imported when a plot is asked for, and not before.
"""

from curvedp.experiments.building import BuiltRun, build_run, choose_device
from curvedp.experiments.compare import (
    CompareConfig,
    Comparison,
    compare,
    is_comparison,
    resume_comparison,
)
from curvedp.experiments.config import RunConfig
from curvedp.experiments.folder import RunFolder, default_run_dir
from curvedp.experiments.inputs import read_inputs
from curvedp.experiments.plots import plot_comparison
from curvedp.experiments.predictions import predict_inputs
from curvedp.experiments.preview import Preview, explain_run, preview_run
from curvedp.experiments.runs import (
    NOT_PRIVATE,
    RunResult,
    StopRequest,
    Trained,
    load_trained,
    resume_run,
    train_run,
)
from curvedp.experiments.sweeps import (
    SweepConfig,
    SweepResult,
    is_sweep,
    open_sweep,
    resume_sweep,
    sweep,
)

__all__ = [
    "NOT_PRIVATE",
    "BuiltRun",
    "CompareConfig",
    "Comparison",
    "Preview",
    "RunConfig",
    "RunFolder",
    "RunResult",
    "StopRequest",
    "SweepConfig",
    "SweepResult",
    "Trained",
    "build_run",
    "choose_device",
    "compare",
    "default_run_dir",
    "explain_run",
    "is_comparison",
    "is_sweep",
    "load_trained",
    "open_sweep",
    "plot_comparison",
    "predict_inputs",
    "preview_run",
    "read_inputs",
    "resume_comparison",
    "resume_run",
    "resume_sweep",
    "sweep",
    "train_run",
]
