r"""DP-NGD's map: eigenpairs of a refresh, and the floor of each step under them.

The eigenpairs are found once and kept; the floor moves at every step (Algorithm 2,
lines 9 to 12). So a step makes new scales and nothing else, and has a frame of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from curvedp.curvature import (
    DenseFactor,
    DiagonalFactor,
    Factors,
    LookupFactor,
    spectral,
)
from curvedp.whitening.base import Whitener
from curvedp.whitening.build import KroneckerWhitening, lookup_shares
from curvedp.whitening.diagonal import DiagonalMap
from curvedp.whitening.joint import JointMap, matched_floor
from curvedp.whitening.layerwise import LayerwiseWhitener, digest_of
from curvedp.whitening.maps import IdentityMap, LayerMap
from curvedp.whitening.subspace import SubspaceWhitening

__all__ = ["ClampedCurvature", "JointWhitening", "step_by_step"]

#: A layer as a map whose floor is replaced, or eigenvalues of each of its coordinates.
_Layer = JointMap | Mapping[str, Tensor]


@dataclass(frozen=True)
class JointWhitening:
    """DP-NGD: the products of eigenvalues, clamped from below.

    Attributes:
        ratio: ``eta_ngd C_ngd / (eta_sgd C_sgd)``.
        matched: the floor that bounds the noise's displacement as a whole; False takes
            ``ratio^2`` as printed in the paper.
        share: of the safe floor, by step; None clamps at the safe floor throughout.
        clamp: False clamps (almost) nothing, to show what then happens.
        exponent: of the products; 1/2 whitens.
    """

    ratio: float
    matched: bool = True
    share: Callable[[int], float] | None = None
    clamp: bool = True
    exponent: float = 0.5

    def build(
        self, factors: Factors, parameters: Mapping[str, Tensor], step: int = 0
    ) -> LayerwiseWhitener:
        """The whitener of the factors at a step."""
        return self.clamped(factors, parameters).at(step)

    def clamped(
        self, factors: Factors, parameters: Mapping[str, Tensor]
    ) -> ClampedCurvature:
        """What is computed once of the factors, for the maps of many steps."""
        return ClampedCurvature(self, factors, parameters)


class ClampedCurvature:
    """Eigenvalues and eigenvectors, and the map that they make above a step's floor.

    Args:
        how: the floor's rule and the exponent.
        factors: what the eigenpairs are of.
        parameters: of these shapes.
    """

    def __init__(
        self,
        how: JointWhitening,
        factors: Factors,
        parameters: Mapping[str, Tensor],
    ) -> None:
        self._how = how
        self._provenance = factors.provenance
        self._parameters = {n: p.shape for n, p in parameters.items()}
        self._device = next(iter(parameters.values())).device
        self._layers = self._unclamped(factors)
        self._id = digest_of([_facts(layer) for layer in self._layers])
        self._safe = self._safe_floor(factors)
        self._last: tuple[float, LayerwiseWhitener] | None = None

    def floor(self, step: int) -> float:
        """The smallest eigenvalue that a step's map counts with."""
        share = self._how.share
        scheduled = self._how.clamp and share is not None
        return self._safe * float(share(step)) if share and scheduled else self._safe

    def at(self, step: int) -> LayerwiseWhitener:
        """The whitener of a step."""
        floor = self.floor(step)
        if self._last is None or self._last[0] != floor:
            self._last = floor, self._above(floor)
        return self._last[1]

    def _above(self, floor: float) -> LayerwiseWhitener:
        # on the device, so that a recorded step finds the next one at the same place
        placed = torch.full((), floor, dtype=torch.float64, device=self._device)
        maps = [self._map(layer, placed) for layer in self._layers]
        known = {name for own in maps for name in own.names}
        rest = tuple(name for name in self._parameters if name not in known)
        if rest:
            maps.append(IdentityMap(rest))
        # eigenvectors are not read again at every step to tell one map from another
        frame = digest_of([self._id, floor, self._how.exponent])
        return LayerwiseWhitener(maps, self._parameters, self._provenance, frame)

    def _map(self, layer: _Layer, floor: Tensor) -> LayerMap:
        if isinstance(layer, JointMap):
            return replace(layer, floor=floor)
        scales = {
            n: v.clamp_min(floor) ** -self._how.exponent for n, v in layer.items()
        }
        shapes = self._parameters
        return DiagonalMap(
            {n: s.expand(shapes[n]).contiguous() for n, s in scales.items()}
        )

    def _unclamped(self, factors: Factors) -> list[_Layer]:
        found: list[_Layer] = []
        for factor in factors.layers.values():
            if isinstance(factor, DenseFactor):
                a, g = factor.a.spectrum(), factor.g.spectrum()
                layout = factor.weight, factor.bias, self._parameters[factor.weight]
                pairs = a.vectors, a.values, g.vectors, g.values
                exponent = self._how.exponent
                own = JointMap(*layout, factor.a.groups, *pairs, 0.0, exponent)
                found.append(own)
            elif isinstance(factor, LookupFactor):
                found.append({factor.weight: _lookup_products(factor)[:, None]})
            else:
                own_values = spectral(factor)
                assert isinstance(own_values, DiagonalFactor)
                found.append({n: own_values.mean(n) for n in own_values.squares})
        return found

    def _safe_floor(self, factors: Factors) -> float:
        if not self._how.clamp:
            return 1e-12
        if self._how.matched:
            return matched_floor(self._products(factors), self._how.ratio)
        return self._how.ratio**2

    def _products(self, factors: Factors) -> list[tuple[Tensor, int]]:
        """Eigenvalues of every layer, and how many more are zero."""
        found = []
        for factor, layer in zip(factors.layers.values(), self._layers, strict=True):
            if isinstance(layer, JointMap):
                assert isinstance(factor, DenseFactor)
                size = factor.a.groups * factor.a.size * factor.g.size
                found.append((layer.products, size - layer.products.numel()))
            elif isinstance(factor, LookupFactor):
                rows = layer[factor.weight].flatten()
                found.append((rows.repeat(factor.g.size), 0))
            elif isinstance(factor, DiagonalFactor):
                found += [(values, 0) for values in layer.values()]
        return found


def step_by_step(
    whitening: KroneckerWhitening | JointWhitening | SubspaceWhitening,
    factors: Factors,
    parameters: Mapping[str, Tensor],
    made_at: int,
) -> Callable[[int], Whitener]:
    """The map of every step from a refresh on, until the next one."""
    if isinstance(whitening, JointWhitening):
        return whitening.clamped(factors, parameters).at
    made = whitening.build(factors, parameters, made_at)
    return lambda _: made


def _facts(layer: _Layer) -> list[object]:
    """What a layer's map is made of, whatever the floor."""
    if isinstance(layer, JointMap):
        return [list(layer.names), layer.tensors()]
    return [dict(layer)]


def _lookup_products(factor: LookupFactor) -> Tensor:
    """Of an embedding's rows, each with the mean eigenvalue of G, ``[V]``."""
    mean = float(factor.g.trace().mean()) / factor.g.size
    return lookup_shares(factor) * mean
