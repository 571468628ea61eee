"""Training: the engine of private steps, hand-written loops, and the Trainer."""

from curvedp.train.attach import make_private
from curvedp.train.losses import LOSSES, per_example_loss
from curvedp.train.metrics import METRICS, evaluate, predict
from curvedp.train.private import Private
from curvedp.train.signals import stop_on_signals
from curvedp.train.statement import Statement
from curvedp.train.trainer import FitResult, Progress, Trainer

__all__ = [
    "LOSSES",
    "METRICS",
    "FitResult",
    "Private",
    "Progress",
    "Statement",
    "Trainer",
    "evaluate",
    "make_private",
    "per_example_loss",
    "predict",
    "stop_on_signals",
]
