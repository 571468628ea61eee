"""Every exception that a user can meet. Each says what is wrong and the way out.

All of them derive from :class:`CurvedpError`, which the command line prints as one
message with exit code 2. Anything else that escapes is a bug of ours.

No message holds a value of a private record. Ours are written so; others are not:
numpy quotes the text that is no number, ``f"bad {row}"`` stands in many a dataset, and
``raise ... from None`` still carries the first error. So everything that reads private
records runs inside of :class:`withheld`, which passes an error on as type and place.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from curvedp.values import printable

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
    "UserCodeError",
    "missing_extra",
    "private_text_shown",
    "showing_private_text",
    "withheld",
]


class CurvedpError(Exception):
    """A message for the user: what is wrong, and what to do about it."""

    def __init__(self, problem: str, advice: str = "") -> None:
        # paths, and words that stood in a stranger's file
        problem, advice = printable(problem), printable(advice)
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


class UserCodeError(CurvedpError, RuntimeError):
    """Code that reads private records failed. Its own words are withheld."""


def missing_extra(package: str, extra: str) -> ConfigurationError:
    """The error for an optional dependency that is not installed."""
    return ConfigurationError(
        f"this needs the package {package!r}, which is not installed",
        f"pip install 'curvedp[{extra}]'",
    )


_DEBUG = "CURVEDP_DEBUG"
_WITHHELD = (
    "its text is withheld, as it may quote a private record; CURVEDP_DEBUG=1 (or "
    "--debug) shows all of it: look through that before you share it"
)
#: Frames of these folders are not the place that a user looks for.
_LIBRARIES = tuple(
    {
        sysconfig.get_path(name)
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
)
_OURS = str(Path(__file__).parent)
#: With this torch begins to say how much memory there was not.
_ALLOCATORS = ("CUDA out of memory", "DefaultCPUAllocator")


def private_text_shown() -> bool:
    """Returns True if errors may quote private records: ``CURVEDP_DEBUG`` is 1."""
    return os.environ.get(_DEBUG) == "1"


@contextmanager
def showing_private_text(shown: bool) -> Iterator[None]:
    """Let errors quote private records, here and in processes started here."""
    before = os.environ.get(_DEBUG)
    if shown:
        os.environ[_DEBUG] = "1"
    try:
        yield
    finally:
        if shown and before is None:
            del os.environ[_DEBUG]
        elif shown and before is not None:
            os.environ[_DEBUG] = before


class withheld:
    """Around code that reads private records and is not written by us.

    An error leaves as a :class:`UserCodeError` with its type and place, without text,
    cause and context; a warning with its category and place. Errors of ours pass, and
    so do those that a caller goes by (out of memory, interrupts), all without what they
    are chained to. The tests list who stands inside:
    ``tests/hostile/test_user_code.py``.

    Args:
        what: whose code it is, as the user knows it: "the dataset", "private.loss".
        public: what it reads is declared public, and nothing is withheld.
    """

    def __init__(self, what: str, *, public: bool = False) -> None:
        self._what, self._public = what, public
        self._show: Any = None  # stays: another thread may put the other back late

    def __enter__(self) -> None:
        if self._public or private_text_shown():
            return
        self._show = warnings.showwarning
        warnings.showwarning = self._warn  # type: ignore[assignment]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._show is not None:
            warnings.showwarning = self._show
        if error is None or self._public:
            return
        told = _told(self._what, error)
        if told is None:
            return
        if private_text_shown():
            raise told from error
        traceback.clear_frames(trace)  # of records, and of cycles that would keep them
        del error, trace  # or they stand among this frame's variables
        try:
            raise told
        except CurvedpError:
            told.__context__ = None
            raise
        finally:
            del told

    def _warn(
        self, message: Any, category: Any, filename: str, lineno: int, *rest: Any
    ) -> None:
        self._show(
            f"{self._what} warns; {_WITHHELD}", category, filename, lineno, *rest
        )


def _told(what: str, error: BaseException) -> CurvedpError | None:
    """What is said instead of an error; None for one that passes as it is."""
    relayed = _relayed(error)
    if relayed is not None:
        return relayed
    if _passes(error):
        if not private_text_shown():
            error.__cause__ = error.__context__ = None
            error.__dict__.pop("__notes__", None)
            if not isinstance(error, CurvedpError | SystemExit) and not str(
                error
            ).startswith(_ALLOCATORS):
                error.args = ()  # a text of the user's, or a worker's traceback
            if isinstance(error, CurvedpError) and error.__traceback__ is not None:
                error.__traceback__.tb_next = None  # frames whose variables are records
        return None
    return UserCodeError(
        f"{what} raised {type(error).__name__}{_place(error)}", _WITHHELD
    )


def _passes(error: BaseException) -> bool:
    """Returns True for errors of ours, and for those whose type a caller goes by."""
    if isinstance(error, SystemExit) and not isinstance(error.code, int | None):
        error.code, error.args = 1, (1,)  # Python prints any other
    if not isinstance(error, Exception):
        return True
    import torch  # here, because nothing else of this module needs it

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    frames = [
        frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    return isinstance(error, CurvedpError) and frames[-1].startswith(_OURS)


def _relayed(error: BaseException) -> CurvedpError | None:
    """An error of ours as it was in a DataLoader's worker.

    torch raises it again with the worker's traceback as its text.
    """
    if not isinstance(error, CurvedpError) or not error.problem.startswith("Caught "):
        return None
    name = f"{type(error).__module__}.{type(error).__qualname__}: "
    problem, _, advice = error.problem.rpartition(name)[2].strip().partition("\n  -> ")
    return type(error)(problem, advice)


def _place(error: BaseException) -> str:
    """The innermost line outside of libraries, or the innermost of all."""
    places = [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    own = [p for p in places if not p[0].startswith((*_LIBRARIES, _OURS, "<"))]
    if not places:
        return ""
    file, line, name = (own or places)[-1]
    return f" at {file}, line {line}, in {name}"
