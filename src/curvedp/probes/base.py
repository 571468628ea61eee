"""What a probe is: a public source of model inputs, from which curvature is found.

A probe says nothing about labels; :mod:`curvedp.probes.labels` does, and
:func:`curvedp.probes.draw` brings both together.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, Union, runtime_checkable

import torch
from torch import Tensor

from curvedp.barrier import Provenance
from curvedp.layers import Batch

__all__ = ["JSON", "LabelledProbe", "Probe", "StagedProbe"]

#: What ``describe`` returns: plain values for a ledger or a plan.
JSON: TypeAlias = Union[bool, int, float, str, "list[JSON]", "dict[str, JSON]", None]


@runtime_checkable
class Probe(Protocol):
    """Makes inputs for the model without looking at private data.

    Guarantees of every probe in this package (all of them frozen dataclasses):

    - ``inputs`` is a function of the probe, the size and the generator's state. The
      global random state is neither read nor changed.
    - Tensors are on the CPU, float32 or int64 (public data may also hold bool), with
      the ``size`` examples at dimension 0.
    - Shapes do not depend on what was drawn.
    """

    @property
    def provenance(self) -> Provenance:
        """What the inputs are made from."""
        ...

    def inputs(self, size: int, generator: torch.Generator) -> Any:
        """Inputs of ``size`` examples: a tensor, a tuple or a mapping of tensors.

        Args:
            size: Number of examples, from 1 on.
            generator: On the CPU; the only source of randomness.
        """
        ...

    def describe(self) -> dict[str, JSON]:
        """The settings as public facts; ``kind`` names the probe."""
        ...


@runtime_checkable
class LabelledProbe(Probe, Protocol):
    """A probe whose examples come with labels of their own."""

    def labelled(self, size: int, generator: torch.Generator) -> Batch:
        """The examples that ``inputs`` gives for the same generator, with labels."""
        ...


@runtime_checkable
class StagedProbe(Probe, Protocol):
    """A probe whose draws are few numbers beside the work that is done with them.

    ``inputs`` is ``finished(drawn(size, generator))``. The draws are the same on every
    machine, and a GPU may do the work.
    """

    def drawn(self, size: int, generator: torch.Generator) -> Tensor:
        """All that is drawn, on the CPU."""
        ...

    def finished(self, drawn: Tensor) -> Any:
        """Inputs from it, on the device that it was moved to."""
        ...
