"""All that a model holds: what a pass could leave in it, and how that is put back.

A model is an ordinary object. Besides parameters and buffers there are attributes of
its modules, lists and dictionaries in them, objects that are no modules; whoever
pickles the model takes all of it along. So everything that can be reached from the
model's attributes is looked at:

- *containers* (dictionaries, lists, deques, sets, objects with attributes): the same
  values, by identity, under the same keys. What is bound anew shows here.
- *tensors*: the same memory and shape. What the memory holds is looked at by
  :class:`curvedp.layers.contents.Contents`, since ``.data`` and numpy write without
  moving a version counter.
- *arrays and other buffers*, and small things that only pickle can look into: their
  bytes.

Random generators are left alone: to draw is no memory of the data. So are loggers,
locks, data sets, optimisers and curvedp's own objects, which are no part of a model's
state although a model may hold them.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from curvedp.errors import CoverageError
from curvedp.layers.leaves import (
    Leaf,
    Place,
    array_leaf,
    buffer_leaf,
    missing,
    objects_leaf,
    parts_leaf,
    pickled_leaf,
    slots,
    slots_leaf,
    stream_leaf,
)
from curvedp.layers.parts import parts_of

__all__ = ["Leaf", "Node", "Place", "Scan", "missing", "scan"]

#: Types whose values never change. Functions are pickled by name: no state is in them.
_ATOMS = {
    type(None), bool, int, float, complex, str, bytes, type, range, slice, object,
    types.FunctionType, types.BuiltinFunctionType, types.ModuleType, torch.dtype,
    torch.device, torch.Size, torch.layout, torch.memory_format, re.Pattern,
    type(Ellipsis), weakref.ref, property, staticmethod, classmethod,
}  # fmt: skip

_LEFT_ALONE = (
    torch.Generator,
    random.Random,
    np.random.Generator,
    np.random.BitGenerator,
    np.random.RandomState,
    np.generic,
    torch.optim.Optimizer,
    torch.utils.data.Dataset,
    torch.utils.data.DataLoader,
    type,
)
#: Beginnings of a module's name and a dot.
_FOREIGN = ("curvedp.", "logging.", "threading.", "_thread.", "torch._", "torch.fx.")
_OWN_DICTS = {"_parameters", "_buffers", "_modules"}

#: Containers in one model: a graph of objects beyond it is no model's state.
MOST = 200_000


class Node:
    """A container and what it held.

    Attributes:
        container: a dictionary, list, deque or set of the model's.
        where: its place.
        register: "_parameters", "_buffers" or "_modules" of a module, or "".
    """

    __slots__ = ("_keys", "_values", "container", "register", "where")

    def __init__(self, container: Any, where: Place, register: str = "") -> None:
        self.container = container
        self.where = where
        self.register = register
        self._keys, self._values = _content(container)

    def same(self) -> bool:
        """Whether it holds the same values, by identity, in the same order."""
        container, values = self.container, self._values
        if len(container) != len(values):
            return False
        if self._keys is None:
            return all(map(is_, container, values))
        keys, held = _content(container)
        return all(map(is_, held, values)) and all(map(is_, keys or (), self._keys))

    @staticmethod
    def hollow(container: Any, where: Place, register: str) -> Node:
        """Of a container that held nothing."""
        node = Node(container, where, register)
        node._keys, node._values = None if node._keys is None else [], []
        return node

    def changed_keys(self) -> list[Any]:
        """Keys of a dictionary under which another value stands now."""
        assert self._keys is not None
        then = dict(zip(self._keys, self._values, strict=True))
        now = self.container
        found = [k for k in then if now.get(k, missing) is not then[k]]
        found += [k for k in now if k not in then]
        return found or list(then)  # only the order is another

    def then(self) -> tuple[list[Any] | None, list[Any]]:
        """Keys, if it has any, and values as they were."""
        return self._keys, self._values

    def content(self) -> tuple[list[Any] | None, list[Any]]:
        """Keys, if it has any, and values as they are now."""
        return _content(self.container)

    def accept(self, key: str) -> None:
        """Take what a dictionary holds under a key now for what it held."""
        if self._keys is not None and key in self._keys and key in self.container:
            self._values[self._keys.index(key)] = self.container[key]

    def restore(self) -> None:
        """Put back what it held."""
        if not self.same():
            self.fill(self._keys, self._values)

    def restore_key(self, key: Any) -> None:
        """Put back what a dictionary held under one key."""
        assert self._keys is not None
        then = dict(zip(self._keys, self._values, strict=True))
        if key in then:
            self.container[key] = then[key]
        else:
            self.container.pop(key, None)

    def fill(self, keys: list[Any] | None, values: list[Any]) -> None:
        """Let it hold these values."""
        container = self.container
        container.clear()
        if keys is not None:
            container.update(zip(keys, values, strict=True))
        elif isinstance(container, set):
            container.update(values)
        else:
            container.extend(values)


class _Together:
    """What all nodes held, in a row: to look at it takes a few calls, not a loop."""

    def __init__(self, nodes: list[Node]) -> None:
        self.count = len(nodes)
        self._ordered = [n for n in nodes if isinstance(n.container, OrderedDict)]
        nodes = [n for n in nodes if not isinstance(n.container, OrderedDict)]
        self._dicts = [n.container for n in nodes if isinstance(n.container, dict)]
        rest = [n.container for n in nodes if not isinstance(n.container, dict)]
        self._containers = [*self._dicts, *rest]
        contents = {id(n.container): n.then() for n in nodes}
        then = [contents[id(c)] for c in self._containers]
        self._sizes = [len(values) for _, values in then]
        # keys of dictionaries, then what the others hold; then values of dictionaries
        self._keys = [x for keys, own in then for x in (own if keys is None else keys)]
        self._values = [x for keys, own in then if keys is not None for x in own]

    def same(self) -> bool:
        """Whether they hold the same, by identity, in the same order."""
        if list(map(len, self._containers)) != self._sizes:
            return False
        chain = itertools.chain.from_iterable
        values = chain(map(dict.values, self._dicts))
        rest = self._containers[len(self._dicts) :]
        keys = chain((chain(map(dict.keys, self._dicts)), chain(rest)))
        same = all(map(is_, values, self._values)) and all(map(is_, keys, self._keys))
        return same and all(node.same() for node in self._ordered)


def _content(container: Any) -> tuple[list[Any] | None, list[Any]]:
    if isinstance(container, OrderedDict):  # which has an order besides that of dict
        keys = list(OrderedDict.__iter__(container))
        return keys, [dict.__getitem__(container, key) for key in keys]
    if isinstance(container, dict):
        return list(dict.keys(container)), list(dict.values(container))
    return None, list(container)


@dataclass
class Scan:
    """What was found in a model.

    Attributes:
        nodes: containers with something in them.
        tensors: with their places, parameters among them.
        leaves: arrays and other things with bytes.
        speaking: modules with a ``get_extra_state`` of their own.
    """

    nodes: list[Node] = field(default_factory=list)
    tensors: list[tuple[Tensor, Place]] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)
    speaking: list[tuple[nn.Module, Place]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._then: _Together | None = None
        self._hollow: list[Any] = []  # containers with nothing in them
        self._hollow_where: list[tuple[Place, str]] = []

    def add(self, container: Any, where: Place, register: str = "") -> None:
        """Take a container in."""
        if not container:
            self._hollow.append(container)
            self._hollow_where.append((where, register))
            return
        self.nodes.append(Node(container, where, register))
        if len(self.nodes) > MOST:
            raise CoverageError(
                f"the module {where[0]!r} holds more than {MOST} Python containers "
                f"(in {where[1]!r}): nobody can watch over them in every pass",
                "keep data sets and tables outside of the model, or as tensors",
            )

    def same(self) -> bool:
        """Whether every container holds what it did."""
        if self._then is None or self._then.count != len(self.nodes):
            self._then = _Together(self.nodes)
        return not any(self._hollow) and self._then.same()

    def replace(self, old: Any, new: Any) -> None:
        """Let every container that holds one value hold another one."""
        for node in self.nodes:
            keys, values = node.content()
            if any(value is old for value in values):
                node.fill(keys, [new if value is old else value for value in values])

    def other(self) -> list[Node]:
        """Containers that hold something else."""
        full = [node for node in self.nodes if not node.same()]
        pairs = zip(self._hollow, self._hollow_where, strict=True)
        return full + [Node.hollow(x, *where) for x, where in pairs if x]


def scan(model: nn.Module) -> Scan:
    """Look at everything that can be reached from a model's attributes."""
    found = Scan()
    names = {id(module): name for name, module in model.named_modules()}
    seen: dict[int, Any] = {}
    waiting: list[tuple[Any, Place]] = [(model, ("", None))]
    while waiting:
        value, where = waiting.pop()
        if type(value) in _ATOMS or id(value) in seen:
            continue
        seen[id(value)] = value  # as long as it is there, its id is its own
        waiting += _look(value, where, names, found)
    return found


