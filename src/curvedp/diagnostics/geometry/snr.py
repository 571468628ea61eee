r"""Signal to noise of every layer, as clipping and noise leave it (DP-KFC, figure 1).

With the map P, clip weights ``c_i``, noise multiplier s, bound C, expected batch size B
and ``d_l`` parameters in layer l, a step releases
``sum_i c_i P g_i + N(0, (s C)^2 I)``. Divided by B, layer l of it has

- the signal ``|| mean_i c_i (P g_i)_l ||``, over the examples of the source;
- the noise ``s C sqrt(d_l) / B``, the root of its mean square norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from curvedp.clipping import ClippingRule, clipped_sum
from curvedp.diagnostics.geometry.study import Source, Study
from curvedp.layers import LayerIO
from curvedp.whitening import Whitener

__all__ = ["LayerSignal", "signal_to_noise"]


@dataclass(frozen=True)
class LayerSignal:
    """Signal and noise of a layer.

    Attributes:
        layer: name of the layer's first parameter.
        parameters: ``d_l``.
        signal: ``|| mean_i c_i (P g_i)_l ||``.
        noise: ``s C sqrt(d_l) / B``.
    """

    layer: str
    parameters: int
    signal: float
    noise: float

    @property
    def ratio(self) -> float:
        """Signal / noise."""
        return self.signal / self.noise if self.noise > 0 else math.inf

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "signal_to_noise": self.ratio}


def signal_to_noise(
    study: Study,
    source: Source,
    whiteners: Mapping[str, Whitener],
    rule: ClippingRule,
    *,
    noise_multiplier: float,
    expected_batch_size: float,
    seed: int = 0,
) -> dict[str, list[LayerSignal]]:
    """Signal to noise of every layer under several maps, on the same gradients.

    Clipping is that of the private engine, over all layers together; so a map moves the
    signal of a layer through its own scale and through everybody's norm.

    Args:
        study: the model.
        source: whose gradients; those of an oracle are not private, nor is the result.
        whiteners: maps by name; the identity is plain DP-SGD.
        rule: clip rule and C.
        noise_multiplier: s.
        expected_batch_size: B.
        seed: of the source's draw.
    """
    sums: dict[str, dict[str, Tensor]] = {name: {} for name in whiteners}
    examples = 0
    for ios in study.batches(source, seed):
        examples += ios[0].batch_size
        for name, whitener in whiteners.items():
            for key, value in _clipped(study, ios, rule, whitener).items():
                before = sums[name].get(key)
                sums[name][key] = value if before is None else before + value
    noise = noise_multiplier * rule.bound / expected_batch_size
    return {
        name: [_layer(layer, total, examples, noise) for layer in study.coverage.layers]
        for name, total in sums.items()
    }


def _clipped(
    study: Study, ios: list[LayerIO], rule: ClippingRule, whitener: Whitener
) -> dict[str, Tensor]:
    present = torch.ones(ios[0].batch_size, dtype=torch.bool)
    parameters = study.parameters
    # a rule that learns starts from its first threshold
    at_start = rule.at(rule.first_threshold())
    total = clipped_sum(
        ios, at_start, whitener, parameters=parameters, present=present, step=0
    )
    return {name: total.values[name].double() for name in parameters}


def _layer(
    names: Iterable[str], total: Mapping[str, Tensor], examples: int, noise: float
) -> LayerSignal:
    values = {name: total[name] for name in names}
    size = sum(v.numel() for v in values.values())
    square = sum(float(v.square().sum()) for v in values.values())
    return LayerSignal(
        next(iter(values)), size, math.sqrt(square) / examples, noise * math.sqrt(size)
    )
