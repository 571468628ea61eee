"""``diagnose``: can this model be trained privately?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten

from curvedp.diagnostics.costs import measure
from curvedp.diagnostics.problems import Findings, check, find_problems
from curvedp.diagnostics.repairs import copied, fix, in_place_modules
from curvedp.diagnostics.report import (
    Cost,
    Diagnosis,
    LayerReport,
    Problem,
    Verdict,
)
from curvedp.diagnostics.vanishing import vanishing
from curvedp.errors import ConfigurationError
from curvedp.layers import (
    Batch,
    Coverage,
    PerExampleLoss,
    Synthesiser,
    as_call,
    synthesiser_like,
)
from curvedp.layers.coverage import set_training_mode
from curvedp.train import per_example_loss

__all__ = ["diagnose"]

#: Names that a note spells out.
_SPELT_OUT = 3


def diagnose(
    model: nn.Module,
    *,
    inputs: Any = None,
    targets: Any = None,
    loss: str | nn.Module | Callable[..., Any] | None = None,
    synthetic: Synthesiser | None = None,
    batch_size: int = 256,
) -> Diagnosis:
    """Say layer by layer whether and how a model can be trained privately.

    The model is not changed, and no private data is needed: of the example inputs,
    shapes and dtypes are used and the values are not.

    Args:
        model: any module.
        inputs: an example batch: a tensor, a tuple (``model(*inputs)``) or a dictionary
            (``model(**inputs)``), examples at dimension 0.
        targets: an example batch of targets; only with a loss.
        loss: as for ``make_private``. With it, the loss is checked too, and what does
            not reach it is found.
        synthetic: makes synthetic batches, where shapes do not tell enough; in place of
            ``inputs`` and ``targets``.
        batch_size: physical batch size that costs are estimated for.

    Raises:
        ConfigurationError: the model does not run on these inputs at all.
    """
    if isinstance(batch_size, bool) or batch_size < 1:
        raise ConfigurationError(f"batch_size is {batch_size}", "use 1 or more")
    chosen = None if loss is None else per_example_loss(loss)
    devices = {p.device for p in model.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices=list(devices)):
        torch.manual_seed(0)
        synthesise = synthetic or _synthesiser(model, inputs, targets, chosen)
        _check_runs(model, synthesise)
        return _diagnose(model, synthesise, chosen, batch_size)


def _diagnose(
    model: nn.Module,
    synthesise: Synthesiser,
    loss: PerExampleLoss | None,
    batch_size: int,
) -> Diagnosis:
    found = find_problems(model, synthesise, loss)
    repaired, changes = fix(model)
    verdict = Verdict.NOT_POSSIBLE
    if not found.problems:
        verdict, changes = Verdict.READY, []
    elif all(problem.fixable for problem in found.problems):
        answer = check(repaired, synthesise, loss)
        if isinstance(answer, Coverage):
            verdict = Verdict.READY_AFTER_FIX
        else:
            kind = type(answer).__name__
            found.problems.append(Problem((), answer.problem, answer.advice, kind))
    layers, cost = _layers(found, synthesise, batch_size)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return Diagnosis(
        verdict=verdict,
        layers=tuple(layers),
        problems=tuple(found.problems),
        changes=tuple(changes),
        cost=cost,
        batch_size=batch_size,
        trainable=trainable,
        frozen=sum(p.numel() for p in model.parameters()) - trainable,
        notes=tuple(
            [
                *_notes(model, layers, loss, verdict is Verdict.READY),
                *_dead_notes(found, synthesise),
            ]
        ),
    )


def _layers(
    found: Findings, synthesise: Synthesiser, batch_size: int
) -> tuple[list[LayerReport], Cost | None]:
    """Rows of what is served, and of what is not, in the order of the model."""
    reports: dict[str, LayerReport] = {}
    served: set[nn.Parameter] = set()  # a tied one has several names
    cost = None
    model = found.model
    if found.coverage is not None:
        set_training_mode(model)
        rows, cost = measure(model, found.coverage, synthesise, batch_size)
        reports = {row.name: row for row in rows}
        served = {model.get_parameter(name) for name in found.coverage.parameters}
    ordered = []
    for name, module in model.named_modules():
        label = name or "(the model itself)"
        own = {
            f"{name}.{n}" if name else n: p
            for n, p in module.named_parameters(recurse=False)
        }
        if label in reports:
            ordered.append(reports[label])
        refused = {n: p for n, p in own.items() if n in found.refused}
        waiting = {n: p for n, p in own.items() if p.requires_grad and p not in served}
        for missing, word in ((refused, "refused"), (waiting, "not checked")):
            if missing:
                size = sum(p.numel() for p in missing.values())
                kind = type(module).__name__
                which = [n.rpartition(".")[2] for n in missing]
                part = label if len(missing) == len(own) else _part(label, which)
                ordered.append(LayerReport(part, kind, size, served_by=word))
    return ordered, cost


def _part(label: str, parameters: list[str]) -> str:
    """A module of which some parameters are served and these are not."""
    return f"{label} ({', '.join(parameters)})"


def _notes(
    model: nn.Module,
    layers: list[LayerReport],
    loss: PerExampleLoss | None,
    ready: bool,
) -> list[str]:
    notes = []
    if loss is None:
        notes.append(
            "the model alone was checked: a loss of your own must not mix examples"
        )
    if any(layer.served_by == "vmap" for layer in layers):
        notes.append(
            "layers served by vmap run forward and backward once more; written with "
            "nn.Linear, nn.Conv*, nn.Embedding and norm layers they would be faster"
        )
    overwriting = list(in_place_modules(model))
    if overwriting and ready:
        notes.append(
            f"{len(overwriting)} in-place modules (the first: {overwriting[0]!r}) are "
            "accepted: they overwrite nothing that a layer still needs"
        )
    return notes


def _dead_notes(found: Findings, synthesise: Synthesiser) -> list[str]:
    """What nothing but noise would move, in the model that passed the check."""
    if found.coverage is None:
        return []
    names = vanishing(found.model, synthesise)
    biases = [n for n in names if found.model.get_parameter(n).dim() <= 1]
    notes = []
    if biases:
        notes.append(
            f"zero whatever the data: the gradient of {_listed(biases)}. Only noise "
            "moves what has no gradient; that does no harm where the output does not "
            "depend on it (a bias of attention keys, one before a norm that takes it "
            "away)"
        )
    weights = [n for n in names if n not in biases]
    if weights:
        notes.append(
            f"zero whatever the data: the gradient of {_listed(weights)}. The layer "
            "learns nothing, because what follows makes a constant of its output (a "
            "norm over a single value, the mean of what a norm has centred)"
        )
    return notes


def _listed(names: list[str]) -> str:
    more = len(names) - _SPELT_OUT
    shown = ", ".join(map(repr, names[:_SPELT_OUT]))
    return f"{shown} and {more} more" if more > 0 else shown


def _synthesiser(
    model: nn.Module, inputs: Any, targets: Any, loss: PerExampleLoss | None
) -> Synthesiser:
    if inputs is None:
        raise ConfigurationError(
            "the doctor needs example inputs to run the model",
            "give inputs=..., a batch of the right shapes; its values are ignored",
        )
    if (targets is None) != (loss is None):
        raise ConfigurationError(
            "targets and loss belong together", "give both, or none of them"
        )
    tensors = [x for x in tree_flatten(inputs)[0] if isinstance(x, Tensor)]
    if not tensors or any(x.dim() == 0 for x in tensors):
        raise ConfigurationError(
            "the example inputs have no tensor, or one without dimensions",
            "give tensors with examples at dimension 0",
        )
    return synthesiser_like(Batch(inputs, targets), model)


def _check_runs(model: nn.Module, synthesise: Synthesiser) -> None:
    """A plain pass over synthetic inputs; what fails here is not about privacy."""
    if any(is_lazy(p) for p in model.parameters()):
        raise ConfigurationError(
            "the model has lazy layers whose shapes are not known yet",
            "run it once on an example before",
        )
    trial = copied(model)
    set_training_mode(trial)
    try:
        batch = synthesise(2, torch.Generator().manual_seed(0))
        args, kwargs = as_call(batch.inputs)
        with torch.no_grad():
            trial(*args, **kwargs)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigurationError(
            f"the model does not run on these inputs: {first}",
            "check shape and dtype of the inputs, and the vocabulary of token ids",
        ) from error
