"""Differentially private training for PyTorch that uses the curvature of the loss.

Three tiers: the command line (``curvedp --help``), :class:`Trainer` for a whole run in
one call, and :func:`make_private` for a training loop of your own.
"""

from curvedp._version import __version__
from curvedp.barrier import Relation
from curvedp.errors import CurvedpError
from curvedp.plan import Plan
from curvedp.recipes import RECIPES, Recipe
from curvedp.train import Private, Statement, Trainer, make_private

__all__ = [
    "RECIPES",
    "CurvedpError",
    "Plan",
    "Private",
    "Recipe",
    "Relation",
    "Statement",
    "Trainer",
    "__version__",
    "make_private",
]
