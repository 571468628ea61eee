r"""What a step does with each layer, and what that takes: ``private.explain()``.

A synthetic batch goes through the model as a private one does, and the map of the step
is asked about every layer. Nothing of it depends on private data, so it may be shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from curvedp.layers import Coverage, Synthesiser, as_call
from curvedp.layers.costs import DenseShape
from curvedp.layers.coverage import undisturbed
from curvedp.layers.dense import DenseIO
from curvedp.layers.direct import float_tensors
from curvedp.layers.grouping import grouped
from curvedp.layers.io import LayerIO
from curvedp.layers.precision import exact
from curvedp.train.passes import ForwardPrecision
from curvedp.whitening import Whitener
from curvedp.whitening.explained import Choice, choices

__all__ = ["StepPlan", "explain"]

_COLUMNS = (
    "layer", "G x T x p > r", "norms", "inputs", "outputs",
    "pass", "norms +", "map +", "map / pass",
)  # fmt: skip


@dataclass(frozen=True)
class StepPlan:
    """How every layer is served, in the order of the model. Public.

    Attributes:
        rows: a choice for each layer, or part of one.
        physical_batch_size: rows of a physical batch, whose work is shown.
    """

    rows: tuple[Choice, ...]
    physical_batch_size: int

    def pass_flops(self, row: Choice) -> float:
        """Of forward and backward pass of a physical batch."""
        each = row.forward_backward.flops
        return self.physical_batch_size * each + row.once.flops

    def norm_flops(self, row: Choice) -> float:
        """Of the norms, without a map."""
        return self.physical_batch_size * row.norm.flops

    def whitening_flops(self, row: Choice) -> float:
        """What the map adds: to the norms, and on the sum of a physical batch."""
        return self.physical_batch_size * row.whitening.flops + row.mapping.flops

    def ratio(self, row: Choice) -> float:
        """Whitening over forward and backward pass."""
        return self.whitening_flops(row) / max(1.0, self.pass_flops(row))

    @property
    def worst(self) -> Choice:
        """The layer whose whitening takes most beside its own pass."""
        return max(self.rows, key=self.ratio)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "physical_batch_size": self.physical_batch_size,
            "layers": [
                {
                    "layer": row.name,
                    "parameters": list(row.parameters),
                    "shape": None if row.shape is None else asdict(row.shape),
                    "norms": row.norms,
                    "inputs": row.inputs,
                    "outputs": row.outputs,
                    "pass_flops": self.pass_flops(row),
                    "norm_flops": self.norm_flops(row),
                    "whitening_flops": self.whitening_flops(row),
                }
                for row in self.rows
            ],
        }

    def cells(self) -> list[tuple[str, ...]]:
        """The table as texts, a heading first and the sum last."""
        lines: list[tuple[str, ...]] = [_COLUMNS]
        for row in self.rows:
            shape = row.shape
            shown = "-"
            if shape is not None:
                first = f"{shape.groups} x " if shape.groups > 1 else ""
                shown = f"{first}{shape.positions} x {shape.inputs} > {shape.outputs}"
            lines.append(
                (
                    row.name or "(the model itself)",
                    shown,
                    row.norms,
                    row.inputs,
                    row.outputs,
                    *self._costs([row]),
                )
            )
        lines.append(("all", "", "", "", "", *self._costs(self.rows)))
        return lines

    def _costs(self, rows: Sequence[Choice]) -> tuple[str, ...]:
        base = sum(self.pass_flops(row) for row in rows)
        whitening = sum(self.whitening_flops(row) for row in rows)
        norm = sum(self.norm_flops(row) for row in rows)
        share = f"{whitening / max(1.0, base):.3f}"
        return _short(base), _short(norm), _short(whitening), share

    def __str__(self) -> str:
        lines = self.cells()
        widths = [max(len(line[i]) for line in lines) for i in range(len(_COLUMNS))]
        table = [
            "  ".join(
                cell.ljust(width) if i < 5 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        note = (
            f"flops of a physical batch of {self.physical_batch_size}; attention and "
            "activations, which have no weights, are not in it"
        )
        return "\n".join([*table, note])


def explain(
    model: nn.Module,
    coverage: Coverage,
    synthesise: Synthesiser,
    whitener: Whitener,
    *,
    physical_batch_size: int,
    slots: int = 1,
    keep_inputs: Sequence[str] = (),
    precision: ForwardPrecision | None = None,
) -> StepPlan:
    """The plan of a step.

    Args:
        model: as it is trained; it is left as it was.
        coverage: its verified sites.
        synthesise: makes synthetic batches of its shapes.
        whitener: the map of the step.
        physical_batch_size: rows that are computed at once.
        slots: rows of one unit: of a person, or of an example's views.
        keep_inputs: sites whose inputs are kept in any case.
        precision: of the forward pass; what it keeps decides what is written down.
    """
    precision = precision or ForwardPrecision(None, model)
    device = next(model.parameters()).device
    with undisturbed(model), exact(device):
        # a unit has no batch dimension that a shape could be mistaken for
        ios, whole = (
            _recorded(model, coverage, synthesise, 2 * slots, kept, precision)
            for kept in (keep_inputs, True)
        )
        ios, whole = ([grouped(io, slots) for io in own] for own in (ios, whole))
        shapes = {w: s for io in whole for w, s in _shapes(io)}
        rows = [c for io in ios for c in choices(whitener, io, shapes)]
    return StepPlan(tuple(rows), physical_batch_size)


def _recorded(
    model: nn.Module,
    coverage: Coverage,
    synthesise: Synthesiser,
    rows: int,
    keep_inputs: bool | Sequence[str],
    precision: ForwardPrecision,
) -> list[LayerIO]:
    batch = synthesise(rows, torch.Generator().manual_seed(0))
    with torch.enable_grad():
        recording = precision.recording(model, coverage, rows, keep_inputs)
        output = recording.forward(*as_call(batch.inputs))
        # any loss will do: shapes are all that is asked for
        sums = [t.float().sum() for t in float_tensors(output) if t.requires_grad]
        torch.autograd.backward(torch.stack(sums).sum())
    return recording.layer_ios()


def _shapes(io: LayerIO) -> list[tuple[str, DenseShape]]:
    if isinstance(io, DenseIO):
        return [(io.weight, io.shape)]
    return [pair for part in getattr(io, "parts", ()) for pair in _shapes(part)]


def _short(flops: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if flops < 1000 or unit == "T":
            return f"{flops:.3g}{unit}"
        flops /= 1000
    raise AssertionError
