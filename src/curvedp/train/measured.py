r"""Curvature measured on the private data, paid for with a share of the clip bound.

The clipped sum of a step has noisy factors as further coordinates
(:mod:`curvedp.clipping.measured`). They are released with the gradient and by the same
event, so what is made of them costs nothing more: a mean over the releases between two
refreshes (their noise has mean zero, and nothing is subtracted), a moving average over
refreshes, the positive part, and of that a map. A map is made at declared steps and is
public given the past. Before there is a release to make it from, it is the identity.

DP-NGD (table 3) compares this with curvature from public data and finds it below a net
that was pretrained on that data and has no curvature: a factor is n(n + 1)/2 noisy
numbers, and the gradient gets less. In ``docs/results/dp_ngd_choices.md`` it is not
below plain DP-SGD.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from curvedp.barrier import Provenance, Release
from curvedp.clipping import ClippingRule, CurvatureClipping, MeasuredLayer
from curvedp.curvature import (
    DenseFactor,
    Factors,
    Refresh,
    SecondMoment,
    factors_from_state,
    factors_state,
)
from curvedp.errors import ConfigurationError
from curvedp.layers import Coverage
from curvedp.layers.direct import RuleServer
from curvedp.train.released import dense_layers, positive_part
from curvedp.train.whitened import is_due, on_device
from curvedp.whitening import (
    IdentityWhitener,
    JointWhitening,
    KroneckerWhitening,
    Whitener,
    step_by_step,
)

__all__ = ["LARGEST_SIDE", "MeasuredSource", "measured_layers"]

#: A factor of n inputs is n(n + 1)/2 noisy numbers in every release and in the journal.
LARGEST_SIDE = 2048


def measured_layers(
    model: nn.Module,
    coverage: Coverage,
    sides: tuple[str, ...],
    leave_out: tuple[str, ...] = (),
) -> tuple[MeasuredLayer, ...]:
    """The dense layers of a model whose factors are measured: declared, not chosen.

    Other parameters (norm layers, embeddings, recurrent layers, tied weights) have no
    factor that is measured, and stay unwhitened.

    Raises:
        ConfigurationError: a layer is too wide, or there is none to measure.
    """
    sites = {
        c.site.parameters.get("weight"): c.site.name
        for c in coverage.covered
        if isinstance(c.server, RuleServer)
    }
    found = []
    for layout in dense_layers(model, coverage):
        name = sites.get(layout.weight)
        if name is None or not {name, layout.weight, layout.bias}.isdisjoint(leave_out):
            continue
        columns = layout.shape[1:].numel() + (layout.bias is not None)
        rows = layout.shape[0] // layout.groups
        widths = {"a": columns, "g": rows}
        widest = max(widths[side] for side in sides)
        if widest > LARGEST_SIDE:
            raise ConfigurationError(
                f"a factor of layer {name!r} has {widest} rows, and "
                f"{widest * (widest + 1) // 2} noisy numbers would be released at "
                f"every step to measure it (at most {LARGEST_SIDE} rows are)",
                f'leave it unwhitened: leave_out = "{name}"; or take curvature from '
                "elsewhere: probe = 'synthetic' or 'releases'",
            )
        found.append(
            MeasuredLayer(
                name, layout.weight, layout.bias, layout.groups, columns, rows, sides
            )
        )
    if not found:
        raise ConfigurationError(
            "there is no linear layer or convolution to measure curvature of",
            "choose a recipe without curvature, or probe = 'releases'",
        )
    return tuple(found)


class MeasuredSource:
    """Averages measured factors and makes a map of them at declared steps.

    A checkpoint holds the sums since the last refresh and the factors that the present
    map was made from. Replayed releases lead to the same maps to the bit.

    Args:
        model: its parameters' shapes, and where they are.
        coverage: its verified sites.
        layers: what is measured.
        whitening: from factors to a map.
        refresh: when, and the weight of the past in a moving average over refreshes.
    """

    def __init__(
        self,
        model: nn.Module,
        coverage: Coverage,
        layers: tuple[MeasuredLayer, ...],
        whitening: KroneckerWhitening | JointWhitening,
        refresh: Refresh,
    ) -> None:
        named = dict(model.named_parameters())
        self._parameters = {n: named[n].detach() for n in coverage.parameters}
        self._layers = layers
        self._whitening = whitening
        self._refresh = refresh
        self._begin()

    def _begin(self) -> None:
        self._since: Factors | None = None
        self._used: Factors | None = None
        self._made_at: int | None = None
        self._map_of: Callable[[int], Whitener] = lambda _: IdentityWhitener()

    @property
    def provenance(self) -> Provenance:
        return Provenance.RELEASED

    def at(self, step: int) -> Whitener:
        if is_due(self._refresh, self._made_at, step):
            self._build(step, self._averaged())
            self._since = None
        return self._map_of(step)

    def _averaged(self) -> Factors | None:
        """Of this period, and of the past with the weight that it has."""
        decay = self._refresh.decay
        if self._since is None or self._used is None or not decay:
            return self._used if self._since is None else self._since
        return self._used.scaled(decay) + self._since.scaled(1 - decay)

    def _build(self, step: int, factors: Factors | None) -> None:
        self._made_at, self._used = step, factors
        if factors is None:
            self._map_of = lambda _: IdentityWhitener()
            return
        positive = {n: positive_part(own) for n, own in factors.layers.items()}
        known = Factors(positive, self.provenance)
        self._map_of = step_by_step(self._whitening, known, self._parameters, step)

    def observe(
        self, release: Release, rule: ClippingRule, expected_batch_size: float
    ) -> None:
        """Take the factors of a release into the mean."""
        assert isinstance(rule, CurvatureClipping)
        latest = {}
        for layer in self._layers:
            a, g = (
                self._moment(release, rule, layer, side, expected_batch_size)
                for side in ("a", "g")
            )
            latest[layer.weight] = DenseFactor(layer.weight, layer.bias, a, g)
        new = Factors(latest, self.provenance)
        self._since = new if self._since is None else self._since + new

    def _moment(
        self,
        release: Release,
        rule: CurvatureClipping,
        layer: MeasuredLayer,
        side: str,
        expected_batch_size: float,
    ) -> SecondMoment:
        if side in layer.sides:
            mean = rule.mean_factor(release.values, layer, side, expected_batch_size)
            return SecondMoment(1.0, matrix=mean)
        # not measured: all directions are alike
        device = self._parameters[layer.weight].device
        eye = torch.eye(layer.size(side), dtype=torch.float64, device=device)
        return SecondMoment(1.0, matrix=eye.repeat(layer.groups, 1, 1))

    def state(self) -> dict[str, Any]:
        kept = {"since": self._since, "used": self._used}
        state: dict[str, Any] = {
            name: factors_state(f) for name, f in kept.items() if f is not None
        }
        return state if self._made_at is None else state | {"step": self._made_at}

    def load(self, state: dict[str, Any]) -> None:
        self._begin()
        device = next(iter(self._parameters.values())).device
        placed = on_device(state, device)
        stored = {
            name: factors_from_state(placed[name])
            for name in ("since", "used")
            if name in placed
        }
        self._since = stored.get("since")
        if "step" in placed:
            self._build(placed["step"], stored.get("used"))
