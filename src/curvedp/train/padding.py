"""What padding does to an example, tried on the model: nothing, or it is refused.

A collate function that pads to the longest example of a batch gives an example other
inputs beside a longer one. Where model and loss do not honour a mask, its gradient is
another one then, and whoever brings the longer example moves everybody's. A model that
honours it may still count positions from the side that is padded.

So an example is put beside one of its own length and beside a longer one, both of them
nobody's (:mod:`curvedp.sampling.records`), and its gradients by the covered rules are
compared, without dropout: other shapes draw other masks. What the collate function
draws (the tokens that a language model guesses) is made the same in both.

Lengths at which the model cannot run are not tried, and not allowed in the run either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from curvedp.errors import CouplingError
from curvedp.layers import Batch, Coverage, PerExampleLoss, as_call
from curvedp.layers.coverage import undisturbed
from curvedp.layers.direct import float_tensors
from curvedp.layers.tolerance import close
from curvedp.layers.trial import (
    Trial,
    judges,
    perturbed_parameters,
    without_dropout,
)
from curvedp.sampling.alike import aligned, seeded, tensors_of
from curvedp.sampling.prepare import Prepare, prepared
from curvedp.sampling.records import NUMBERS, Bounds, MadeUpRecords, Sizes
from curvedp.sampling.rows import Beside, RowCollate
from curvedp.train.datasets import as_batch

__all__ = ["padding_tried"]

#: Factor on the tolerance in float64: rotary positions, which modules compute in
#: float32, differ by 2e-9 of a gradient where they begin elsewhere.
STRICTNESS = 0.1

#: How often a batch is drawn anew in which the example has no gradient.
ATTEMPTS = 8


def padding_tried(
    rows: RowCollate,
    model: nn.Module,
    coverage: Coverage,
    loss: PerExampleLoss | None,
    prepare: Prepare | None = None,
) -> RowCollate:
    """The collate function with the lengths that may differ in a batch of the run.

    ``prepare`` is what the loader makes of a batch before the model gets it.

    Raises:
        CouplingError: an example's gradient changes beside a longer one.
    """
    if not any(beside.lengths for beside in rows.found):
        return rows
    with undisturbed(model), without_dropout(model):
        trial = _Padding(rows, model, coverage, loss, prepare)
        free: frozenset[tuple[str, int]] = frozenset()
        for beside in rows.found:
            if not beside.lengths <= free and trial.takes(beside):
                free |= beside.lengths
    return replace(rows, free=free)


@dataclass(frozen=True)
class _Padding:
    rows: RowCollate
    model: nn.Module
    coverage: Coverage
    loss: PerExampleLoss | None
    prepare: Prepare | None = None

    def takes(self, beside: Beside) -> bool:
        """Whether the model runs on both; raises where padding shows."""
        bounds = self._bounds(beside)
        for seed in range(ATTEMPTS):
            twins, mixed = (
                self._batch([beside.short, other], bounds, seed)
                for other in (beside.short, beside.long)
            )
            at_end = _stands_at_end(twins, mixed)
            mixed = Batch(
                tree_map(partial(_put, at_end), mixed.inputs, twins.inputs),
                tree_map(partial(_put, at_end), mixed.targets, twins.targets),
            )
            loss = self.loss or _Projection(at_end)
            trial = Trial(
                self.model,
                self.coverage.covered,
                loss,
                perturbed_parameters(self.model, 0),
                size=2,
                seed=0,
            )
            if not _runs(trial, twins) or not _runs(trial, mixed):
                return False
            found = [
                _judged(judge, twins, mixed, at_end) for judge in judges(trial, twins)
            ]
            if all(found):
                return True
        return True  # no record has a gradient at all

    def _batch(
        self, kinds: list[tuple[int, Sizes]], bounds: Bounds, seed: int
    ) -> Batch:
        made = isinstance(self.rows.records, MadeUpRecords)
        shift = 2 * seed if made else 0
        records = [self.rows.records.make(n + shift, s, bounds) for n, s in kinds]
        with seeded(seed):
            batch = self.rows.collated(records)
            if self.prepare is not None:
                batch = prepared(self.prepare, batch, rows=len(records))
        device = next(self.model.parameters()).device
        return as_batch(batch, device, with_targets=self.loss is not None)

    def _bounds(self, beside: Beside) -> Bounds:
        """Ranges of whole numbers that the model takes: words, labels."""
        records = self.rows.records
        if not isinstance(records, MadeUpRecords):
            return {}
        masks = [k for k, leaf in enumerate(records.leaves) if leaf.is_mask]
        whole = [k for k, leaf in enumerate(records.leaves) if leaf.kind.kind in "iu"]
        bounds = {k: (0, 2) for k in whole if k not in masks}
        kinds = [beside.short, beside.long]
        limits = self._limits(self._batch(kinds, bounds, 0))
        chosen = {}
        for k in bounds:
            ones, zeros = (
                dict(_places(self._batch(kinds, {**bounds, k: span}, 0)))
                for span in ((1, 2), (0, 1))
            )
            reached = [p for p, x in ones.items() if not torch.equal(x, zeros[p])]
            high = min((limits[p] for p in reached if p in limits), default=2)
            if records.high < NUMBERS:  # the collate function takes no larger ones
                high = min(high, records.high)
            # small numbers are often words that stand for something else
            chosen[k] = (high // 2 if high > 8 else 0, high)
        return chosen

    def _limits(self, batch: Batch) -> dict[str, int]:
        """Above what the numbers at each place of a batch must not be."""
        seen: list[tuple[Tensor, int]] = []
        try:
            with _watched(self.model, seen), torch.no_grad():
                output = _called(self.model, batch)
        except Exception:  # the model's own, of whatever kind: nothing is known then
            return {}
        limits = {}
        for place, x in _places(batch):
            if x.is_floating_point() or x.dtype == torch.bool:
                continue
            if place.startswith("targets"):
                limits[place] = _classes(output, x)
            else:
                tables = [n for ids, n in seen if torch.equal(ids, x)]
                limits[place] = min(tables, default=2)
        return limits


def _judged(check: Trial, twins: Batch, mixed: Batch, at_end: bool) -> bool:
    """Whether the first example has a gradient; it is the same in both batches."""
    one, other = (
        {name: g[0].clone() for name, g in check.gradients(check.cast(batch)).items()}
        for batch in (twins, mixed)
    )
    length = math.sqrt(sum(float(g.double().square().sum()) for g in one.values()))
    strictness = STRICTNESS if check.sharp else 1.0
    for name, g in one.items():
        if close(g, other[name], length, strictness):
            continue
        share = float((g - other[name]).double().norm()) / max(length, 1e-300)
        side = "left" if at_end else "right"
        raise CouplingError(
            f"the gradient of {name!r} for one example changes beside a longer example "
            f"(by {share:.2g} of the example's gradient): the collate function pads "
            f"on the {side} to the longest of the batch, and the padding is not masked",
            "give the model the attention mask, and leave padding out of means and of "
            "the loss (ignore_index; also what a language model predicts from padding "
            "on the left); take position ids from the mask "
            "((mask.cumsum(1) - 1).clamp_min(0)) or pad on the right; or pad to a "
            "declared length (padding='max_length')",
        )
    return length > 0


def _runs(trial: Trial, batch: Batch) -> bool:
    """Whether the model takes this length."""
    try:
        with _watched(trial.model, []), torch.no_grad():
            trial.losses(trial.plain(batch), batch)
    except Exception:  # the model's own, of whatever kind
        return False
    return True


@dataclass(frozen=True)
class _Projection:
    """Stands for the loss where there is none: of an example's own positions."""

    at_end: bool
    drawn: list[Tensor] = field(default_factory=list)

    def __call__(self, output: Any, targets: Any) -> Tensor:
        total: Any = 0
        for k, x in enumerate(float_tensors(output)):
            if k == len(self.drawn):
                generator = torch.Generator().manual_seed(k)
                self.drawn.append(torch.randn(x.shape, generator=generator))
            direction = self.drawn[k].to(x.device, x.dtype)
            own = aligned(x, direction, (self.at_end,) * x.dim())
            total = total + (own * direction).flatten(1).sum(1)
        return torch.as_tensor(total)