def _look(
    value: Any, where: Place, names: dict[int, str], found: Scan
) -> Iterator[tuple[Any, Place]]:
    """Take a value in; what it holds is to be looked at in turn."""
    if isinstance(value, Tensor):
        parts = parts_of(value, ".".join(filter(None, where)))
        found.tensors += [(part, where) for part in parts or [value]]
        if parts is not None:
            found.leaves.append(parts_leaf(value, where))
        yield value.__dict__, where
    elif isinstance(value, nn.Module):
        yield from _look_into_module(value, where, names, found)
    elif isinstance(value, dict):
        found.add(value, where)
        for key, held in dict.items(value):
            yield held, where if where[1] is not None else (where[0], str(key))
            yield key, where
        yield from _look_into_attributes(value, where, found)
    elif isinstance(value, list | deque | set):
        found.add(value, where)
        yield from ((held, where) for held in value)
        yield from _look_into_attributes(value, where, found)
    elif isinstance(value, tuple | frozenset):
        yield from ((held, where) for held in value)
        yield from _look_into_attributes(value, where, found)
    elif isinstance(value, np.ndarray):
        yield from _look_into_array(value, where, found)
        yield from _look_into_attributes(value, where, found)
    elif isinstance(value, types.MethodType):
        yield value.__self__, where
    elif isinstance(value, functools.partial):
        yield from ((x, where) for x in (value.func, value.args, value.keywords))
        yield from _look_into_attributes(value, where, found)
    elif not isinstance(value, _LEFT_ALONE) and not _is_foreign(type(value)):
        yield from _look_into_object(value, where, found)


