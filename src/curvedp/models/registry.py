"""Built-in models by name."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from curvedp.errors import ConfigurationError
from curvedp.models.basic import cnn, dpkfc_mnist, logreg, mlp, small_cnn
from curvedp.models.residual import resnet_20, wrn_16_4
from curvedp.models.vit import vit

__all__ = ["build", "names", "options"]

_BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "cnn": cnn,
    "dpkfc-mnist": dpkfc_mnist,
    "logreg": logreg,
    "mlp": mlp,
    "resnet-20": resnet_20,
    "small-cnn": small_cnn,
    "vit": vit,
    "wrn-16-4": wrn_16_4,
}


#: From here on a model's memory is reckoned before it is made.
_CHECKED_FROM = 4096
#: Layers one after the other; more would take hours to make and never learn.
_DEEPEST = 10_000


def names() -> tuple[str, ...]:
    """The names of the built-in models, sorted."""
    return tuple(sorted(_BUILDERS))


def options(name: str) -> dict[str, Any]:
    """The options of a built-in model, with their defaults.

    Raises:
        ConfigurationError: If there is no such model.
    """
    parameters = inspect.signature(_builder(name)).parameters.values()
    return {
        item.name: item.default for item in parameters if item.kind is item.KEYWORD_ONLY
    }


def build(
    name: str, input_shape: Sequence[int], num_outputs: int, **settings: Any
) -> nn.Module:
    """Build a model by name; weights are drawn from torch's global generator.

    Args:
        name: One of :func:`names`.
        input_shape: Shape of one input, without the batch dimension.
        num_outputs: Outputs of the last layer.
        **settings: The model's options, see :func:`options`.

    Raises:
        ConfigurationError: If the name, an option or the shape does not fit.
    """
    builder = _builder(name)
    known = options(name)
    for key, value in settings.items():
        if key not in known:
            raise ConfigurationError(
                f"the model {name!r} has no option {key!r}",
                f"its options: {', '.join(known) or 'none'}",
            )
        _check_type(name, key, value, known[key])
    shape = tuple(input_shape)
    if not shape or num_outputs < 1 or min(shape) < 1:
        raise ConfigurationError(
            f"the model {name!r} with inputs {shape} and {num_outputs} outputs",
            "all sizes are 1 or more",
        )
    sizes = [*settings.values(), num_outputs, math.prod(shape)]
    if any(isinstance(n, int) and n > _CHECKED_FROM for n in sizes):
        _refuse_giants(name, lambda: builder(shape, num_outputs, **settings))
    return builder(shape, num_outputs, **settings)


def _refuse_giants(name: str, make: Callable[[], nn.Module]) -> None:
    """Refuse a model that the machine's memory cannot hold, before it is made."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            weights = list(make().parameters())
        needed = sum(weight.numel() * weight.element_size() for weight in weights)
    except (RuntimeError, OverflowError, TypeError):  # a tensor beyond all memory
        needed = 2**63
    if needed > _memory_bytes():
        raise ConfigurationError(
            f"the model {name!r} with these sizes takes more memory than there is",
            "use smaller sizes, or fewer outputs",
        )


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # a system that does not say
        return 2**40


def _builder(name: str) -> Callable[..., nn.Module]:
    if name not in _BUILDERS:
        raise ConfigurationError(
            f"unknown model {name!r}", f"choose one of: {', '.join(names())}"
        )
    return _BUILDERS[name]


def _check_type(model: str, key: str, value: object, default: object) -> None:
    """Options come from config files, where a number may be written as a word."""
    wanted = type(default)
    fits = isinstance(value, wanted) or (wanted is float and isinstance(value, int))
    if not fits or (isinstance(value, bool) and wanted is not bool):
        raise ConfigurationError(
            f"the model {model!r} has {key}={value!r}", f"use a value like {default!r}"
        )
    if key == "depth" and isinstance(value, int) and value > _DEEPEST:
        raise ConfigurationError(
            f"the model {model!r} has {key}={value}", f"use at most {_DEEPEST}"
        )
