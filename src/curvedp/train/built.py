"""How a model is built, at attach time, and still so at every pass.

What was checked is the code that ran: modules, in their places, with their forwards,
hooks and whatever else they call. A layer that mixes examples can be put in later, or a
hook that centres the batch, and no parameter shows it. So all of it is written down
when the model is attached. What hangs on a module is in its dictionary, which is
looked at in every pass anyway (:mod:`curvedp.layers.state`); only when something there
is another, all is compared.
"""

from __future__ import annotations

from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from curvedp.errors import LoopError

__all__ = ["Built"]

_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
_AGAIN = "make the change first, then call make_private, which checks what is there"


class Built:
    """The parts of a model that compute, as they were.

    Args:
        model: as it was covered.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._parts = {name: _parts(m) for name, m in self._modules.items()}
        self._kinds = list({type(m) for m in self._modules.values()})
        self._calls = [_calls(kind) for kind in self._kinds]
        self._codes = [list(map(_code, calls)) for calls in self._calls]
        self._everywhere = _everywhere()
        self._parameters = list(model.named_parameters())
        self._on_parameters = [_on_parameter(p) for _, p in self._parameters]

    def refuse_changes(self, *, closely: bool) -> None:
        """Refuse what is no longer as it was.

        Args:
            closely: look at every module; otherwise at what no module's dictionary
                shows.
        """
        if not _same(_everywhere(), self._everywhere):
            _changed("a hook for all modules was added or removed")
        then = zip(self._kinds, self._calls, self._codes, strict=True)
        for kind, calls, codes in then:
            same = all(map(is_, _calls(kind), calls))
            if not (same and all(map(is_, map(_code, calls), codes))):
                _changed(f"the forward of {kind.__name__} was replaced")
        for (name, p), own in zip(self._parameters, self._on_parameters, strict=True):
            hooked = p._backward_hooks or p._post_accumulate_grad_hooks or own
            if hooked and not _same(_on_parameter(p), own):
                _changed(f"a hook on the parameter {name!r} was added or removed")
        if closely:
            self._look_closely()

    def _look_closely(self) -> None:
        now = dict(self._model.named_modules(remove_duplicate=False))
        for name, module in now.items():
            then = self._modules.get(name)
            if hasattr(module, "parametrizations") and (
                then is None or "parametrizations" not in self._parts[name][1]
            ):
                _changed(f"a parametrization was registered on {_label(name)}")
            if then is not module:
                what = "added" if then is None else "exchanged"
                _changed(f"{_label(name)} ({type(module).__name__}) was {what}")
            self._compare(name, module)
        for name in self._modules:
            if name not in now:
                _changed(f"{_label(name)} was removed")

    def _compare(self, name: str, module: nn.Module) -> None:
        kind, parts = self._parts[name]
        kind_now, parts_now = _parts(module)
        if kind is not kind_now:
            _changed(f"{_label(name)} is of another type, {kind_now.__name__}")
        for key in sorted(parts.keys() | parts_now.keys()):
            if _same(parts.get(key, []), parts_now.get(key, [])):
                continue
            if key in _HOOKS:
                _changed(f"a {_HOOKS[key]} was added to or removed from {_label(name)}")
            _changed(f"{key!r}, which {_label(name)} calls, was replaced")
        if module.training and isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise LoopError(
                f"{_label(name)} was frozen when it was attached and is in training "
                "mode now: it computes statistics over the batch",
                "call private.model.train(), which leaves it in evaluation mode, not "
                "train() of the bare model",
            )


def _parts(module: nn.Module) -> tuple[type, dict[str, list[Any]]]:
    """A module's type, its hooks, and what it has of its own that can be called."""
    own = vars(module)
    parts = {hooks: list(own[hooks].values()) for hooks in _HOOKS if own.get(hooks)}
    for name, value in own.items():
        if callable(value) and not isinstance(value, nn.Module):
            parts[name] = [value]
    if "parametrizations" in module._modules:
        parts["parametrizations"] = [module._modules["parametrizations"]]
    return type(module), parts


#: What runs when a module of a type is called.
_calls = attrgetter("forward", "__call__", "_call_impl")


def _code(function: Any) -> Any:
    return getattr(function, "__code__", None)


def _everywhere() -> list[Any]:
    shared = torch.nn.modules.module
    return [
        hook
        for name in (
            "_global_forward_hooks",
            "_global_forward_pre_hooks",
            "_global_backward_hooks",
            "_global_backward_pre_hooks",
        )
        for hook in getattr(shared, name).values()
    ]


def _on_parameter(p: nn.Parameter) -> list[Any]:
    found = []
    for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks):
        found += list((hooks or {}).values())
    return found


def _same(these: list[Any], those: list[Any]) -> bool:
    return len(these) == len(those) and all(map(is_, these, those))


def _label(name: str) -> str:
    return f"the layer {name!r}" if name else "the model itself"


def _changed(what: str) -> None:
    raise LoopError(
        f"{what} after make_private: what was checked is not what would run", _AGAIN
    )
