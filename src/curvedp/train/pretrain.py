"""Before the first private step: parameters from public data.

The private data has no part in it: what comes out is a function of the initial
parameters, of the public dataset and of public random streams. A run that is resumed
without a checkpoint makes the same parameters again.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils._pytree import tree_map

from curvedp.barrier import Provenance
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
        public: labelled examples.
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


def _as(x: object, dtype: torch.dtype) -> object:
    is_float = isinstance(x, torch.Tensor) and x.is_floating_point()
    return x.to(dtype) if is_float and isinstance(x, torch.Tensor) else x
