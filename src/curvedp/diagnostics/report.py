"""What the doctor says: a verdict, a row per layer, every problem, an estimate."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from curvedp.diagnostics.repairs import Change

__all__ = ["Cost", "Diagnosis", "LayerReport", "Problem", "Verdict"]


class Verdict(Enum):
    """Can the model be trained privately?"""

    READY = "ready"
    READY_AFTER_FIX = "ready after --fix"
    NOT_POSSIBLE = "not possible"


@dataclass(frozen=True)
class Cost:
    """What privacy adds to a forward and backward pass. An estimate by formula.

    Attributes:
        base_flops: multiply-adds of layers, forward and backward, counted twice each.
        extra_flops: the norms of per-example gradients, on top of that.
        base_bytes: what the backward pass needs of the forward pass, weights and their
            gradients; of a single layer, its output.
        kept_bytes: error signals and gradients kept until all norms are known.
        scratch_bytes: for the norms of one layer, and free again after it.
    """

    base_flops: float
    extra_flops: float
    base_bytes: float
    kept_bytes: float
    scratch_bytes: float

    @property
    def extra_bytes(self) -> float:
        """What privacy needs at most, on top of the base."""
        return self.kept_bytes + self.scratch_bytes

    def to_json(self) -> dict[str, Any]:
        """As JSON values, with the ratios (None where there is nothing to compare)."""
        return {
            **asdict(self),
            "extra_bytes": self.extra_bytes,
            "extra_flops_ratio": ratio(self.extra_flops, self.base_flops),
            "extra_bytes_ratio": ratio(self.extra_bytes, self.base_bytes),
        }


def ratio(extra: float, base: float) -> float | None:
    """Extra over base, if there is a base."""
    return extra / base if base > 0 else None


@dataclass(frozen=True)
class LayerReport:
    """One layer with trainable parameters.

    Attributes:
        name: module name; with the parameters in brackets where others of the module
            are served.
        kind: its type.
        parameters: number of trainable parameters.
        inputs: shape of one example's input, if it was seen.
        outputs: shape of one example's output, if it was seen.
        served_by: "rule", "expanded", "vmap", ... ; "refused"; "not checked" where a
            problem before it kept the check from coming so far.
        norms: how the norms are computed: "gram" or "instantiate" by the planner,
            "product" for one position, "rows" of an embedding, "written" gradients.
        cost: of this layer alone, at the batch size; None if it was not checked.
    """

    name: str
    kind: str
    parameters: int
    inputs: tuple[int, ...] | None = None
    outputs: tuple[int, ...] | None = None
    served_by: str = "not checked"
    norms: str = ""
    cost: Cost | None = None

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        cost = None if self.cost is None else self.cost.to_json()
        return {**asdict(self), "cost": cost}


@dataclass(frozen=True)
class Problem:
    """One reason why the model is refused as it is.

    Attributes:
        names: the modules that it is about; empty if it is about the whole model.
        problem: what is wrong.
        advice: the way out.
        error: name of the exception that attaching raises.
        changes: what ``fix`` does about it; empty if it can do nothing.
    """

    names: tuple[str, ...]
    problem: str
    advice: str
    error: str
    changes: tuple[Change, ...] = ()

    @property
    def fixable(self) -> bool:
        """Whether ``fix`` removes it."""
        return bool(self.changes)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "fixable": self.fixable}


@dataclass(frozen=True)
class Diagnosis:
    """The doctor's report.

    Attributes:
        verdict: the answer.
        layers: in the order of the model.
        problems: all that were found, in the order in which they were met.
        changes: what ``curvedp.diagnostics.fix`` would replace.
        cost: all layers together, None if the check did not come so far.
        batch_size: that the costs are for.
        trainable: number of trainable parameters.
        frozen: number of the others.
        notes: remarks that change nothing about the verdict.
    """

    verdict: Verdict
    layers: tuple[LayerReport, ...]
    problems: tuple[Problem, ...]
    changes: tuple[Change, ...]
    cost: Cost | None
    batch_size: int
    trainable: int
    frozen: int
    notes: tuple[str, ...] = ()

    @property
    def ready(self) -> bool:
        """Whether the model can be trained privately as it is."""
        return self.verdict is Verdict.READY

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "verdict": self.verdict.value,
            "batch_size": self.batch_size,
            "trainable_parameters": self.trainable,
            "frozen_parameters": self.frozen,
            "layers": [layer.to_json() for layer in self.layers],
            "problems": [problem.to_json() for problem in self.problems],
            "changes": [change.to_json() for change in self.changes],
            "cost_estimate": None if self.cost is None else self.cost.to_json(),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = [self.verdict.value]
        for problem in self.problems:
            lines.append(f"- {problem.problem}")
            lines += [f"  fix: {change}" for change in problem.changes]
            if problem.advice and not problem.fixable:
                lines.append(f"  -> {problem.advice}")
        return "\n".join(lines)
