"""Checks at the edge, each naming the value and the way out."""

from __future__ import annotations

import math

from curvedp.errors import ConfigurationError
from curvedp.values import is_number, is_whole

__all__ = [
    "MOST_STEPS",
    "check_count",
    "check_delta",
    "check_epsilon",
    "check_noise",
    "check_rate",
    "check_repeats",
    "check_sampled",
]


MOST_STEPS = 2**31
"""More than any run makes. Accountants need memory that grows with the steps."""


MOST_NOISE = 1e100
"""Beyond it, squares of noise multipliers are no floats any more."""


def check_repeats(count: int, name: str) -> None:
    """Refuse more of an event than any run makes."""
    check_count(count, name)
    if count > MOST_STEPS:
        raise ConfigurationError(
            f"{name} is larger than {MOST_STEPS}, more than any run makes",
            "give the number of noisy steps of the run",
        )


def check_epsilon(epsilon: float) -> None:
    """Refuse a target that is no budget."""
    if not (is_number(epsilon) and epsilon > 0.0):
        raise ConfigurationError(
            f"epsilon is {epsilon!r}, not a positive number",
            "declare a budget such as 1, 2 or 8",
        )


def check_delta(delta: float) -> None:
    """Refuse what is no probability of failure."""
    if not (is_number(delta) and 0.0 < delta < 1.0):
        raise ConfigurationError(
            f"delta is {delta!r}, not in (0, 1)",
            "declare a delta well below one over the number of examples, such as 1e-5",
        )


def check_noise(noise_multiplier: float) -> None:
    """Refuse what is no noise multiplier; zero is one, and costs infinity."""
    if not (is_number(noise_multiplier) and 0.0 <= noise_multiplier <= MOST_NOISE):
        raise ConfigurationError(
            f"noise_multiplier is {noise_multiplier!r}, not a finite number >= 0",
            "it is the noise's standard deviation divided by the clip bound",
        )


def check_rate(sample_rate: float) -> None:
    """Refuse what is no sampling probability."""
    if not (is_number(sample_rate) and 0.0 < sample_rate <= 1.0):
        raise ConfigurationError(
            f"sample_rate is {sample_rate!r}, not in (0, 1]",
            "declare the probability with which one example is in a batch",
        )


def check_count(count: object, name: str, *, at_least: int = 0) -> None:
    """Refuse what does not count anything."""
    if not is_whole(count, at_least):
        raise ConfigurationError(
            f"{name} is {count!r}, not a whole number of at least {at_least}",
            "give a count",
        )


def check_sampled(sample_rate: float, steps: int, delta: float) -> None:
    """Refuse a delta that lets a run without any noise pass as private."""
    if sample_rate == 1.0:
        return
    ever_sampled = -math.expm1(steps * math.log1p(-sample_rate))
    if ever_sampled <= delta:
        raise ConfigurationError(
            f"delta {delta:g} covers the chance {ever_sampled:g} of an example being "
            "sampled at all: even a run without noise would meet the target",
            "lower delta well below 1 / (number of examples)",
        )
