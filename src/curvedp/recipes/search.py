"""What is searched of a recipe's settings, and where: ranges and choices.

A recipe declares its own; ``curvedp sweep`` draws from them. They are public: nothing
here is taken from data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from curvedp.errors import ConfigurationError
from curvedp.values import is_number, is_whole

__all__ = ["Choice", "Range", "SearchSpace", "search_from_json"]


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, both included.

    Attributes:
        low: the least.
        high: the greatest.
        log: uniform in the logarithm; otherwise uniform.
    """

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        if not (is_number(self.low) and is_number(self.high)):
            raise ConfigurationError(
                f"the range {self.text()} has an end that is no number",
                "write log:0.01:1 or linear:0:0.9",
            )
        if not self.low < self.high:
            raise ConfigurationError(
                f"the range {self.text()} is empty",
                "give the smaller end first; one value alone is fixed with --set",
            )
        if self.log and self.low <= 0:
            raise ConfigurationError(
                f"the range {self.text()} begins at {self.low!r}, which has no "
                "logarithm",
                "begin above 0, or use linear",
            )

    def edges(self) -> tuple[Any, ...]:
        """The values at its ends."""
        return (self.low, self.high)

    def of_whole_numbers(self) -> bool:
        """Whether both ends are whole numbers, written as such."""
        return is_whole(self.low, -(10**9)) and is_whole(self.high, -(10**9))

    def text(self) -> str:
        """As on the command line."""
        return f"{'log' if self.log else 'linear'}:{self.low}:{self.high}"

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        kind = "log" if self.log else "linear"
        return {"kind": kind, "low": self.low, "high": self.high}


@dataclass(frozen=True)
class Choice:
    """One of several values, each as likely as the others."""

    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ConfigurationError(
                "there is nothing to choose from", "write flat,normalised"
            )
        if len(set(map(repr, self.values))) != len(self.values):
            raise ConfigurationError(
                f"a value is named twice: {self.text()}", "name each once"
            )

    def edges(self) -> tuple[Any, ...]:
        """All of them."""
        return self.values

    def text(self) -> str:
        """As on the command line."""
        return ",".join(map(str, self.values))

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {"kind": "choice", "values": list(self.values)}


#: Settings that are searched, by name.
SearchSpace = Mapping[str, Range | Choice]


def search_from_json(stored: Mapping[str, Any]) -> Range | Choice:
    """Read back what ``to_json`` wrote."""
    if stored["kind"] == "choice":
        return Choice(tuple(stored["values"]))
    return Range(stored["low"], stored["high"], log=stored["kind"] == "log")


# -- what several recipes share --------------------------------------------------------

CLIPPING: SearchSpace = {
    "clipping": Choice(("flat", "normalised")),
    "clip_norm": Choice((0.1, 0.3, 1.0, 3.0)),
}
#: SGD on the noisy mean.
PLAIN: SearchSpace = {
    "learning_rate": Range(0.02, 4.0, log=True),
    "momentum": Choice((0.0, 0.9)),
    **CLIPPING,
}
#: Adam on it: every coordinate moves by about the rate, whatever the bound.
ADAPTIVE: SearchSpace = {
    "learning_rate": Range(1e-4, 5e-2, log=True),
    **CLIPPING,
}
#: The curvature of a Kronecker map; C has become a step length and is left alone.
WHITENING: SearchSpace = {
    "clipping": Choice(("flat", "normalised")),
    "damping": Range(0.005, 2.0, log=True),
    "exponent": Choice((0.25, 0.5)),
    "back_map": Choice(("none", "natural")),
    "spectral_power": Choice((2.0, 3.0, 4.0)),
}
#: Adam without the noise in its second moment; the floor bounds the rate from above.
BIAS_CORRECTED: SearchSpace = {
    "learning_rate": Range(3e-5, 1e-2, log=True),
    "beta1": Choice((0.0, 0.9)),
    "beta2": Choice((0.99, 0.999)),
    "floor": Range(1e-10, 1e-5, log=True),
}
#: A Kalman filter over releases.
FILTERED: SearchSpace = {
    "learning_rate": Range(0.05, 4.0, log=True),
    "kappa": Range(0.3, 0.95),
}
