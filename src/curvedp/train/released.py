r"""Curvature learnt from releases: no probes, no public data, no private data.

A released mean gradient G of a dense layer, in the parameters' own coordinates, is
signal and known noise, ``G = S + P^-1 Z`` with Z of independent coordinates of variance
t. With ``P g = L g R`` the noise has

    E[N N^T] = t tr(R^-2) L^-2,    E[N^T N] = t tr(L^-2) R^-2,

and a moving average of ``G G^T - E[N N^T]`` and ``G^T G - E[N^T N]`` has the signal's
second moments as its expectation. Their positive parts are the factors of the next map.
All of it is post-processing of releases, so it costs nothing; a map is made at declared
steps and is public given the past.

Other parameters, and layers with more than ``LARGEST_SIDE`` inputs or outputs, have
averages of squares, less the variance of the noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from curvedp.barrier import Provenance, Release
from curvedp.clipping import ClippingRule
from curvedp.curvature import (
    DenseFactor,
    DiagonalFactor,
    Factor,
    Factors,
    Refresh,
    SecondMoment,
    factors_from_state,
    factors_state,
)
from curvedp.layers import Coverage
from curvedp.train.whitened import is_due, on_device
from curvedp.update import noise_variance
from curvedp.whitening import (
    KroneckerMap,
    KroneckerWhitening,
    LayerMap,
    LayerwiseWhitener,
    Whitener,
)
from curvedp.whitening.maps import DenseMap

__all__ = ["LARGEST_SIDE", "ReleasedSource", "dense_layers", "positive_part"]

#: A factor is a square matrix; beyond this it costs more than it is worth.
LARGEST_SIDE = 4096

_DENSE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

#: A layer: how its gradient is a matrix, or the names of parameters without one.
_Layer = DenseMap | tuple[str, ...]


class ReleasedSource:
    """Learns factors from every release and makes a map of them at declared steps.

    Before the first release all directions are alike. A checkpoint holds the running
    averages and those that the present map was made from.

    Args:
        model: its parameters' shapes, and where they are.
        coverage: its verified sites.
        whitening: from factors to a map.
        refresh: when, and the weight of the past in the average of releases.
    """

    def __init__(
        self,
        model: nn.Module,
        coverage: Coverage,
        whitening: KroneckerWhitening,
        refresh: Refresh,
    ) -> None:
        named = dict(model.named_parameters())
        self._parameters = {n: named[n].detach() for n in coverage.parameters}
        self._layers = _layers(model, coverage, LARGEST_SIDE)
        self._whitening = whitening
        self._refresh = refresh
        self._begin()

    def _begin(self) -> None:
        nothing = {n: torch.zeros_like(p) for n, p in self._parameters.items()}
        empty = {first: _squared(own, nothing) for first, own in self._layers.items()}
        self._running = Factors(empty, self.provenance).scaled(0.0)
        self._used = self._running
        self._made_at: int | None = None
        self._whitener: LayerwiseWhitener | None = None
        self._noise: dict[str, Factor] = {}

    @property
    def provenance(self) -> Provenance:
        return Provenance.RELEASED

    def at(self, step: int) -> Whitener:
        if is_due(self._refresh, self._made_at, step):
            self._build(step, self._running)
        assert self._whitener is not None
        return self._whitener

    def _build(self, step: int, factors: Factors) -> None:
        positive = {n: positive_part(own) for n, own in factors.layers.items()}
        known = Factors(positive, self.provenance)
        made = self._whitening.build(known, self._parameters, step)
        self._whitener, self._made_at, self._used = made, step, factors
        maps = {name: layer for layer in made.maps for name in layer.names}
        self._noise = {
            first: _noise(own, maps[first], self._parameters)
            for first, own in self._layers.items()
        }

    def observe(
        self, release: Release, rule: ClippingRule, expected_batch_size: float
    ) -> None:
        """Take a release into the averages, less what its noise adds to them."""
        plain, variances = self._unmapped(release, rule, expected_batch_size)
        latest = {
            first: _less(_squared(own, plain), self._noise[first], variances[first])
            for first, own in self._layers.items()
        }
        decay = self._refresh.decay
        new = Factors(latest, self.provenance).scaled(1 - decay)
        self._running = self._running.scaled(decay) + new

    def _unmapped(
        self, release: Release, rule: ClippingRule, expected_batch_size: float
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """The mean in the parameters' coordinates; the noise before the map."""
        values, _ = rule.read(release.values, expected_batch_size)
        variances = noise_variance(release, rule, expected_batch_size)
        mean = {n: v.double() / expected_batch_size for n, v in values.items()}
        back = self.at(release.step).inverse(mean)
        return back, {n: float(v) for n, v in variances.items()}

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"running": factors_state(self._running)}
        if self._made_at is None:
            return state
        return state | {"step": self._made_at, "used": factors_state(self._used)}

    def load(self, state: dict[str, Any]) -> None:
        self._begin()
        if not state:
            return
        device = next(iter(self._parameters.values())).device
        placed = on_device(state, device)
        self._running = factors_from_state(placed["running"])
        if "step" in placed:
            self._build(placed["step"], factors_from_state(placed["used"]))


