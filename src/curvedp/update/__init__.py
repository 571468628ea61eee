"""After the noise: what is done with a release before it moves the parameters."""

from curvedp.update.adambc import AdamBC
from curvedp.update.average import ExponentialAverage, IterateAverage, TailAverage
from curvedp.update.chain import Chain
from curvedp.update.fedopt import FedAdam, FedYogi
from curvedp.update.kalman import KalmanFilter
from curvedp.update.momentum import Momentum
from curvedp.update.readout import BackMap, MapBack, mapped_back, read_out
from curvedp.update.sofim import Sofim
from curvedp.update.torch_optim import apply_release, noise_variance
from curvedp.update.transform import Gradient, LookAhead, Transform

__all__ = [
    "AdamBC",
    "BackMap",
    "Chain",
    "ExponentialAverage",
    "FedAdam",
    "FedYogi",
    "Gradient",
    "IterateAverage",
    "KalmanFilter",
    "LookAhead",
    "MapBack",
    "Momentum",
    "Sofim",
    "TailAverage",
    "Transform",
    "apply_release",
    "mapped_back",
    "noise_variance",
    "read_out",
]
