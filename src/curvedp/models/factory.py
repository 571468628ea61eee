"""Models of the user's own, by the name of what makes them: ``module:factory``.

To import a module is to run its code. So a name is imported only if the user has said
it: on the command line, in Python, or in a config file that the command line names. One
that was read from a run folder is a :class:`StoredName`, and has to be repeated. And no
name leads to the standard library or the packages that curvedp stands on, whose
functions start programs and read pickles; layers of torch it can name.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from curvedp.errors import ConfigurationError, CurvedpError

__all__ = ["StoredName", "call_factory", "is_factory"]


#: Of these nothing is imported, and nothing but torch modules is called.
_NO_FACTORIES = frozenset(
    {*sys.stdlib_module_names, *sys.builtin_module_names, "curvedp", "torch", "numpy",
     "scipy", "dp_accounting", "typer", "click", "rich", "optuna", "sqlalchemy", "PIL",
     "matplotlib", "safetensors", "setuptools", "pip", "pytest"}
)  # fmt: skip


class StoredName(str):
    """A name that stands in a stored file, and that the user has not repeated."""


def is_factory(name: str) -> bool:
    """Whether a model's name is ``module:factory`` and not that of a built-in one."""
    return ":" in name


def call_factory(
    name: str, offered: Mapping[str, Any], options: Mapping[str, Any]
) -> Any:
    """What the factory gives.

    Args:
        name: ``module:factory``; the module is looked for in the current folder too.
        offered: arguments that it gets if its signature names them.
        options: arguments that it gets in any case, also in the place of those.

    Raises:
        ConfigurationError: there is no such factory, or it does not take these; or a
            file names it, and the user has not.
    """
    if isinstance(name, StoredName):
        raise ConfigurationError(
            f"the stored model is {str(name)!r}, and to import it is to run its code",
            "look at the name, and repeat it if the module is yours: --model NAME, or "
            "model= in Python",
        )
    factory = _import_factory(name)
    try:
        accepted = inspect.signature(factory).parameters
        given = {k: v for k, v in offered.items() if k in accepted}
        return factory(**{**given, **options})
    except CurvedpError:
        raise
    except (TypeError, ValueError) as error:
        names = " and ".join(offered)
        raise ConfigurationError(
            f"the model factory {name} cannot be called: {error}",
            (f"it is given {names} if it names them, and " if offered else "it takes ")
            + "the options of the model as keywords (KEY=VALUE)",
        ) from error


def _import_factory(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    root = module_name.partition(".")[0]
    no_factory = ConfigurationError(
        f"the model {name} is no model: {root!r} is a library",
        "name a module of your own that makes the model: module:factory",
    )
    is_loaded = module_name in sys.modules and root in ("torch", "curvedp")
    if (root in _NO_FACTORIES and not is_loaded) or ".__" in f".{module_name}":
        raise no_factory  # not even imported
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise ConfigurationError(
            f"the model {name} cannot be imported: {module_name!r} names no module",
            "write module:factory, with dots and no slashes in the module's name",
        )
    here = str(Path.cwd())
    if here not in sys.path:  # a console script does not have it, `python -m` does
        sys.path.insert(0, here)
    advice = "write module:factory, and run in the folder that holds the module"
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, ValueError) as error:
        raise ConfigurationError(
            f"the model {name} cannot be imported: {error}", advice
        ) from error
    except AttributeError as error:
        raise ConfigurationError(
            f"the model {name} is not there: {module_name!r} has no {attribute!r}",
            advice,
        ) from error
    is_layer = isinstance(factory, type) and issubclass(factory, nn.Module)
    if root in _NO_FACTORIES and not is_layer:
        raise no_factory
    if not callable(factory):
        raise ConfigurationError(f"{name} cannot be called", advice)
    made: Callable[..., Any] = factory
    return made