def _put(at_end: bool, x: Any, own: Any) -> Any:
    """The first row of ``own`` in the first row of x, and the rest of x."""
    if isinstance(x, Tensor):
        x = x.clone()
        aligned(x[0], own[0], (at_end,) * (x.dim() - 1)).copy_(own[0])
    return x


def _stands_at_end(twins: Batch, mixed: Batch) -> bool:
    """Whether an example stands at the end of its padded row."""
    found = [0, 0]
    other = dict(_places(mixed))
    for place, x in _places(twins):
        y = other[place][0]
        for at_end in (False, True):
            part = aligned(y, x[0], (at_end,) * y.dim())
            found[at_end] += int((part == x[0]).sum())
    return found[1] > found[0]


def _places(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    for name, part in (("inputs", batch.inputs), ("targets", batch.targets)):
        for place, x in tensors_of(part):
            yield name + place, x


def _called(model: nn.Module, batch: Batch) -> Any:
    args, kwargs = as_call(batch.inputs)
    return model(*args, **kwargs)


def _classes(output: Any, targets: Tensor) -> int:
    """How many classes labels may be of, by the narrowest reading of the output."""
    scores = [x for x in float_tensors(output) if x.dim() > 1]
    if not scores:
        return 2
    if scores[0].shape[:-1] == targets.shape and targets.dim() > 1:
        return scores[0].shape[-1]
    return min(scores[0].shape[1], scores[0].shape[-1])


@contextmanager
def _watched(model: nn.Module, seen: list[tuple[Tensor, int]]) -> Iterator[None]:
    """Which numbers go to which table; too large ones raise, also on a GPU."""

    def look(module: nn.Embedding, args: tuple[Any, ...]) -> None:
        ids = args[0]
        if bool((ids >= module.num_embeddings).any()):
            raise IndexError("a number beyond the table")
        seen.append((ids.clone(), module.num_embeddings))

    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    handles = [table.register_forward_pre_hook(look) for table in tables]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
