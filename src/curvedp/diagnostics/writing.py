"""A small Python file that makes the user's model and applies ``fix`` to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from curvedp.diagnostics.repairs import Change
from curvedp.errors import ConfigurationError
from curvedp.storage import write_atomically

__all__ = ["fixed_path", "write_fixed"]

_TEMPLATE = '''\
"""The model of {name}, with layers that cannot be private replaced.

Written by `curvedp doctor {name} --fix`. What is changed:

{changes}
"""

import functools

from {module} import {factory} as original

from curvedp.diagnostics import fix


@functools.wraps(original)
def factory(*args, **kwargs):
    """As the original, options included; example inputs stay beside the model."""
    made = original(*args, **kwargs)
    if isinstance(made, (tuple, list)):
        return (fix(made[0])[0], *made[1:])
    return fix(made)[0]
'''


def fixed_path(name: str, target: Path) -> Path:
    """Where the file goes: a ``.py`` file as given, otherwise into that folder.

    Raises:
        ConfigurationError: the model has no factory to import, the file is there
            already, or its name cannot be imported.
    """
    module, mark, factory = name.partition(":")
    if not mark:
        raise ConfigurationError(
            f"the built-in model {name!r} needs no fix", "leave --fix out"
        )
    if target.suffix == ".py":
        path = target
    else:
        path = target / f"{module.rpartition('.')[2]}_{factory}_fixed.py"
    if not path.stem.isidentifier():
        raise ConfigurationError(
            f"{path.name} cannot be imported: {path.stem!r} is not a Python name",
            "use letters, digits and _",
        )
    if path.exists():
        raise ConfigurationError(
            f"{path} exists, and is not overwritten", "choose another file"
        )
    return path


def write_fixed(name: str, changes: Sequence[Change], target: Path) -> Path:
    """Write the file, whole or not at all; returns where it is."""
    path = fixed_path(name, target)
    module, _, factory = name.partition(":")
    listed = "\n".join(f"- {_clean(change)}" for change in changes)
    text = _TEMPLATE.format(name=name, module=module, factory=factory, changes=listed)

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    write_atomically(path, write)
    return path


def _clean(change: Change) -> str:
    """In a docstring: no quote or backslash that could end it."""
    return str(change).replace("\\", "/").replace('"', "'")
