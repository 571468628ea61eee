"""After the noise: what is done with a release before it moves the parameters."""

from curvedp.update.adambc import AdamBC
from curvedp.update.average import ExponentialAverage, IterateAverage, TailAverage
from curvedp.update.chain import Chain
from curvedp.update.kalman import KalmanFilter
from curvedp.update.momentum import Momentum
from curvedp.update.readout import read_out
from curvedp.update.torch_optim import apply_release, noise_variance
from curvedp.update.transform import Gradient, LookAhead, Transform

__all__ = [
    "AdamBC",
    "Chain",
    "ExponentialAverage",
    "Gradient",
    "IterateAverage",
    "KalmanFilter",
    "LookAhead",
    "Momentum",
    "TailAverage",
    "Transform",
    "apply_release",
    "noise_variance",
    "read_out",
]
