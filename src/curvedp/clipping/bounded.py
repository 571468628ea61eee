"""From the layers' captured values to the one bounded sum that noise is added to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from curvedp.barrier import ClippedSum
from curvedp.clipping.rules import ClippingRule, Seen
from curvedp.cuda import own_values
from curvedp.errors import ConfigurationError
from curvedp.layers.grouping import grouped
from curvedp.layers.io import LayerIO
from curvedp.layers.precision import (
    ROUNDING,
    NormPrecision,
    compute_dtype,
    exact,
    norms_in,
)
from curvedp.layers.rounding import REACH
from curvedp.whitening.base import Part, Whitener, parts_of

__all__ = [
    "Replacing",
    "clipped_sum",
    "kept_of_bound",
    "own_copy",
    "where_needed",
]

#: Whether rows are replaced, from which of them are finite ``[B]``.
Replacing = Callable[[Tensor], bool]


def where_needed(finite: Tensor) -> bool:
    """If there is anything to replace. The CPU waits for the answer."""
    return not bool(finite.all())


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
    replacing: Replacing = where_needed,
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
        replacing: whether the rows of non-finite examples are replaced. Where it says
            no although there are such rows, the sum must be thrown away.
        norms: precision of the norms; the bound holds in each.
        expected: declared batch size of the step, of which this is a part.

    Guarantees:
        One unit moves the sum by at most ``rule.bound`` in L2 norm, whatever it is.
        What additions round away depends on everybody in the batch. Norms therefore
        count what hardly leaves anything for more than it is, and contributions are
        shortened a little (:func:`curvedp.layers.rounding.counted`; proven in part,
        docs/theory.md, "What the bound rests on").
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
        finite = _is_finite(sq_norms.sum((0, 1)).float())
        if replacing(finite):
            # Replaced, not weighted by zero: 0 * nan is nan and would reach everybody.
            ios = [io.keep(finite) for io in ios]
            sq_norms = torch.where(finite, sq_norms, torch.zeros_like(sq_norms))
        kept = finite & present
        shortened = scale * kept_of_bound(max(2 * expected, len(kept)), first)
        mapped: dict[str, Tensor] = {}
        for own, lengths in zip(parts, sq_norms, strict=True):
            weights = rule.of_part(own.share).weights(lengths)
            weights = torch.where(kept, weights, torch.zeros_like(weights)) * shortened
            total = _weighted_sum(ios, weights, parameters, own.whitener)
            for name, value in own.whitener.apply(total).items():
                mapped[name] = mapped[name] + value if name in mapped else value
        summed = {n: v.to(compute_dtype(parameters[n])) for n, v in mapped.items()}
        summed |= rule.extras(Seen(ios, sq_norms.flatten(0, 1), kept, scale))
        return ClippedSum(summed, rule.bound, whitener.frame, step)


def _is_finite(x: Tensor) -> Tensor:
    """As ``torch.isfinite``, in two operations: no other number less itself is zero."""
    return x - x == 0


def _weighted_sum(
    ios: Sequence[LayerIO],
    weights: Tensor,
    parameters: Mapping[str, Tensor],
    whitener: Whitener,
) -> dict[str, Tensor]:
    """``sum_i c_i g_i`` with weights ``[L, B]``, an entry for every parameter."""
    found: dict[str, Tensor] = {}
    for io, weight in zip(ios, weights, strict=True):
        # a map may stretch the sum's rounding: it says how precise it has to be
        dtype = whitener.sum_dtype(io)
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


def kept_of_bound(units: float, like: Tensor) -> float:
    """What is left of the bound for the rounding of a sum of so many units.

    ``1 - 2 u (B + sqrt(B) REACH)``. A float32 number of the size of B bounds has a last
    digit of ``B 2^-23`` bounds, and where examples are equal, neighbours round apart by
    half of it. Where all terms cancel, each is rounded to a last digit of
    ``REACH 2^-23`` bounds, this way or that: neighbours were seen to round apart by 1.3
    of ``u sqrt(B) REACH``.
    """
    dtype = compute_dtype(like)
    rounded = ROUNDING[dtype] * (units + math.sqrt(units) * REACH[dtype])
    return max(0.5, 1 - 2 * rounded)


def _checked(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Parts whose shares of the bound make up no more than the bound."""
    if sum(own.share**2 for own in parts) > 1 + 1e-12:
        raise ConfigurationError(
            "the parts of a map have more than the whole clip bound between them",
            "give them shares whose squares add up to at most 1",
        )
    return parts


def own_copy(part: ClippedSum, step: int, frame: str) -> ClippedSum:
    """The same sum, as of a step and a whitener, in memory of its own.

    For a part that lies where the next one will be computed.
    """
    return ClippedSum(own_values(part.values), part.bound, frame, step)
