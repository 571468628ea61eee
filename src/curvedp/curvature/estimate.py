"""From a probe to ``Factors``: forward, draw labels, backward, add up. No private data.

The model runs as it trains (same mode, same rules for its layers), on probe inputs that
are drawn from a public stream, with labels from a rule. One backward pass of the summed
per-example losses gives every layer's inputs and output gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from curvedp.barrier import Provenance
from curvedp.curvature.factors import SHARING, Factor, Factors, factors_of
from curvedp.curvature.sketch import sketch_of
from curvedp.curvature.squares import SQUARES, squares_of
from curvedp.errors import ConfigurationError, withheld
from curvedp.layers import LayerIO, Recording, as_call
from curvedp.layers.covered import Covered
from curvedp.layers.precision import exact
from curvedp.layers.state import State
from curvedp.probes import LabelRule, Probe, draw

__all__ = ["MOMENTS", "Estimate", "PerExampleLoss", "estimate", "probe_pass"]

#: What is estimated: Kronecker factors, squares of gradients, or where they lie.
MOMENTS = ("kronecker", *SQUARES, "subspace")

#: What all batches of a probe may take together to be joined to one.
JOINED_BYTES = 2**28

#: ``(output, targets) -> [B]``.
PerExampleLoss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Estimate:
    """How factors are estimated. All of it is declared before the run.

    Attributes:
        probe: gives inputs.
        labels: gives targets from the model's outputs.
        size: examples of a probe batch.
        batches: how many of them.
        sharing: "expand" or "reduce", for weights that positions share.
        mean_loss: differentiate the mean loss of a probe batch, as DP-KFC's public code
            does: G shrinks by size^2. For reproduction only.
        moments: "kronecker" factors, or squares of gradients coordinate by coordinate
            (:mod:`curvedp.curvature.squares`), or the "subspace" that gradients lie in
            (:mod:`curvedp.curvature.sketch`).
        basis: dimension of that subspace, in each layer.
    """

    probe: Probe
    labels: LabelRule
    size: int = 256
    batches: int = 4
    sharing: str = "expand"
    mean_loss: bool = False
    moments: str = "kronecker"
    basis: int = 50

    def __post_init__(self) -> None:
        if self.size < 1 or self.batches < 1:
            raise ConfigurationError(
                f"a probe needs at least one example, not {self.batches} batches of "
                f"{self.size}",
                "set probe_size and probe_batches to 1 or more",
            )
        if self.sharing not in SHARING:
            raise ConfigurationError(
                f"unknown sharing {self.sharing!r}",
                f"choose one of: {', '.join(SHARING)}",
            )
        if self.moments not in MOMENTS:
            raise ConfigurationError(
                f"unknown moments {self.moments!r}",
                f"choose one of: {', '.join(MOMENTS)}",
            )
        if self.mean_loss and self.moments != "kronecker":
            raise ConfigurationError(
                f"moments = {self.moments!r} are of per-example losses",
                "leave mean_loss out; batch-squares are squares of the mean anyway",
            )

    def joined(self, example_bytes: int) -> Estimate:
        """The same estimate with all its batches as one, where that takes no room.

        A sum of factors does not depend on how its examples are cut, and few launches
        are faster than many. Not for a public dataset, which may have no more examples
        than a batch, nor where the batch itself counts.

        Args:
            example_bytes: what the layers write down of one example.
        """
        alike = self.moments == "kronecker" and not self.mean_loss
        synthetic = self.probe.provenance is Provenance.SYNTHETIC
        whole = self.size * self.batches
        if not (alike and synthetic and whole * example_bytes <= JOINED_BYTES):
            return self
        return replace(self, size=whole, batches=1)

    def of(self, io: LayerIO) -> dict[str, Factor]:
        """What one batch of a layer adds, by first parameter name."""
        if self.moments in SQUARES:
            return squares_of(io, self.moments)
        if self.moments == "subspace":
            return sketch_of(io, self.basis)
        return factors_of(io, self.sharing)


def estimate(
    model: nn.Module,
    covered: Sequence[Covered],
    how: Estimate,
    loss: PerExampleLoss,
    generator: torch.Generator,
    parameters: Mapping[str, Tensor] | None = None,
) -> Factors:
    """Factors of every layer at the model's present, released parameters.

    Args:
        model: left as it was.
        covered: its verified sites.
        how: probe, labels, and how many.
        loss: per-example loss.
        generator: a CPU generator of the public probe stream.
        parameters: values in the place of the model's own.
    """
    total: Factors | None = None
    state = State(model)
    state.open(weights=False)
    for _ in range(how.batches):
        layers: dict[str, Factor] = {}
        try:
            ios = probe_pass(model, covered, how, loss, generator, parameters)
        finally:
            state.rewind()
        with exact(next(model.parameters()).device):
            for io in ios:
                layers |= how.of(io)
        part = Factors(layers, how.probe.provenance)
        total = part if total is None else total + part
    assert total is not None
    return total


def probe_pass(
    model: nn.Module,
    covered: Sequence[Covered],
    how: Estimate,
    loss: PerExampleLoss,
    generator: torch.Generator,
    parameters: Mapping[str, Tensor] | None = None,
) -> list[LayerIO]:
    """One batch of the probe: what every layer saw of it. Arguments as in estimate.

    It stands on the side of the barrier on which the probe stands.
    """
    public = how.probe.provenance.is_public
    with withheld("the model, on the oracle's examples", public=public):
        return _probe_pass(model, covered, how, loss, generator, parameters)


def _probe_pass(
    model: nn.Module,
    covered: Sequence[Covered],
    how: Estimate,
    loss: PerExampleLoss,
    generator: torch.Generator,
    parameters: Mapping[str, Tensor] | None,
) -> list[LayerIO]:
    device = next(model.parameters()).device
    drawn = draw(how.probe, how.labels, how.size, generator, device)
    inputs = tree_map(lambda x: _placed(x, model, device), drawn.inputs)
    recording = Recording(model, covered, how.size, keep_inputs=True)
    seed = int(torch.randint(2**31, (1,), generator=generator))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)  # dropout of a probe is a public draw as well
        with torch.enable_grad():
            output = recording.forward(*as_call(inputs), parameters)
            targets = tree_map(
                lambda x: _placed(x, model, device), drawn.targets(output)
            )
            losses = loss(output, targets)
    _check_losses(losses, how.size)
    torch.autograd.backward(losses.sum() * (1 / how.size if how.mean_loss else 1.0))
    return recording.layer_ios()


def _placed(x: Any, model: nn.Module, device: torch.device) -> Any:
    if not isinstance(x, Tensor):
        return x
    dtype = next(model.parameters()).dtype if x.is_floating_point() else x.dtype
    return x.to(device, dtype)


def _check_losses(losses: Tensor, size: int) -> None:
    if losses.shape != (size,):
        raise ConfigurationError(
            f"the loss gives {tuple(losses.shape)} for a probe of {size} examples; it "
            f"has to give one number for each",
            "use a loss without reduction, or one that curvedp knows by name",
        )
