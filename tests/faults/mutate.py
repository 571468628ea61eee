"""Fault patches: a line of the product replaced at test time.

A patch names a function, a text that stands in its source, and what to put there. It is
applied to the function's code object, so every importer sees it, and undone afterwards.
If the source no longer holds the text, the patch itself is an error: a fault that can
no longer be planted proves nothing.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import _lru_cache_wrapper
from typing import Any


@dataclass(frozen=True)
class Patch:
    function: Callable[..., Any]
    old: str
    new: str


@dataclass(frozen=True)
class Fault:
    """A rule, a check of it, and what has to be broken for the check to fail."""

    rule: str
    check: Callable[[], None]
    patches: tuple[Patch, ...]


@contextmanager
def planted(*patches: Patch) -> Iterator[None]:
    by_function: dict[Any, list[Patch]] = {}
    for patch in patches:
        by_function.setdefault(_plain(patch.function), []).append(patch)
    with ExitStack() as stack:
        stack.callback(_forget)
        for function, group in by_function.items():
            stack.enter_context(_planted_in(function, group))
        _forget()
        yield


def _forget() -> None:
    """Clear caches: what was computed with a fault, or without, must not stay."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "curvedp":
            for value in list(vars(module).values()):
                if isinstance(value, _lru_cache_wrapper):
                    value.cache_clear()


@contextmanager
def _planted_in(function: Any, patches: list[Patch]) -> Iterator[None]:
    source = textwrap.dedent(inspect.getsource(function))
    for patch in patches:
        assert patch.old in source, f"{patch.old!r} is not in {function.__qualname__}"
        source = source.replace(patch.old, patch.new)
    definition = source[source.index("def ") :]  # without decorators
    namespace: dict[str, Any] = {}
    exec(
        compile("from __future__ import annotations\n" + definition, "<fault>", "exec"),
        function.__globals__,
        namespace,
    )
    original = function.__code__
    function.__code__ = namespace[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = original


def _plain(function: Any) -> Any:
    """The function under a property or a decorator."""
    return inspect.unwrap(function.fget if isinstance(function, property) else function)
