"""Parameters that are used and still never learn: their gradient is exactly zero.

An adapter whose output is multiplied by zero, a branch behind a gate that is always
closed: autograd reaches the weights, so nothing looks wrong, and all they ever receive
is noise. One zero gradient proves nothing (a rectifier may be off for three examples),
so the search goes on over other inputs and other weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from curvedp.errors import CoverageError

__all__ = ["TRIES", "refuse_dead"]

#: Draws of inputs and weights that all have to give zero. A single rectified unit is
#: off in all of them once in a thousand models, a layer of them never.
TRIES = 10


def refuse_dead(
    suspects: Sequence[str], gradients: Callable[[int], dict[str, Tensor]]
) -> None:
    """Refuse parameters whose gradient is zero in every try.

    Args:
        suspects: names of parameters whose gradient was zero once.
        gradients: by name, for the number of a try.
    """
    dead = list(suspects)
    for number in range(TRIES):
        if not dead:
            return
        found = gradients(number)
        # one that is not a number is not zero, and not for this check to judge
        dead = [name for name in dead if not bool(found[name].any())]
    if dead:
        listed = ", ".join(map(repr, dead))
        raise CoverageError(
            f"the gradient of {listed} is exactly zero whatever the input and the "
            "weights are: something multiplies by zero what it does; under noise these "
            "weights would only drift",
            "freeze them (requires_grad_(False)), remove them, or let them take part "
            "(an adapter's scale, a gate, a mask)",
        )
