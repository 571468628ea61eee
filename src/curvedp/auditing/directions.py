"""What a canary would add to a sum at a step: its mapped and clipped gradient."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvedp.clipping import ClippingRule
from curvedp.layers import LayerIO
from curvedp.whitening import Whitener, parts_of

__all__ = ["Directions"]


@dataclass(frozen=True)
class Directions:
    """The clipped, mapped gradients ``v_i = sum_k c_ik P_k g_i`` of some examples.

    Attributes:
        ios: of a pass over the examples.
        whitener: the map P, of one part or several.
        rule: gives the weights ``c_ik``.
    """

    ios: Sequence[LayerIO]
    whitener: Whitener
    rule: ClippingRule

    def sq_norms(self) -> Tensor:
        """``||v_i||^2``, ``[B]``."""
        total: Tensor | float = 0.0
        for _, norms, weights in self._parts():
            total = total + (weights.double() ** 2 * norms.double()).sum(0)
        assert isinstance(total, Tensor)
        return total

    def projections(self, residual: Mapping[str, Tensor]) -> Tensor:
        """``<r, v_i> = sum_k c_ik <P_k^T r, g_i>``, ``[B]``; no ``v_i`` is written."""
        device = next(iter(residual.values())).device
        total = torch.zeros(self._count, dtype=torch.float64, device=device)
        gradients = [io.per_example() for io in self.ios]
        for whitener, _, weights in self._parts():
            back = whitener.adjoint(residual)
            for own, weight in zip(gradients, weights.double(), strict=True):
                for name, g in own.items():
                    total += weight * (
                        g.flatten(1).double() @ back[name].flatten().double()
                    )
        return total

    def written(self, like: Mapping[str, Tensor]) -> Tensor:
        """All ``v_i``, ``[B, d]``, parameters in the order of ``like``."""
        gradients = [io.per_example() for io in self.ios]
        total: Tensor | float = 0.0
        for whitener, _, weights in self._parts():
            values = {n: v.new_zeros(self._count, *v.shape) for n, v in like.items()}
            for own, weight in zip(gradients, weights, strict=True):
                for name, g in own.items():
                    shaped = weight.reshape(-1, *[1] * (g.dim() - 1))
                    values[name] = values[name] + shaped.to(g.dtype) * g
            mapped = _each(whitener, values, self._count)
            flat = torch.cat([mapped[name].flatten(1) for name in like], 1)
            total = total + flat
        assert isinstance(total, Tensor)
        return total

    @property
    def _count(self) -> int:
        return self.ios[0].batch_size

    def _parts(self) -> Iterator[tuple[Whitener, Tensor, Tensor]]:
        for own in parts_of(self.whitener):
            norms = torch.stack([own.whitener.sq_norms(io) for io in self.ios])
            yield own.whitener, norms, self.rule.of_part(own.share).weights(norms)


def _each(
    whitener: Whitener, values: Mapping[str, Tensor], count: int
) -> dict[str, Tensor]:
    """The map of every example; all at once where the map's operations allow it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of operations that are done one by one
            found: dict[str, Tensor] = torch.func.vmap(whitener.apply)(dict(values))
        return found
    except RuntimeError:
        one_by_one = [
            whitener.apply({n: v[i] for n, v in values.items()}) for i in range(count)
        ]
        return {n: torch.stack([own[n] for own in one_by_one]) for n in values}
