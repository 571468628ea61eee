"""Factors as nested dictionaries of numbers, names and tensors, and back."""

from __future__ import annotations

from typing import Any

from curvedp.barrier import Provenance
from curvedp.curvature.factors import (
    DenseFactor,
    DiagonalFactor,
    Factor,
    Factors,
    LookupFactor,
    SketchFactor,
)
from curvedp.curvature.moment import SecondMoment

__all__ = ["factors_from_state", "factors_state"]


def factors_state(factors: Factors) -> dict[str, Any]:
    """All of it, for a checkpoint."""
    layers = {name: _layer_state(layer) for name, layer in factors.layers.items()}
    return {"provenance": factors.provenance.value, "layers": layers}


def factors_from_state(state: dict[str, Any]) -> Factors:
    """What :func:`factors_state` stored."""
    layers = {name: _layer(own) for name, own in state["layers"].items()}
    return Factors(layers, Provenance(state["provenance"]))


def _layer_state(layer: Factor) -> dict[str, Any]:
    if isinstance(layer, DenseFactor):
        moments = {"a": _moment_state(layer.a), "g": _moment_state(layer.g)}
        return {"kind": "dense", "weight": layer.weight, "bias": layer.bias, **moments}
    if isinstance(layer, LookupFactor):
        return {
            "kind": "lookup",
            "weight": layer.weight,
            "counts": layer.counts,
            "tokens": layer.tokens,
            "g": _moment_state(layer.g),
        }
    if isinstance(layer, SketchFactor):
        shapes = {name: list(shape) for name, shape in layer.shapes.items()}
        own = {"sketch": layer.sketch, "examples": layer.examples}
        return {"kind": "sketch", "shapes": shapes, **own}
    squares = dict(layer.squares)
    return {"kind": "diagonal", "squares": squares, "examples": layer.examples}


def _layer(state: dict[str, Any]) -> Factor:
    own = {k: v for k, v in state.items() if k != "kind"}
    own |= {name: SecondMoment(**own[name]) for name in ("a", "g") if name in own}
    if state["kind"] == "sketch":
        own["shapes"] = {name: tuple(shape) for name, shape in own["shapes"].items()}
    kinds = {
        "dense": DenseFactor,
        "lookup": LookupFactor,
        "diagonal": DiagonalFactor,
        "sketch": SketchFactor,
    }
    layer: Factor = kinds[state["kind"]](**own)
    return layer


def _moment_state(moment: SecondMoment) -> dict[str, Any]:
    kept = {"rows": moment.rows, "matrix": moment.matrix}
    return {"weight": moment.weight} | {k: v for k, v in kept.items() if v is not None}
