"""Training: the engine of private steps, hand-written loops, and the Trainer."""

from curvedp.train.attach import make_private
from curvedp.train.explained import StepPlan
from curvedp.train.losses import LOSSES, per_example_loss
from curvedp.train.metrics import METRICS, evaluate, predict
from curvedp.train.observers import CsvLog, EarlyStopping, TensorBoardLog
from curvedp.train.private import Private
from curvedp.train.signals import stop_on_signals
from curvedp.train.statement import Statement
from curvedp.train.trainer import FitResult, Progress, Trainer

__all__ = [
    "LOSSES",
    "METRICS",
    "CsvLog",
    "EarlyStopping",
    "FitResult",
    "Private",
    "Progress",
    "Statement",
    "StepPlan",
    "TensorBoardLog",
    "Trainer",
    "evaluate",
    "make_private",
    "per_example_loss",
    "predict",
    "stop_on_signals",
]
