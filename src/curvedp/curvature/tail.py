r"""The eigenvalues beyond those that were computed, from a curve through the largest.

    log mu_i = slope (log p+ - log i)^power + log mu_p+      for i = 1, ..., p+

falls from the largest eigenvalue to the last positive one, number p+. (Gu et al. print
``-log i - log p+`` in the bracket, which is negative and has no power.) Leaving the
tail out would say that the noise in all its directions never reaches the loss.

p+ is not known. The paper takes it for a hyperparameter; here it may also follow from
the sum of all positive eigenvalues, which quadrature gives at a small price
(:mod:`curvedp.curvature.density`): of all p+ the one whose tail has what is left of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from curvedp.errors import ConfigurationError

__all__ = ["Floats", "Tail", "fit_tail", "fit_tail_to_sum"]

Floats = npt.NDArray[np.float64]

#: The last positive eigenvalue beside the largest, where none is given.
LEAST_SHARE = 1e-6
#: Fewer points than this do not tell the curve's two numbers from noise.
FEWEST = 3
#: Ratio of two p+ that are tried one after the other.
_RATIO = 1.05
#: Last eigenvalues that are tried.
_ENDS = 100


@dataclass(frozen=True)
class Tail:
    r"""Eigenvalues beyond those that were computed, as a fitted curve gives them.

    ``log mu_i = slope (log count - log i)^power + log least`` for i up to ``count``.

    Attributes:
        count: ``p+``, how many eigenvalues are positive.
        least: the last of them.
        slope: fitted.
        power: fitted.
    """

    count: int
    least: float
    slope: float
    power: float

    def at(self, numbers: Sequence[float] | Floats) -> Floats:
        """The curve at eigenvalues of these numbers, 1 for the largest."""
        distance = np.log(self.count) - np.log(np.asarray(numbers, dtype=np.float64))
        exponent = self.slope * np.maximum(distance, 0.0) ** self.power
        values: Floats = self.least * np.exp(exponent)
        return values

    def grouped(self, after: int, groups: int = 200) -> tuple[Floats, Floats]:
        """Eigenvalues of number ``after + 1`` to ``count``, in groups of nearly equal.

        Returns:
            The mean value of each group, and how many are in it.
        """
        if after >= self.count:
            return np.zeros(0), np.zeros(0)
        values = self.at(np.arange(after + 1, self.count + 1, dtype=np.float64))
        edges = np.unique(
            np.geomspace(after + 1, self.count + 1, groups + 1).astype(np.int64)
        )
        sums = np.add.reduceat(values, edges[:-1] - after - 1)
        counts = np.diff(edges).astype(np.float64)
        return sums / counts, counts

    def sum_after(self, after: int) -> float:
        """Sum of the eigenvalues of number ``after + 1`` to ``count``."""
        values, counts = self.grouped(after)
        return float(values @ counts)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def fit_tail(
    largest: Sequence[float] | Floats, count: int, least: float | None = None
) -> Tail:
    """The curve through the largest eigenvalues that ends at a given place.

    Least squares in ``log mu_i``: most points are near the last of those known, which
    is where the curve goes on.

    Args:
        largest: positive eigenvalues, descending; ``mu_1`` first.
        count: ``p+``, above their number.
        least: ``mu_p+``; by default a millionth of the largest.
    """
    from scipy.optimize import least_squares  # takes long to import

    known = np.asarray(largest, dtype=np.float64)
    if len(known) < FEWEST or count <= len(known):
        raise ConfigurationError(
            f"a tail of up to {count} eigenvalues was to be fitted to {len(known)}",
            f"compute at least {FEWEST} eigenvalues, and let the tail have more",
        )
    if not (known > 0).all() or (np.diff(known) > 0).any():
        raise ConfigurationError(
            "a tail is fitted to positive eigenvalues in descending order",
            "leave out what is zero or negative, and sort the others",
        )
    last = LEAST_SHARE * float(known[0]) if least is None else least
    if not 0 < last < known[-1]:
        raise ConfigurationError(
            f"the last positive eigenvalue, {last:g}, is not below {known[-1]:g}, the "
            "smallest of those that were computed",
            "give a smaller one, or fit fewer eigenvalues",
        )
    apart = np.log(count) - np.log(np.arange(1, len(known) + 1))
    height = np.log(known) - np.log(last)
    power, offset = np.polyfit(np.log(apart), np.log(height), 1)
    power = float(np.clip(power, *_POWERS))

    def residuals(free: Floats) -> Floats:
        curve: Floats = np.exp(free[0]) * apart ** free[1] - height
        return curve

    found = least_squares(
        residuals,
        [offset, power],
        bounds=([-np.inf, _POWERS[0]], [np.inf, _POWERS[1]]),
    )
    return Tail(count, last, float(np.exp(found.x[0])), float(found.x[1]))


#: Beyond these the curve is flat, or a step: no spectrum was seen to be either.
_POWERS = (0.05, 20.0)


def fit_tail_to_sum(
    largest: Sequence[float] | Floats,
    size: int,
    positive_sum: float,
    least: float | None = None,
) -> Tail | None:
    """The curve whose tail makes up what is missing of the sum; None if nothing is.

    Where even a tail through all n eigenvalues has too little, its end is raised.

    Args:
        largest: as in :func:`fit_tail`.
        size: n, which bounds p+.
        positive_sum: of all positive eigenvalues of the matrix.
        least: as in :func:`fit_tail`.
    """
    known = np.asarray(largest, dtype=np.float64)
    missing = positive_sum - float(known.sum())
    if missing <= 0 or size <= len(known):
        return None
    tries = max(2, round(np.log(size / (len(known) + 1)) / np.log(_RATIO)))
    counts = np.unique(np.geomspace(len(known) + 1, size, tries).astype(np.int64))
    fitted = [fit_tail(known, int(count), least) for count in counts]
    longest = fitted[-1]
    if least is None and longest.sum_after(len(known)) < missing:
        ends = np.geomspace(longest.least, 0.99 * known[-1], _ENDS)
        fitted = [fit_tail(known, size, float(end)) for end in ends]
    return min(fitted, key=lambda t: abs(t.sum_after(len(known)) - missing))
