"""Every exception that a user can meet. Each says what is wrong and the way out.

All of them derive from :class:`CurvedpError`, which the command line prints as one
message with exit code 2. Anything else that escapes is a bug of ours.
"""

from __future__ import annotations

__all__ = [
    "BudgetError",
    "CheckpointError",
    "ConfigurationError",
    "CouplingError",
    "CoverageError",
    "CurvedpError",
    "DataError",
    "LedgerError",
    "LoopError",
    "NotPrivateError",
    "RoundError",
    "StorageError",
    "UnknownEventError",
    "missing_extra",
]


class CurvedpError(Exception):
    """A message for the user: what is wrong, and what to do about it."""

    def __init__(self, problem: str, advice: str = "") -> None:
        self.problem = problem
        self.advice = advice
        super().__init__(f"{problem}\n  -> {advice}" if advice else problem)


class ConfigurationError(CurvedpError, ValueError):
    """A setting is unknown, impossible, or contradicts another one."""


class CoverageError(CurvedpError):
    """A trainable parameter has no rule that gives its per-example gradients."""


class CouplingError(CurvedpError):
    """A layer or a loss mixes examples, so no example's influence can be bounded."""


class BudgetError(CurvedpError):
    """The next step would spend more than the planned privacy budget."""


class NotPrivateError(CurvedpError):
    """A privacy figure was asked of something that has no guarantee."""


class UnknownEventError(CurvedpError):
    """The accountant does not know this event and will not guess its cost."""


class LedgerError(CurvedpError):
    """The ledger is corrupt, foreign, or contradicts the run that writes it."""


class CheckpointError(CurvedpError):
    """The checkpoint is corrupt, foreign, or belongs to another model."""


class DataError(CurvedpError, ValueError):
    """The data cannot be read, or does not fit the model and the settings."""


class StorageError(CurvedpError, OSError):
    """A file could not be written; what was there before is untouched."""


class RoundError(CurvedpError):
    """A round of a federation cannot go on, or an update cannot be part of it."""


class LoopError(CurvedpError, RuntimeError):
    """A hand-written training loop did something that the guarantee cannot follow."""


def missing_extra(package: str, extra: str) -> ConfigurationError:
    """The error for an optional dependency that is not installed."""
    return ConfigurationError(
        f"this needs the package {package!r}, which is not installed",
        f"pip install 'curvedp[{extra}]'",
    )
