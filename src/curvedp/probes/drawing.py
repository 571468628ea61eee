"""A probe and a label rule together: inputs now, targets once the output is known."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from curvedp.errors import ConfigurationError
from curvedp.probes.base import LabelledProbe, Probe, StagedProbe
from curvedp.probes.labels import LabelRule, OwnLabels

__all__ = ["IGNORED", "ProbeDraw", "draw"]

#: Target of a position that has none, as torch's cross-entropy knows it.
IGNORED = -100


@dataclass(frozen=True, eq=False)
class ProbeDraw:
    """Inputs of a probe batch, and the way to their targets.

    Attributes:
        inputs: A tensor, a tuple or a mapping of tensors.
        labels: The rule that gives the targets.
        generator: The rule draws from it.
        own: The labels that the examples came with, where the rule asks for them.
    """

    inputs: Any = field(repr=False)
    labels: LabelRule
    generator: torch.Generator = field(repr=False)
    own: Any = field(default=None, repr=False)

    def targets(self, output: Tensor) -> Any:
        """Targets for the model's output on these inputs.

        Class numbers at positions that the ``attention_mask`` of the inputs hides
        become -100, which the losses leave out: padding has no curvature. Own labels
        are given as they are, on the CPU.
        """
        if isinstance(self.labels, OwnLabels):
            return self.own
        targets = self.labels.targets(output, self.generator)
        mask = (
            self.inputs.get("attention_mask") if isinstance(self.inputs, dict) else None
        )
        if (
            isinstance(mask, Tensor)
            and not targets.is_floating_point()
            and targets.dim() == 2
            and targets.shape == mask.shape
        ):
            targets = targets.masked_fill(mask.to(targets.device) == 0, IGNORED)
        return targets


def draw(
    probe: Probe,
    labels: LabelRule,
    size: int,
    generator: torch.Generator,
    device: torch.device | None = None,
) -> ProbeDraw:
    """Draw inputs, and labels too where the rule is that they are the probe's own.

    Args:
        probe: Where the inputs come from.
        labels: How the labels are found.
        size: Number of examples.
        generator: On the CPU; inputs first, then labels draw from it.
        device: Where inputs will be needed: what is left to do to draws is done there,
            and such inputs are there already.
    """
    if not isinstance(labels, OwnLabels):
        if device is not None and isinstance(probe, StagedProbe):
            drawn = probe.drawn(size, generator).to(device)
            return ProbeDraw(probe.finished(drawn), labels, generator)
        return ProbeDraw(probe.inputs(size, generator), labels, generator)
    if not isinstance(probe, LabelledProbe):
        raise ConfigurationError(
            f"{type(probe).__name__} has no labels of its own",
            "take ModelLabels(), or a PublicProbe of pairs (inputs, label)",
        )
    batch = probe.labelled(size, generator)
    return ProbeDraw(batch.inputs, labels, generator, batch.targets)
