"""Who an example belongs to: sampling and padding by person.

When one person has several examples, protecting each example on its own does not
protect the person. Here the person is the unit: persons are Poisson-sampled, and what a
person contributes to a step is clipped as a whole.

How many examples a person may have in one step is *declared*: the number that persons
really have is private. A person with more takes turns through them; one with fewer
leaves slots empty.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from curvedp.errors import ConfigurationError, DataError, withheld

__all__ = ["People"]


class People:
    """The examples of each person, and the declared number of slots.

    Args:
        ids: for every example of the dataset, whose it is.
        slots: K, the declared number of examples of one person in one step.
    """

    def __init__(self, ids: Sequence[Hashable], slots: int) -> None:
        if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
            raise ConfigurationError(
                f"examples_per_person must be a whole number from 1 on, not {slots!r}",
                "declare how many examples of one person a step may use; it must not "
                "be taken from the data",
            )
        members: dict[Hashable, list[int]] = {}
        with withheld("people"):
            for index, person in enumerate(ids):
                members.setdefault(_plain(person), []).append(index)
        if not members:
            raise DataError("there are no people", "give an id for every example")
        self.slots = slots
        self.examples = sum(map(len, members.values()))
        self._members = [np.asarray(m, dtype=np.int64) for m in members.values()]

    def __len__(self) -> int:
        return len(self._members)

    def rows(self, person: int, step: int) -> npt.NDArray[np.int64]:
        """Up to K examples of a person; over the steps, all of them take their turn."""
        own = self._members[person]
        if len(own) <= self.slots:
            return own
        start = step * self.slots % len(own)
        return np.take(own, range(start, start + self.slots), mode="wrap")


def _plain(person: Hashable) -> Hashable:
    """A tensor's element as the number it holds; tensors hash by identity."""
    item = getattr(person, "item", None)
    return item() if callable(item) else person