def _look_into_module(
    module: nn.Module, where: Place, names: dict[int, str], found: Scan
) -> Iterator[tuple[Any, Place]]:
    name = names.get(id(module))
    own = vars(module)
    # one without a name is in a list or an object, hidden from torch
    here: Place = where if name is None else (name, None)
    found.add(own, here)
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        found.speaking.append((module, here))
    for key, held in own.items():
        if type(held) in _ATOMS:
            continue
        if name is not None and key in _OWN_DICTS:
            found.add(held, here, key)
            yield from ((x, (name, n)) for n, x in held.items())
        elif not isinstance(held, dict) or held:
            yield held, where if name is None else (name, key)
        else:  # most of what torch hangs on a module
            found.add(held, where if name is None else (name, key))


def _look_into_object(
    value: Any, where: Place, found: Scan
) -> Iterator[tuple[Any, Place]]:
    attributes = list(_look_into_attributes(value, where, found))
    yield from attributes
    leaf = stream_leaf(value, where) or buffer_leaf(value, where)
    if leaf is None and not attributes:
        leaf = pickled_leaf(value, where)
    if leaf is not None:
        found.leaves.append(leaf)


def _look_into_attributes(
    value: Any, where: Place, found: Scan
) -> Iterator[tuple[Any, Place]]:
    """Whatever else it is, it may have attributes."""
    own = getattr(value, "__dict__", None)
    names = slots(value)
    if isinstance(own, dict):
        yield own, where
    if names:
        yield from ((getattr(value, name, None), where) for name in names)
        found.leaves.append(slots_leaf(value, names, where))


def _look_into_array(
    value: Any, where: Place, found: Scan
) -> Iterator[tuple[Any, Place]]:
    if not value.dtype.hasobject:
        found.leaves.append(array_leaf(value, where))
    elif value.dtype.names:  # a view of each field writes into the same memory
        yield from ((value[name], where) for name in value.dtype.names)
    else:
        found.leaves.append(objects_leaf(value, where))
        yield from ((held, where) for held in value.flat)


def _is_foreign(kind: type) -> bool:
    return f"{kind.__module__}.".startswith(_FOREIGN)
