"""For tests, yours and ours: slow exact twins, and suites for extension authors.

Nothing in the package imports this. ``reference`` says what per-example gradients and
clipped sums *are*, one example at a time and without any of the engine's shortcuts;
``conformance`` checks that an extension keeps the promises of its protocol;
``neighbours`` measures how far one example moves the sum of a run's next step.
"""

from curvedp.testing.conformance import (
    check_clipping_rule,
    check_mechanism,
    check_transform,
    check_whitener,
)
from curvedp.testing.neighbours import (
    Figures,
    NeighbourError,
    Replay,
    WatchedData,
    try_neighbours,
)
from curvedp.testing.noise import check_strategy
from curvedp.testing.reference import clipped_sum, per_example_gradients

__all__ = [
    "Figures",
    "NeighbourError",
    "Replay",
    "WatchedData",
    "check_clipping_rule",
    "check_mechanism",
    "check_strategy",
    "check_transform",
    "check_whitener",
    "clipped_sum",
    "per_example_gradients",
    "try_neighbours",
]
