"""Before the first private step: parameters from public data.

The private data has no part in it: what comes out is a function of the initial
parameters, of the public dataset and of public random streams. A run that is resumed
without a checkpoint makes the same parameters again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from curvedp.barrier import Provenance
from curvedp.curvature.products import evaluated
from curvedp.errors import ConfigurationError
from curvedp.layers import PerExampleLoss, as_call
from curvedp.noise import RandomStreams, Stream
from curvedp.probes import Probe, PublicProbe
from curvedp.recipes.pretraining import Pretraining
from curvedp.train.datasets import moved
from curvedp.train.wrapped import set_training_mode

__all__ = ["pretrain", "public_examples"]


def public_examples(probe: Probe | None) -> PublicProbe:
    """The public dataset to pretrain on.

    Raises:
        ConfigurationError: there is none, or it is not one with examples.
    """
    if probe is None:
        raise ConfigurationError(
            "the recipe pretrains on public data, and none was given",
            "pass probes=PublicProbe(dataset) with labelled examples that are declared "
            "public (on the command line --public-data)",
        )
    if not isinstance(probe, PublicProbe) or probe.provenance is not Provenance.PUBLIC:
        raise ConfigurationError(
            f"the recipe pretrains on public examples, and a {type(probe).__name__} "
            "is not a set of them",
            "pass probes=PublicProbe(dataset)",
        )
    return probe


def pretrain(
    model: nn.Module,
    loss: PerExampleLoss,
    public: PublicProbe,
    how: Pretraining,
    streams: RandomStreams,
) -> None:
    """Move the model's trainable parameters by SGD on public examples.

    Args:
        model: its parameters are changed, its mode is not.
        loss: per-example loss; its mean over a batch is minimised.
        public: examples, with labels unless those are to be random.
        how: epochs, batch size, learning rate.
        streams: the public stream of pretraining is in them.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    device = parameters[0].device
    optimiser = torch.optim.SGD(
        parameters, lr=how.pretrain_learning_rate, momentum=how.pretrain_momentum
    )
    seed = streams.torch_seed(Stream.PRETRAINING) % 2**63
    generator = torch.Generator().manual_seed(seed)
    if how.pretrain_labels == "random":
        public = replace(public, dataset=_Relabelled(public, model, generator))
    was_training = model.training
    set_training_mode(model)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)  # dropout
        for _ in range(how.steps(len(public.dataset))):
            batch = public.labelled(how.pretrain_batch_size, generator)
            inputs, targets = moved((batch.inputs, batch.targets), device)
            inputs = tree_map(lambda x: _as(x, parameters[0].dtype), inputs)
            args, kwargs = as_call(inputs)
            optimiser.zero_grad()
            torch.autograd.backward(loss(model(*args, **kwargs), targets).mean())
            optimiser.step()
    set_training_mode(model, was_training)
    for parameter in parameters:
        parameter.grad = None  # one that is found later came from elsewhere
    if not all(bool(torch.isfinite(p).all()) for p in parameters):
        raise ConfigurationError(
            "pretraining on the public data diverged",
            "set a smaller pretrain_learning_rate",
        )


class _Relabelled:
    """The inputs of a public dataset, each with a random class that stays its own.

    A net that learns them has to tell the inputs apart; what it finds for that, edges
    and textures, is of use for other labels (Gu et al., section 4).

    Args:
        public: whose dataset.
        model: its outputs ``[B, classes]`` say how many classes there are.
        generator: draws them.
    """

    def __init__(
        self, public: PublicProbe, model: nn.Module, generator: torch.Generator
    ) -> None:
        self._dataset = public.dataset
        own = next(model.parameters())
        inputs = public.inputs(1, torch.Generator().manual_seed(0))
        placed = tree_map(lambda x: _as(x, own.dtype), moved(inputs, own.device))
        args, kwargs = as_call(placed)
        with evaluated(model), torch.no_grad():
            output = model(*args, **kwargs)
        if not isinstance(output, Tensor) or output.dim() != 2 or output.shape[1] < 2:
            raise ConfigurationError(
                "random labels are classes, and the model does not give one number for "
                "each class",
                "set pretrain_labels = 'own'",
            )
        rows = len(public.dataset)
        classes = torch.randint(output.shape[1], (rows,), generator=generator)
        self._labels = classes.tolist()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, row: int) -> tuple[Any, int]:
        example = self._dataset[row]
        pair = isinstance(example, tuple | list) and len(example) in (1, 2)
        return (example[0] if pair else example), self._labels[row]


def _as(x: object, dtype: torch.dtype) -> object:
    is_float = isinstance(x, torch.Tensor) and x.is_floating_point()
    return x.to(dtype) if is_float and isinstance(x, torch.Tensor) else x
