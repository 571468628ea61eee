"""From the layers' captured values to the one bounded sum that noise is added to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from curvedp.barrier import ClippedSum
from curvedp.clipping.rules import ClippingRule, Seen
from curvedp.cuda import own_values
from curvedp.errors import ConfigurationError
from curvedp.layers.grouping import grouped
from curvedp.layers.io import LayerIO, UnreachedIO
from curvedp.layers.precision import (
    ROUNDING,
    NormPrecision,
    compute_dtype,
    exact,
    norms_in,
    square_dtype,
)
from curvedp.whitening.base import Part, Whitener, parts_of

__all__ = ["clipped_sum", "own_copy"]

#: A clipped example whose terms add up to more than this many times the bound is hardly
#: there: it has cancelled to less than a 2000th. In float32 its terms would be rounded
#: to more than the last digits of the bound, and differently with and without others.
LARGEST_REACH = 2.0**11

#: The same for float64. What is left of such an example is rounding and nothing else.
LARGEST_WIDE_REACH = 2.0**40


def clipped_sum(
    ios: Sequence[LayerIO],
    rule: ClippingRule,
    whitener: Whitener,
    *,
    parameters: Mapping[str, Tensor],
    present: Tensor,
    step: int,
    scale: float = 1.0,
    slots: int = 1,
    branch_free: bool = False,
    norms: NormPrecision = NormPrecision.WIDE,
    expected: float = 0.0,
) -> ClippedSum:
    r"""``sum_i c_i P g_i`` over the units (examples or persons) that are present.

    A map of several parts (:class:`curvedp.whitening.Parted`) has a weight for each:
    ``sum_i sum_k c_ik P_k g_i``, part k clipped to its share of the bound.

    Args:
        ios: one LayerIO for each site of the model.
        rule: gives ``c_i`` from the norms ``||P g_i||``.
        whitener: P.
        parameters: all trained parameters. Each has an entry in the sum, also one that
            this batch did not reach: which ones it reached is private.
        present: ``[B]``, True for rows with an example, False for padding.
        step: the logical step.
        scale: what ``g_i`` are to be multiplied with first (a loss averaged over the
            physical batch has gradients that are B times too small).
        slots: rows of one unit: 1 if the unit is the example, K if it is the person,
            whose rows stand together and are clipped as one.
        branch_free: do the same operations whatever the values are, as a CUDA graph
            needs; otherwise the CPU looks whether there is anything to replace.
        norms: precision of the norms; the bound holds in each.
        expected: declared batch size of the step, of which this is a part.

    Guarantees:
        One unit moves the sum by at most ``rule.bound`` in L2 norm, whatever it is.
        What float32 additions round away depends on everybody in the batch; layers in
        which an example cancels (``LARGEST_REACH``) are therefore added up in float64.
        In a graph, or if that is not enough (``LARGEST_WIDE_REACH``), such an example
        contributes zero.
        An example with a non-finite value anywhere, or a norm that overflows,
        contributes exactly zero, and leaves the others as they are.
    """
    first = next(iter(parameters.values()))
    device = first.device
    parts = _checked(parts_of(whitener))
    present = present.to(device)
    with exact(device), norms_in(norms):
        if slots > 1:
            # a slot without an example is padding, whose gradient is not zero
            ios = [grouped(io.keep(present), slots) for io in ios]
            present = present.reshape(-1, slots).any(1)
        # [K, L, B]: each part of the map is clipped by itself; mostly there is one
        sq_norms = scale**2 * torch.stack(
            [torch.stack([own.whitener.sq_norms(io) for io in ios]) for own in parts]
        )
        # what a float32 cannot hold counts as non-finite
        finite = torch.isfinite(sq_norms.sum((0, 1)).float())
        if branch_free or not bool(finite.all()):
            # Replaced, not weighted by zero: 0 * nan is nan and would reach everybody.
            ios = [io.keep(finite) for io in ios]
            sq_norms = torch.where(finite, sq_norms, torch.zeros_like(sq_norms))
        kept = finite & present
        rules = [rule.of_part(own.share) for own in parts]
        weights = torch.stack(
            [own.weights(n) for own, n in zip(rules, sq_norms, strict=True)]
        )
        weights = torch.where(kept, weights, torch.zeros_like(weights)) * scale
        weights = weights * _kept_of_bound(max(2 * expected, len(kept)), first)
        narrow, all_of_it = _cancelling(ios, weights, parts, rule.bound)
        dropped = (narrow | all_of_it if branch_free else all_of_it).flatten(0, 1)
        kept = kept & ~dropped.any(0)
        weights = torch.where(kept, weights, torch.zeros_like(weights))
        wide = [[False] * len(ios)] * len(parts)
        if not branch_free:
            wide = narrow.any(2).tolist()
        mapped: dict[str, Tensor] = {}
        for own, weight, widened in zip(parts, weights, wide, strict=True):
            total = _weighted_sum(ios, weight, parameters, own.whitener, widened)
            for name, value in own.whitener.apply(total).items():
                mapped[name] = mapped[name] + value if name in mapped else value
        summed = {n: v.to(compute_dtype(parameters[n])) for n, v in mapped.items()}
        summed |= rule.extras(Seen(ios, sq_norms.flatten(0, 1), kept, scale))
        return ClippedSum(summed, rule.bound, whitener.frame, step)


def _weighted_sum(
    ios: Sequence[LayerIO],
    weights: Tensor,
    parameters: Mapping[str, Tensor],
    whitener: Whitener,
    widened: Sequence[bool],
) -> dict[str, Tensor]:
    """``sum_i c_i g_i`` with weights ``[L, B]``, an entry for every parameter."""
    found: dict[str, Tensor] = {}
    for io, weight, wide in zip(ios, weights, widened, strict=True):
        # a map may stretch the sum's rounding: it says how precise it has to be
        dtype = square_dtype(weight) if wide else whitener.sum_dtype(io)
        for name, part in io.weighted_sum(weight, dtype).items():
            found[name] = found[name] + part if name in found else part
    total = {}
    for name, p in parameters.items():
        own = compute_dtype(p)
        if name in found:
            total[name] = found[name].to(torch.promote_types(own, found[name].dtype))
        else:
            total[name] = torch.zeros(p.shape, device=p.device, dtype=own)
    return total


def _kept_of_bound(units: float, like: Tensor) -> float:
    """What is left of the bound for the rounding of a sum of so many units.

    A float32 number of the size of B bounds has a last digit of ``B 2^-23`` bounds. In
    the worst batch that we know, equal examples, neighbours round apart by half of it.
    """
    return max(0.5, 1 - 2 * ROUNDING[compute_dtype(like)] * units)


def _cancelling(
    ios: Sequence[LayerIO], weights: Tensor, parts: Sequence[Part], bound: float
) -> tuple[Tensor, Tensor]:
    """Who reaches too far for a layer's float32 sum, and who for any, ``[K, L, B]``."""
    narrow = torch.zeros(weights.shape, dtype=torch.bool, device=weights.device)
    all_of_it = narrow.clone()
    for k, own in enumerate(parts):
        for layer, io in enumerate(ios):
            wide = own.whitener.sum_dtype(io) is torch.float64
            reach = _reach(io, own.whitener, wide)
            if reach is None:
                continue
            # an infinite reach times a weight of zero is no number
            share = (reach * weights[k, layer] / bound).nan_to_num(nan=torch.inf)
            all_of_it[k, layer] = share > LARGEST_WIDE_REACH
            if not wide:
                narrow[k, layer] = share > LARGEST_REACH
    return narrow, all_of_it


def _reach(io: LayerIO, whitener: Whitener, wide: bool) -> Tensor | None:
    """The most that an example's terms add up to under the map; None if not too far."""
    if isinstance(io, UnreachedIO):
        return None
    reach, stretch = io.reach(), whitener.stretch(io)
    if reach is None and (wide or stretch == 1):
        return None  # not much longer than the gradient itself, which is clipped
    return stretch * (io.spread()[0] if reach is None else reach)


def _checked(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Parts whose shares of the bound make up no more than the bound."""
    if sum(own.share**2 for own in parts) > 1 + 1e-12:
        raise ConfigurationError(
            "the parts of a map have more than the whole clip bound between them",
            "give them shares whose squares add up to at most 1",
        )
    return parts


def own_copy(part: ClippedSum, step: int) -> ClippedSum:
    """The same sum, as of a step, in memory of its own.

    For a part that lies where the next one will be computed.
    """
    return ClippedSum(own_values(part.values), part.bound, part.frame, step)
