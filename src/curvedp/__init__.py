"""Differentially private training that uses the curvature of the loss."""

from curvedp._version import __version__

__all__ = ["__version__"]
