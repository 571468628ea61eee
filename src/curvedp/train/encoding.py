"""State dictionaries as JSON and named tensors, and back. No pickle.

Optimiser states are nested dictionaries, lists and tuples of numbers, strings and
tensors. Tensors are taken out and replaced by their name; the rest is JSON.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from curvedp.errors import CheckpointError

__all__ = ["decode_state", "encode_state"]


def encode_state(value: Any, tensors: dict[str, Tensor], name: str = "") -> Any:
    """JSON for ``value``; its tensors are added to ``tensors``."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"$tensor": name}
    if isinstance(value, dict):
        # pairs, because JSON would turn the numbers of parameters into strings
        return {
            "$dict": [
                [key, encode_state(v, tensors, f"{name}/{key}")]
                for key, v in value.items()
            ]
        }
    if isinstance(value, list | tuple):
        kind = "$tuple" if isinstance(value, tuple) else "$list"
        items = [encode_state(v, tensors, f"{name}/{i}") for i, v in enumerate(value)]
        return {kind: items}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(
        f"a {type(value).__name__} in the state {name or 'itself'} cannot be stored "
        "without pickle",
        "keep numbers, strings, tensors, lists and dictionaries in states",
    )


def decode_state(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of :func:`encode_state`."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "$tensor":
        return tensors[content]
    if kind == "$dict":
        return {key: decode_state(v, tensors) for key, v in content}
    items = [decode_state(v, tensors) for v in content]
    return tuple(items) if kind == "$tuple" else items
