"""All problems of a model, not only the first: ask, note, get it out of the way, ask.

The engine's own attach-time check is the judge, so a verdict cannot differ from what
``make_private`` does. It stops at the first problem. Here it is asked again on a copy
in which the problem is repaired or, where that is not possible, the parameters that the
message names are frozen, until it passes or nothing more can be done.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from torch import nn

from curvedp.diagnostics.repairs import Change, copied, in_place_modules, repair
from curvedp.diagnostics.report import Problem
from curvedp.errors import CurvedpError, LoopError
from curvedp.layers import Coverage, PerExampleLoss, Synthesiser, cover

__all__ = ["Findings", "check", "find_problems"]

_QUOTED = re.compile(r"'([^']*)'")

#: What a model's own code may raise when it is watched or run on synthetic inputs.
_FOREIGN = (
    ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip


@dataclass
class Findings:
    """What came out.

    Attributes:
        problems: in the order in which they were met.
        model: the copy in which they are out of the way.
        coverage: of that copy; None if one of them could not be got out of the way.
        refused: names of the parameters that were frozen for that.
    """

    model: nn.Module
    problems: list[Problem] = field(default_factory=list)
    coverage: Coverage | None = None
    refused: set[str] = field(default_factory=set)


def check(
    model: nn.Module, synthesise: Synthesiser, loss: PerExampleLoss | None
) -> Coverage | CurvedpError:
    """Coverage of the model, or the error with which attaching it is refused."""
    try:
        return cover(model, synthesise, loss)
    except CurvedpError as error:
        return error
    except _FOREIGN as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return CurvedpError(
            f"the attach-time check failed with {type(error).__name__}: {first}",
            "make the model run in training mode on batches of any size, 1 to 3 "
            "included, and with weights replaced by torch.func.functional_call",
        )


def find_problems(
    model: nn.Module, synthesise: Synthesiser, loss: PerExampleLoss | None
) -> Findings:
    """Everything that stands between this model and private training."""
    found = Findings(copied(model))
    met: dict[str, int] = {}
    while True:
        answer = check(found.model, synthesise, loss)
        if isinstance(answer, Coverage):
            found.coverage = answer
            return found
        everything_frozen = not any(p.requires_grad for p in found.model.parameters())
        if found.refused and everything_frozen:
            return found  # nothing is left to check
        names = _named_modules(found.model, answer.problem)
        number = met.get(answer.problem)
        if number is None:
            met[answer.problem] = len(found.problems)
            changes = _repaired(found, answer, names)
            found.problems.append(_problem(found.model, answer, names, changes))
            if changes:
                continue
        elif found.problems[number].changes:  # they did not help
            found.problems[number] = _problem(found.model, answer, names, ())
        else:
            return found  # it is still there
        if not _freeze(found, answer.problem):
            return found


def _repaired(
    found: Findings, error: CurvedpError, names: list[str]
) -> tuple[Change, ...]:
    """Repair what the message names; parents too, for they may own what it names."""
    modules = [parent for name in names for parent in _with_parents(name)]
    if isinstance(error, LoopError) or not names:
        # what overwrites its input is named nowhere, only the layer that suffers
        modules += in_place_modules(found.model)
    found.model, changes = repair(found.model, modules)
    return tuple(changes)


def _freeze(found: Findings, text: str) -> bool:
    """Freeze what the message names; whether there was anything."""
    quoted = _quoted(text)
    own = {n for name in quoted for n in _parameters_of(found.model, name)}
    frozen = False
    for name, p in found.model.named_parameters(remove_duplicate=False):
        if name in own and p.requires_grad:
            p.requires_grad_(False)
            found.refused |= _names_of(found.model, p)
            frozen = True
    return frozen


def _parameters_of(model: nn.Module, name: str) -> list[str]:
    """Full names: the parameter of that name, or all of the module of that name."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if name in parameters:
        return [name]
    if name == "(the model itself)":  # its own, not those of its parts
        return [n for n in parameters if "." not in n]
    if name and name in dict(model.named_modules(remove_duplicate=False)):
        return [n for n in parameters if n.startswith(name + ".")]
    return []


def _names_of(model: nn.Module, parameter: nn.Parameter) -> set[str]:
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, p in named if p is parameter}


def _named_modules(model: nn.Module, text: str) -> list[str]:
    """Modules that a message is about, directly or by a parameter or buffer."""
    modules = dict(model.named_modules(remove_duplicate=False))
    owned = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    owned |= {n for n, _ in model.named_buffers(remove_duplicate=False)}
    names = []
    for name in _quoted(text):
        if name in owned:
            names.append(name.rpartition(".")[0])
        elif name and name in modules:
            names.append(name)
    return list(dict.fromkeys(names))


def _quoted(text: str) -> list[str]:
    return _QUOTED.findall(text)


def _with_parents(name: str) -> list[str]:
    parts = name.split(".") if name else []
    return [".".join(parts[:n]) for n in range(len(parts), -1, -1)]


def _problem(
    model: nn.Module,
    error: CurvedpError,
    names: list[str],
    changes: tuple[Change, ...],
) -> Problem:
    advice = error.advice
    for name in names if not changes else []:
        if getattr(model.get_submodule(name), "batch_first", None) is False:
            advice += f"; build {name!r} with batch_first=True"
    kind = type(error).__name__
    return Problem(tuple(names), error.problem, advice, kind, changes)