def dense_layers(
    model: nn.Module, coverage: Coverage, largest: float = math.inf
) -> list[DenseMap]:
    """Linear layers and convolutions of a model, as matrices; not tied ones."""
    found = _layers(model, coverage, largest).values()
    return [layout for layout in found if isinstance(layout, DenseMap)]


def _layers(model: nn.Module, coverage: Coverage, largest: float) -> dict[str, _Layer]:
    """Every layer by its first parameter; those that a tie connects have no matrix."""
    modules = {c.site.parameters.get("weight"): c.site.name for c in coverage.covered}
    found: dict[str, _Layer] = {}
    for names in coverage.layers:
        layout = None
        if modules.get(names[0]) is not None:
            module = model.get_submodule(str(modules[names[0]]))
            layout = _layout(module, names, largest)
        found[names[0]] = layout or tuple(names)
    return found


def _layout(module: nn.Module, names: list[str], largest: float) -> DenseMap | None:
    if not isinstance(module, _DENSE) or len(names) > 2:
        return None
    weight = module.weight
    groups = 1 if isinstance(module, nn.Linear) else module.groups
    rows, columns = weight.shape[0] // groups, weight[0].numel() + len(names) - 1
    if max(rows, columns) > largest:
        return None
    bias = names[1] if len(names) == 2 else None
    return DenseMap(names[0], bias, weight.shape, groups)


def _squared(layer: _Layer, values: Mapping[str, Tensor]) -> Factor:
    """``G^T G`` and ``G G^T``, or squares, of one gradient."""
    if isinstance(layer, tuple):
        return DiagonalFactor({n: values[n].double().square() for n in layer}, 1.0)
    m = layer.matrix({n: values[n].double() for n in layer.names})
    inputs, outputs = (SecondMoment(1.0, matrix=x) for x in (m.mT @ m, m @ m.mT))
    return DenseFactor(layer.weight, layer.bias, inputs, outputs)


def _noise(layer: _Layer, own: LayerMap, like: Mapping[str, Tensor]) -> Factor:
    """The expectation of :func:`_squared` for ``P^-1 z``, z of variance 1."""
    wide = {n: like[n].double() for n in own.names}
    if isinstance(layer, tuple):
        return DiagonalFactor(own.row_sq_norms(wide, inverse=True), 1.0)
    if isinstance(own, KroneckerMap):
        m = own.matrix(wide)
        inputs, outputs = (
            root.inverse_times(root.inverse_times(_eye(x)))
            for root, x in ((own.right, m.mT), (own.left, m))
        )
        scale = own.scale**-2
        by_input, by_output = scale * _trace(outputs), scale * _trace(inputs)
    else:  # coordinates stay independent of each other
        m = layer.matrix(own.row_sq_norms(wide, inverse=True))
        inputs, outputs = (torch.diag_embed(m.sum(k)) for k in (-2, -1))
        by_input = by_output = torch.ones((), dtype=m.dtype, device=m.device)
    return DenseFactor(
        layer.weight,
        layer.bias,
        SecondMoment(1.0, matrix=by_input * inputs),
        SecondMoment(1.0, matrix=by_output * outputs),
    )


def _less(factor: Factor, noise: Factor, variance: float) -> Factor:
    if isinstance(factor, DiagonalFactor) and isinstance(noise, DiagonalFactor):
        squares = {
            n: s - variance * noise.squares[n] for n, s in factor.squares.items()
        }
        return DiagonalFactor(squares, factor.examples)
    assert isinstance(factor, DenseFactor) and isinstance(noise, DenseFactor)
    a, g = (
        SecondMoment(x.weight, matrix=x.total() - variance * y.total())
        for x, y in ((factor.a, noise.a), (factor.g, noise.g))
    )
    return DenseFactor(factor.weight, factor.bias, a, g)


def positive_part(factor: Factor) -> Factor:
    """What can be a second moment: without its negative part, which is noise."""
    if isinstance(factor, DiagonalFactor):
        squares = {n: s.clamp_min(0) for n, s in factor.squares.items()}
        return DiagonalFactor(squares, factor.examples)
    assert isinstance(factor, DenseFactor)
    a, g = (
        SecondMoment(x.weight, matrix=_cut(x.total())) for x in (factor.a, factor.g)
    )
    return DenseFactor(factor.weight, factor.bias, a, g)


def _cut(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    kept: Tensor = (vectors * values.clamp_min(0).unsqueeze(-2)) @ vectors.mT
    return kept


def _eye(m: Tensor) -> Tensor:
    """``[G, n, n]`` for ``m [G, n, _]``."""
    eye = torch.eye(m.shape[-2], dtype=m.dtype, device=m.device)
    return eye.expand(*m.shape[:-2], -1, -1)


def _trace(m: Tensor) -> Tensor:
    return m.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
