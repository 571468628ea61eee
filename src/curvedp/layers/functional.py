"""A forward pass with other values for parameters, safe for tied weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

__all__ = ["call_with"]


def call_with(
    model: nn.Module,
    values: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """``model(*args, **kwargs)`` with ``values`` in the place of its parameters.

    A parameter that several modules share is replaced in all of them, whichever of its
    names is given. ``torch.func.functional_call`` alone does that too, but a *module*
    under two names comes back from it with the replaced tensors in it; so every place
    of a parameter is named here exactly once.

    Args:
        model: left as it was.
        values: by full name; the others keep their own.
        args: positional arguments.
        kwargs: keyword arguments.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    given = {named[name]: value for name, value in values.items()}
    places = {}
    for prefix, module in model.named_modules():  # each module once
        own = module.named_parameters(recurse=False, remove_duplicate=False)
        for name, parameter in own:
            if parameter in given:
                places[f"{prefix}.{name}" if prefix else name] = given[parameter]
    return functional_call(model, places, args, kwargs, tie_weights=False)
