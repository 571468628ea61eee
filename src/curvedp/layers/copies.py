"""A tensor of which every example has a copy, followed to where it meets the batch.

A relative position bias is looked up once for all examples, permuted, sliced and at
last added to scores ``[B, H, T, T]``. Its per-example gradient needs a copy for each
example, and a batch dimension in front would break every ``permute`` on the way. So the
copies stand in a dimension that the model does not see: a :class:`Copies` looks like
one of them, and each operation on it is applied to all (``vmap``). Where it meets a
tensor with a batch, the hidden dimension becomes that batch, and an ordinary tensor
goes on from there.

Which operations meet the batch is learnt when the model is attached, on batches of
two sizes, and not guessed from shapes later: a table of as many rows as there happen to
be examples is no batch. See :mod:`curvedp.layers.follow`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from curvedp.errors import CoverageError

__all__ = ["Copies", "Meeting", "Meetings", "one_of"]

#: Questions about one of the copies, answered alike by all of them.
_QUESTIONS = {
    "__bool__", "__float__", "__format__", "__int__", "__len__", "__repr__",
    "data_ptr", "dim", "element_size", "get_device", "is_complex", "is_contiguous",
    "is_floating_point", "item", "numel", "size", "storage_offset", "stride", "tolist",
}  # fmt: skip


@dataclass(frozen=True)
class Meeting:
    """An operation on a copy and a tensor that could have a batch."""

    operation: str
    dims: int
    other_dims: int


@dataclass(frozen=True)
class Meetings:
    """What is known about operations of the model. Public: it holds no data.

    Attributes:
        batch: those in which the other tensor has a batch.
        no_batch: those in which it has none.
        learning: shapes are believed, and noted here. Otherwise what is new is refused.
    """

    batch: set[Meeting] = field(default_factory=set)
    no_batch: set[Meeting] = field(default_factory=set)
    learning: bool = True

    def has_batch(self, meeting: Meeting, looks_so: bool) -> bool:
        """Whether the copies become the batch here; ``looks_so`` by the shapes."""
        if self.learning:
            (self.batch if looks_so else self.no_batch).add(meeting)
            return looks_so
        if looks_so and meeting not in self.batch | self.no_batch:
            raise CoverageError(
                f"the model applies {meeting.operation!r} to a value that all examples "
                "share in a way that was not seen when it was attached",
                "let the forward pass not depend on sizes; or give position ids the "
                "shape of the batch",
            )
        return looks_so and meeting in self.batch


class Copies(Tensor):
    """B equal copies ``[B, ...]`` that look like one ``[...]``."""

    hidden: Tensor
    meetings: Meetings

    @staticmethod
    def of(hidden: Tensor, meetings: Meetings) -> Copies:
        """Hide the first dimension of a tensor."""
        shown = hidden.detach()[0]
        copies: Copies = Tensor._make_subclass(Copies, shown)
        copies.hidden, copies.meetings = hidden, meetings
        return copies

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        leaves, spec = tree_flatten((args, kwargs or {}))
        name = getattr(func, "__name__", str(func))
        if name in _QUESTIONS or name == "__get__":
            own, named = tree_map(one_of, (args, kwargs or {}))
            answer = func(*own, **named)
            if not isinstance(answer, Tensor):
                return answer
        copies = [leaf for leaf in leaves if isinstance(leaf, Copies)]
        dims = _met(name, copies, leaves)

        def run(*values: Tensor) -> Any:
            given = iter(values)
            filled = [next(given) if isinstance(x, Copies) else x for x in leaves]
            own, named = tree_unflatten(filled, spec)
            return func(*own, **named)

        if dims is not None:
            return run(*(_as_batch(x, dims) for x in copies))
        with warnings.catch_warnings():
            # torch warns of operators that it maps one copy at a time
            warnings.filterwarnings("ignore", message=".*batching rule.*")
            # a mask drawn for all examples is one mask
            result = vmap(run, randomness="same")(*(x.hidden for x in copies))
        meetings = copies[0].meetings
        return tree_map(lambda x: Copies.of(x, meetings), result)


def one_of(x: Any) -> Any:
    """One of the copies as an ordinary tensor; anything else as it is."""
    return x.hidden.detach()[0] if isinstance(x, Copies) else x


def _met(name: str, copies: Sequence[Copies], leaves: Sequence[Any]) -> int | None:
    """Dimensions of the batch that the operation meets, None if there is none."""
    batch_size = len(copies[0].hidden)
    others = [x for x in leaves if isinstance(x, Tensor) and not isinstance(x, Copies)]
    dims = max((x.dim() for x in others), default=0)
    widest = [x for x in others if x.dim() == dims and dims > 0 and len(x) != 1]
    if not widest or any(x.hidden.dim() - 1 > dims for x in copies):
        return None
    has_batch = False
    for x in copies:
        own = x.hidden.dim() - 1
        fits = own < dims or x.hidden.shape[1] in (1, batch_size)
        looks_so = fits and any(len(y) == batch_size for y in widest)
        meeting = Meeting(name, own, dims)
        has_batch |= x.meetings.has_batch(meeting, looks_so)
    return dims if has_batch else None


def _as_batch(x: Copies, dims: int) -> Tensor:
    """The copies with their dimension in the place of the batch, of ``dims`` in all."""
    missing = dims - (x.hidden.dim() - 1)
    if missing:
        ones = [1] * (missing - 1)
        return x.hidden.reshape(len(x.hidden), *ones, *x.hidden.shape[1:])
    if x.hidden.shape[1] == 1:
        return x.hidden[:, 0]
    # the model has repeated it for the batch: example b sees row b of its copy
    return torch.diagonal(x.hidden, dim1=0, dim2=1).movedim(-1, 0)
