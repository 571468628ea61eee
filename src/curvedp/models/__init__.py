"""Built-in models whose per-example gradients are well defined."""

from curvedp.models.registry import build, names, options
from curvedp.models.residual import StandardisedConv2d

__all__ = ["StandardisedConv2d", "build", "names", "options"]
