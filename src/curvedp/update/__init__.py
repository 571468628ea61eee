"""After the noise: what is done with a release before it moves the parameters."""

from curvedp.update.readout import read_out
from curvedp.update.torch_optim import apply_release
from curvedp.update.transform import Chain, Transform

__all__ = ["Chain", "Transform", "apply_release", "read_out"]
