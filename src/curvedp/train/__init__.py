"""Training: the engine of private steps, hand-written loops, and the Trainer."""

from curvedp.train.attach import make_private
from curvedp.train.private import Private

__all__ = ["Private", "make_private"]
