"""The user's dataset and functions as they are, but that their errors quote nothing.

Where a DataLoader has workers, torch makes the text of an error of the whole traceback,
in the worker: what is to be withheld has to be withheld there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import Dataset

from curvedp.errors import DataError, withheld

__all__ = ["WatchedDataset", "watched_options"]


class WatchedDataset(Dataset[Any]):
    """A map-style dataset, which a worker finds as it is (``get_worker_info()``).

    Examples are fetched several at a time where the dataset has a way to do that, and
    as many have to come as were asked for. Where rows belong to persons they are asked
    for one by one: a dataset that reads in an order of its own (that of a file) may
    give them back in that order.
    """

    def __init__(self, dataset: Any, *, singly: bool = False) -> None:
        vars(self).update(_dataset=dataset, _singly=singly)

    def __getitems__(self, rows: list[int]) -> list[Any]:
        asked = [[row] for row in rows] if self._singly else [rows] if rows else []
        with withheld("the dataset"):
            found = [self._fetched(part) for part in asked]
        if [len(part) for part in found] != [len(part) for part in asked]:
            raise DataError(
                f"__getitems__ of {type(self._dataset).__name__} gives another number "
                "of examples than it is asked for",
                "return one example for each index, in the order of the indices",
            )
        return [example for part in found for example in part]

    def _fetched(self, rows: list[int]) -> list[Any]:
        many = getattr(self._dataset, "__getitems__", None)
        if many is not None:
            return list(many(rows))
        return [self._dataset[row] for row in rows]

    def __getitem__(self, row: int) -> Any:
        return self.__getitems__([row])[0]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # what asks for its type means the user's
        return type(self._dataset)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(WatchedDataset, singly=self._singly), (self._dataset,)


@dataclass(frozen=True)
class _Watched:
    """A function of the user's; a class, so that it pickles."""

    what: str
    call: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        with withheld(self.what):
            return self.call(*args)


def watched_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """DataLoader options whose ``worker_init_fn``, if there is one, quotes nothing."""
    found = dict(options)
    if found.get("worker_init_fn") is not None:
        found["worker_init_fn"] = _Watched("worker_init_fn", found["worker_init_fn"])
    return found
