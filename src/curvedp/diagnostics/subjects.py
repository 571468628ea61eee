"""From a name on the command line to a model and inputs to try it on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_with_path

from curvedp import models
from curvedp.errors import ConfigurationError
from curvedp.layers import Batch, Synthesiser, synthesiser_like
from curvedp.models.factory import call_factory, is_factory

__all__ = ["Subject", "load_subject"]

_OUTPUTS = 10


@dataclass(frozen=True)
class Subject:
    """What is examined.

    Attributes:
        name: ``module:factory``, or the name of a built-in model.
        model: as the factory made it.
        synthetic: makes synthetic batches of its inputs.
        inputs: the inputs in words.
    """

    name: str
    model: nn.Module
    synthetic: Synthesiser
    inputs: str


def load_subject(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    input_shape: tuple[int, ...] | None = None,
    input_dtype: str = "float",
    vocabulary: int | None = None,
) -> Subject:
    """Call a factory that gives a model, or a model and example inputs.

    Args:
        name: ``module:factory``, or the name of a built-in model.
        options: keywords for the factory. It is given ``input_shape``, too, if it names
            that and the shape is known.
        input_shape: shape of one input; in place of the factory's example inputs.
        input_dtype: "float" or "int", of inputs by shape.
        vocabulary: token ids are drawn below this, not below the smallest table.

    Raises:
        ConfigurationError: there is no such factory, or it gives something else.
    """
    _check(input_dtype, input_shape, vocabulary)
    made = _make(name, dict(options or {}), input_shape)
    model, example = made, None
    if isinstance(made, tuple | list) and len(made) == 2:
        model, example = made
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"{name} gave a {type(model).__name__}, not a torch module",
            "return a model, or a pair (model, example_inputs)",
        )
    words = "the factory's example inputs"
    if input_shape is not None:
        dtype = torch.float32 if input_dtype == "float" else torch.int64
        example = torch.zeros(2, *input_shape, dtype=dtype)
        words = f"{list(input_shape)} {input_dtype}"
    if example is None:
        raise ConfigurationError(
            f"{name} gave no example inputs",
            "say --input-shape 3,32,32, or return (model, example_inputs)",
        )
    synthetic = synthesiser_like(Batch(example, None), model)
    if vocabulary is not None:
        synthetic = _with_vocabulary(synthetic, vocabulary)
        words += f", token ids below {vocabulary}"
    return Subject(name, model, synthetic, words)


def _check(dtype: str, shape: tuple[int, ...] | None, vocabulary: int | None) -> None:
    if dtype not in ("float", "int"):
        raise ConfigurationError(
            f"unknown input dtype {dtype!r}", "choose float or int"
        )
    if shape is not None and any(n < 1 for n in shape):
        raise ConfigurationError(
            f"the input shape {list(shape)} has a size below 1",
            "give the shape of one example, without the batch",
        )
    if vocabulary is not None and vocabulary < 1:
        raise ConfigurationError(f"the vocabulary is {vocabulary}", "use 1 or more")


def _make(name: str, options: dict[str, Any], shape: tuple[int, ...] | None) -> Any:
    if is_factory(name):
        offered = {} if shape is None else {"input_shape": shape}
        return call_factory(name, offered, options)
    if shape is None:
        raise ConfigurationError(
            f"the built-in model {name!r} is built for a shape",
            "say --input-shape 3,32,32, or name a factory as module:factory",
        )
    outputs = options.pop("num_outputs", _OUTPUTS)
    return models.build(name, shape, outputs, **options)


def _with_vocabulary(synthesise: Synthesiser, vocabulary: int) -> Synthesiser:
    """Integer inputs drawn anew, below the vocabulary; masks stay as they are."""

    def make(size: int, generator: torch.Generator) -> Batch:
        batch = synthesise(size, generator)

        def draw(path: Any, x: Any) -> Any:
            is_mask = "mask" in str(path).lower()
            if not isinstance(x, torch.Tensor) or x.dtype == torch.bool or is_mask:
                return x
            if x.is_floating_point():
                return x
            ids = torch.randint(0, vocabulary, x.shape, generator=generator)
            return ids.to(x.device, x.dtype)

        return Batch(tree_map_with_path(draw, batch.inputs), batch.targets)

    return make
